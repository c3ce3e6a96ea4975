"""Conversion of a text request to a completion, and of its response to KServe outputs."""

import math
import re
import tracemalloc
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.grpc.completions import completion_request, response_of
from dynamo.grpc.messages import CLASSES
from dynamo.protocols.openai import CompletionRequest
from dynamo.protocols.openai_answers import TextChoice, TextCompletion

COMPLETION = TextCompletion("c", [TextChoice("é", 0, "stop"), TextChoice("", 1)], 1, "m")


def request(text: Any = b"hi", streams: bool | None = None, **parameters: Any) -> Any:
    message = CLASSES["ModelInferRequest"](model_name="m", id="7")
    if text is not None:
        message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    if streams is not None:
        message.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(streams)
    for name, (kind, value) in parameters.items():
        setattr(message.parameters[name], f"{kind}_param", value)
    return message


def test_inputs_and_parameters_are_converted_to_completion_fields() -> None:
    assert completion_request(request()) == CompletionRequest(model="m", prompt="hi", stream=False, user="7")
    requested = completion_request(
        request(streams=True, max_tokens=("int64", 3), temperature=("double", 0.5), priority=("uint64", 1))
    )
    assert requested == CompletionRequest(
        model="m", prompt="hi", stream=True, user="7", max_tokens=3, temperature=0.5
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameter", "problem"),
    [
        ("max_tokens", ("string", "3"), "Expected `int | null`, got `str`"),
        ("nvext", ("string", "{}"), "Expected `object | null`, got `str`"),
        ("temperature", ("double", math.nan), "is nan: expected a finite number"),
        ("top_p", ("double", -math.inf), "is -inf: expected a finite number"),
    ],
)
def test_parameter_of_wrong_type_is_refused_by_name(name: str, parameter: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(problem)) as raised:
        completion_request(request(**{name: parameter}))
    assert raised.value.param == name


def test_model_and_stream_parameters_do_not_override_request_fields() -> None:
    assert completion_request(request(model=("string", "x"), stream=("bool", True))).model == "m"


def other(name: str, datatype: str, shape: list[int], **contents: Any) -> Any:
    message = request(None)
    message.inputs.add(name=name, datatype=datatype, shape=shape, contents=CLASSES["InferTensorContents"](**contents))
    return message


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (request(None), "missing input text_input"),
        (request(b"\xff"), "must be UTF-8"),
        (other("text_input", "BYTES", [2], bytes_contents=[b"a", b"b"]), r"shape \[2\]: expected \[1\]"),
        (other("text_input", "INT32", [1], int_contents=[1]), "Int32: expected Bytes"),
        (other("streaming", "BYTES", [1], bytes_contents=[b"a"]), "Bytes: expected Bool"),
        (other("image", "BYTES", [1], bytes_contents=[b"a"]), "unknown input 'image'"),
    ],
)
def test_invalid_completion_request_is_refused(message: Any, expected_message: str) -> None:
    with pytest.raises(InvalidArgument, match=expected_message):
        completion_request(message)


def test_each_choice_is_an_element_of_the_outputs() -> None:
    answer = response_of(COMPLETION, "7")
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "7")
    output_texts = {one.name: (list(one.shape), list(one.contents.bytes_contents)) for one in answer.outputs}
    assert output_texts == {"text_output": ([2], ["é".encode(), b""]), "finish_reason": ([2], [b"stop", b""])}


def test_raw_outputs_are_sent_to_clients_with_raw_inputs() -> None:
    answer = response_of(COMPLETION, "7", is_raw=True)
    assert list(answer.raw_output_contents) == [b"\2\0\0\0\xc3\xa9\0\0\0\0", b"\4\0\0\0stop\0\0\0\0"]
    assert list(answer.outputs[0].contents.bytes_contents) == ["é".encode(), b""]
    assert not response_of(COMPLETION, "7").raw_output_contents


def test_conversion_of_a_prompt_makes_no_object_for_each_byte() -> None:
    message = request(b"x" * (1 << 20))
    tracemalloc.start()
    try:
        completion_request(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
