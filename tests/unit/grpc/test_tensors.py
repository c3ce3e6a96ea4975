"""Tensors are unchanged by a worker's round trip, typed or raw; errors name the invalid one."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.codec import msgpack_decode, msgpack_encode
from dynamo.core.errors import InvalidArgument, Unknown
from dynamo.grpc.messages import CLASSES
from dynamo.grpc.tensors import TENSOR_TYPES, TensorResponse, TensorType, request_of, response_message


def values_of(kind: TensorType) -> st.SearchStrategy[Any]:
    if kind.name == "Bytes":
        return st.binary(max_size=9)
    if kind.name == "Bool":
        return st.booleans()
    if kind.name.startswith("Float") and kind.contents:
        return st.floats(width=32 if kind.name == "Float32" else 64, allow_nan=False)
    limits = np.iinfo(kind.numpy)
    return st.integers(limits.min, limits.max)


@st.composite
def requests(draw: st.DrawFn) -> Any:
    """A request of some tensors, all raw or all typed."""
    message = CLASSES["ModelInferRequest"](model_name="m", id=draw(st.sampled_from(["", "7"])))
    is_raw = draw(st.booleans())
    for place in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([one for one in TENSOR_TYPES if is_raw or one.contents]))
        rows = draw(st.lists(st.lists(values_of(kind), min_size=2, max_size=2), max_size=3))
        values = [value for row in rows for value in row]
        tensor = message.inputs.add(name=f"t{place}", datatype=kind.wire, shape=[len(rows), 2])
        tensor.parameters["p"].bool_param = True
        if not is_raw:
            getattr(tensor.contents, kind.contents).extend(values)
        elif kind.name == "Bytes":
            message.raw_input_contents.append(b"".join(len(one).to_bytes(4, "little") + one for one in values))
        else:
            message.raw_input_contents.append(np.array(values, kind.numpy).tobytes())
    return message


@settings(max_examples=40, deadline=None)
@given(requests())
def test_echoed_tensors_round_trip(message: Any) -> None:
    sent = msgpack_decode(msgpack_encode(request_of(message)))
    response = msgspec.convert(sent, TensorResponse)
    answer = response_message(response, bool(message.raw_input_contents))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", message.id)
    assert list(answer.raw_output_contents) == list(message.raw_input_contents)
    assert [one.SerializeToString() for one in answer.outputs] == [one.SerializeToString() for one in message.inputs]


def request(datatype: str = "INT32", shape: Any = (2,), raw: bytes | None = None, **contents: Any) -> Any:
    message = CLASSES["ModelInferRequest"](model_name="m")
    message.inputs.add(name="a", datatype=datatype, shape=shape, contents=CLASSES["InferTensorContents"](**contents))
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (request("FOO"), "datatype is 'FOO'"),
        (request(shape=[-1]), "negative dimension: -1"),
        (request(int_contents=[1]), "has 2 elements, but its contents 1"),
        (request(fp32_contents=[1, 2]), "its contents 0"),
        (request("FP16", fp32_contents=[1, 2]), "raw_input_contents"),
        (request("INT8", int_contents=[1, 128]), "out of range of INT8: expected -128 to 127"),
        (request("UINT8", uint_contents=[1, 256]), "out of range of UINT8"),
        (request(raw=b"\0\0\0"), "not a multiple of 4"),
        (request(raw=b"\0" * 12), "its contents 3"),
        (request("BYTES", [1], b"\5\0\0\0x"), "end within element 0"),
        (request("BYTES", [1], b"\1\0\0\0x\0"), "end within element 1"),
    ],
)
def test_invalid_tensor_is_refused_by_name(message: Any, expected_message: str) -> None:
    with pytest.raises(InvalidArgument, match=expected_message) as raised:
        request_of(message)
    assert raised.value.param == "a"


def test_raw_contents_are_required_for_all_inputs_or_none() -> None:
    message = request(raw=b"\0" * 8)
    message.raw_input_contents.append(b"")
    with pytest.raises(InvalidArgument, match="one for each"):
        request_of(message)


def test_parameter_without_a_value_is_refused() -> None:
    message = request(int_contents=[1, 2])
    message.parameters["p"].SetInParent()
    with pytest.raises(InvalidArgument, match="'p'"):
        request_of(message)


def test_requested_outputs_and_parameters_reach_the_worker() -> None:
    message = request(int_contents=[1, 2])
    message.parameters["n"].int64_param = -3
    message.outputs.add(name="b").parameters["s"].string_param = "x"
    assert msgspec.to_builtins(request_of(message)) == {
        "id": None,
        "model": "m",
        "tensors": [
            {
                "metadata": {"name": "a", "data_type": "Int32", "shape": [2]},
                "data": {"data_type": "Int32", "values": [1, 2]},
            }
        ],
        "parameters": {"n": {"int64": -3}},
        "outputs": [{"name": "b", "parameters": {"s": {"string": "x"}}}],
    }


def answered(data_type: str, values: Any, shape: Any = None, data_type_of_data: str | None = None) -> TensorResponse:
    tensor = {
        "metadata": {"name": "a", "data_type": data_type, "shape": [len(values)] if shape is None else shape},
        "data": {"data_type": data_type_of_data or data_type, "values": values},
    }
    return msgspec.convert({"model": "m", "tensors": [tensor]}, TensorResponse)


@pytest.mark.parametrize(
    "response",
    [
        answered("Int32", [1], [2]),
        answered("Int32", [1], [-1]),
        answered("Int32", [1], None, "Int64"),
        answered("Foo", [1]),
        answered("Int32", ["x"]),
        answered("Bytes", [[256]]),
        answered("Int32", [1.5]),
        answered("Uint8", [256]),
    ],
)
@pytest.mark.parametrize("is_raw", [True, False])
def test_malformed_response_tensors_are_a_worker_error(response: TensorResponse, is_raw: bool) -> None:
    with pytest.raises(Unknown, match="malformed tensors"):
        response_message(response, is_raw)


def test_response_parameters_without_a_valid_type_are_a_worker_error() -> None:
    for parameters in ({"p": {"int8": 1}}, {"p": {}}):
        response = answered("Int32", [1])
        response.parameters = parameters  # type: ignore[assignment]
        with pytest.raises(Unknown, match="'p'"):
            response_message(response, is_raw=False)


def test_half_precision_tensors_are_accepted_as_numbers_and_returned_raw() -> None:
    assert list(response_message(answered("Float16", [1.5, 2.0]), is_raw=False).raw_output_contents) == [b"\0>\0@"]
    assert list(response_message(answered("Float16", [15872]), is_raw=False).raw_output_contents) == [b"\0>"]
    assert list(response_message(answered("BFloat16", [1.5]), is_raw=False).raw_output_contents) == [b"\xc0?"]
