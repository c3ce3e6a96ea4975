"""Tensors: converts KServe's contents, typed or raw, to and from the workers' form. Pure.

A worker receives `{model, id?, tensors: [{metadata: {name, data_type, shape}, data: {data_type, values}}]}` and responds
in the same form. Values are flat. A half float is the integer of its two bytes, text a list of bytes (as observed of
the released frontend).
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from dynamo.core.codec import decode
from dynamo.core.errors import InvalidArgument, Unknown
from dynamo.core.slices import joined, slices
from dynamo.grpc.messages import CLASSES

BYTES = "Bytes"
LENGTH = struct.Struct("<I")
CHOICES = {
    "bool_param": "bool",
    "int64_param": "int64",
    "string_param": "string",
    "double_param": "double",
    "uint64_param": "uint64",
}
"""Field of a parameter's oneof to the name of its type between frontend and worker."""

Parameter = dict[str, bool | int | float | str]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Type of elements."""

    name: str
    """Name between frontend and worker."""
    wire: str
    """Name in the protocol."""
    numpy: str
    """numpy name of the type of its raw bytes; empty for text."""
    contents: str
    """Field of typed contents; empty if there is none."""


TENSOR_TYPES = (
    TensorType("Bool", "BOOL", "|b1", "bool_contents"),
    TensorType("Uint8", "UINT8", "|u1", "uint_contents"),
    TensorType("Uint16", "UINT16", "<u2", "uint_contents"),
    TensorType("Uint32", "UINT32", "<u4", "uint_contents"),
    TensorType("Uint64", "UINT64", "<u8", "uint64_contents"),
    TensorType("Int8", "INT8", "|i1", "int_contents"),
    TensorType("Int16", "INT16", "<i2", "int_contents"),
    TensorType("Int32", "INT32", "<i4", "int_contents"),
    TensorType("Int64", "INT64", "<i8", "int64_contents"),
    TensorType("Float16", "FP16", "<u2", ""),
    TensorType("BFloat16", "BF16", "<u2", ""),
    TensorType("Float32", "FP32", "<f4", "fp32_contents"),
    TensorType("Float64", "FP64", "<f8", "fp64_contents"),
    TensorType(BYTES, "BYTES", "", "bytes_contents"),
)
BY_WIRE = {kind.wire: kind for kind in TENSOR_TYPES}
BY_NAME = {kind.name: kind for kind in TENSOR_TYPES}


class TensorMetadata(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Name, type and shape of a tensor."""

    name: str
    data_type: str
    shape: list[int]
    parameters: dict[str, Parameter] | UnsetType = UNSET


class TensorData(msgspec.Struct, forbid_unknown_fields=True):
    """Values of a tensor."""

    data_type: str
    values: list[Any]


class Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor between frontend and worker."""

    metadata: TensorMetadata
    data: TensorData


class TensorRequest(msgspec.Struct, kw_only=True):
    """Request to a worker."""

    id: str | None = None
    model: str
    tensors: list[Tensor]
    parameters: dict[str, Parameter] | UnsetType = UNSET
    outputs: list[dict[str, Any]] | UnsetType = UNSET
    """Outputs that the client names; a worker may omit the others."""


class TensorResponse(msgspec.Struct, kw_only=True):
    """Response of a worker."""

    id: str | None = None
    model: str
    tensors: list[Tensor]
    parameters: dict[str, Parameter] | UnsetType | None = UNSET


class ResponseForm(NamedTuple):
    """How a client takes a response."""

    id: str | None
    """Id of the request."""
    is_raw: bool
    is_streamed: bool
    """Whether it is a part of `ModelStreamInfer`."""


def request_of(message: Any) -> TensorRequest:
    """Return a `ModelInferRequest` as a worker's request. Raise `InvalidArgument` that names the invalid field."""
    tensors = inputs_of(message)
    for tensor in tensors:
        if tensor.data.data_type == BYTES:
            tensor.data.values = [joined(one) for one in tensor.data.values]
    return TensorRequest(
        id=message.id or None,
        model=message.model_name,
        tensors=tensors,
        parameters=parameters_of(message.parameters) or UNSET,
        outputs=[_wanted(one) for one in message.outputs] or UNSET,
    )


def inputs_of(message: Any) -> list[Tensor]:
    """Return the inputs of a `ModelInferRequest`; texts are `bytes`. Raise `InvalidArgument` that names the invalid field."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        problem = f"raw_input_contents has {len(raw)} elements for {len(message.inputs)} inputs: expected one for each"
        raise InvalidArgument(problem, param="raw_input_contents")
    return [_read(one, raw[place] if raw else None) for place, one in enumerate(message.inputs)]


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the values of a map of `InferParameter`. Raise `InvalidArgument` for one without a value."""
    read: dict[str, Parameter] = {}
    for name, one in parameters.items():
        choice = one.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidArgument(f"parameters[{name!r}] has no value", param="parameters")
        read[name] = {CHOICES[choice]: getattr(one, choice)}
    return read


def serialized_response(data: bytes, codec: str, form: ResponseForm) -> bytes:
    """Return a worker's encoded response as serialized `ModelInferResponse`, or `ModelStreamInferResponse` if it is streamed.

    Raise `Unknown` for a malformed response.
    """
    try:
        response = msgspec.convert(decode(data, codec), TensorResponse)
    except (InvalidArgument, msgspec.ValidationError) as error:
        problem = str(error).replace("missing required field", "missing field")  # the words that Triton clients expect
        raise Unknown(f"malformed tensor response from the worker: {problem}") from None
    response.id = form.id
    message = response_message(response, form.is_raw)
    if form.is_streamed:
        message = CLASSES["ModelStreamInferResponse"](infer_response=message)
    written: bytes = message.SerializeToString()
    return written


def response_message(response: TensorResponse, is_raw: bool) -> Any:
    """Return a worker's response as `ModelInferResponse`.

    If one output is of half floats, which have no typed contents, all outputs are raw. Raise `Unknown` for a malformed
    response.
    """
    message = CLASSES["ModelInferResponse"](model_name=response.model, model_version="1", id=response.id or "")
    is_raw = is_raw or any(one.data.data_type in ("Float16", "BFloat16") for one in response.tensors)
    try:
        write_parameters(response.parameters, message.parameters)
        for tensor in response.tensors:
            kind = _checked(tensor)
            output = message.outputs.add(name=tensor.metadata.name, datatype=kind.wire, shape=tensor.metadata.shape)
            write_parameters(tensor.metadata.parameters, output.parameters)
            if is_raw:
                message.raw_output_contents.append(_packed(kind, tensor.data.values))
            else:
                values = [bytes(one) for one in tensor.data.values] if kind.name == BYTES else tensor.data.values
                for part in slices(values):
                    getattr(output.contents, kind.contents).extend(part)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        raise Unknown(f"malformed tensors from the worker: {error}") from None
    return message


def write_parameters(parameters: Mapping[str, Parameter] | UnsetType | None, target: Any) -> None:
    """Fill a map of `InferParameter`. Raise `ValueError`."""
    for name, value in (parameters or {}).items():
        if len(value) != 1:
            raise ValueError(f"parameter {name!r} is {value!r}: expected one value under its type")
        [(kind, one)] = value.items()
        field = f"{kind}_param"
        if field not in CHOICES:
            raise ValueError(f"parameter {name!r} is of type {kind!r}: expected one of {', '.join(CHOICES.values())}")
        setattr(target[name], field, one)


def _wanted(output: Any) -> dict[str, Any]:
    parameters = parameters_of(output.parameters)
    return {"name": output.name, **({"parameters": parameters} if parameters else {})}


def _read(message: Any, raw: bytes | None) -> Tensor:
    name, kind = message.name, BY_WIRE.get(message.datatype)
    if kind is None:
        raise InvalidArgument(
            f"inputs[{name!r}].datatype is {message.datatype!r}: expected one of {', '.join(BY_WIRE)}", param=name
        )
    shape = list(message.shape)
    count = element_count(shape, name)
    values = _typed(message, kind) if raw is None else _unpacked(kind, raw, name)
    if len(values) != count:
        problem = f"inputs[{name!r}]: its shape {shape} has {count} elements, but its contents {len(values)}"
        raise InvalidArgument(problem, param=name)
    parameters = parameters_of(message.parameters) or UNSET
    return Tensor(TensorMetadata(name, kind.name, shape, parameters), TensorData(kind.name, values))


def element_count(shape: Sequence[int], name: str) -> int:
    """Return the number of elements of a shape. Raise `InvalidArgument`."""
    negative = next((one for one in shape if one < 0), None)
    if negative is not None:
        raise InvalidArgument(f"inputs[{name!r}].shape has a negative dimension: {negative}", param=name)
    return math.prod(shape)


def _typed(message: Any, kind: TensorType) -> list[Any]:
    if not kind.contents:
        problem = f"inputs[{message.name!r}]: {kind.wire} has no typed contents; send it in raw_input_contents"
        raise InvalidArgument(problem, param=message.name)
    values = joined(getattr(message.contents, kind.contents))
    if any(beyond(kind, part) for part in slices(values)):
        limits = np.iinfo(kind.numpy)
        raise InvalidArgument(
            f"inputs[{message.name!r}] has a value out of range of {kind.wire}: expected {limits.min} to {limits.max}",
            param=message.name,
        )
    return values


def beyond(kind: TensorType, values: Sequence[Any]) -> bool:
    """Return whether a number is out of range of the type: fields of typed contents are wider than it."""
    if not values or kind.numpy[1:2] not in ("i", "u"):
        return False
    limits = np.iinfo(kind.numpy)
    return bool(min(values) < limits.min or max(values) > limits.max)


def _unpacked(kind: TensorType, raw: bytes, name: str) -> list[Any]:
    if kind.name == BYTES:
        return _texts(raw, name)
    dtype = np.dtype(kind.numpy)
    if len(raw) % dtype.itemsize:
        problem = (
            f"inputs[{name!r}]: {len(raw)} raw bytes are not a multiple of {dtype.itemsize}, the size of {kind.wire}"
        )
        raise InvalidArgument(problem, param=name)
    values: list[Any] = []
    for part in slices(np.frombuffer(raw, dtype)):
        values += part.tolist()
    return values


def _texts(raw: bytes, name: str) -> list[bytes]:
    """Return texts, each of which is preceded by its length in four bytes."""
    texts: list[bytes] = []
    place = 0
    while place < len(raw):
        begin = place + LENGTH.size
        size = LENGTH.unpack_from(raw, place)[0] if begin <= len(raw) else -1
        if size < 0 or begin + size > len(raw):
            raise InvalidArgument(f"inputs[{name!r}]: raw BYTES end within element {len(texts)}", param=name)
        texts.append(raw[begin : begin + size])
        place = begin + size
    return texts


def _checked(tensor: Tensor) -> TensorType:
    metadata, data = tensor.metadata, tensor.data
    if metadata.data_type != data.data_type:
        raise ValueError(f"{metadata.name!r} is {metadata.data_type}, but its data is {data.data_type}")
    kind = BY_NAME.get(metadata.data_type)
    if kind is None:
        raise ValueError(f"{metadata.name!r} is {metadata.data_type!r}: expected one of {', '.join(BY_NAME)}")
    count = -1 if any(one < 0 for one in metadata.shape) else math.prod(metadata.shape)
    if count != len(data.values):
        problem = f"shape implies {count} elements but data has {len(data.values)}"
        raise ValueError(f"{metadata.name!r} has the shape {metadata.shape}: {problem}")
    if beyond(kind, [one for one in data.values if isinstance(one, int)]):
        raise ValueError(f"{metadata.name!r} has a value out of range of {kind.wire}")
    return kind


def _packed(kind: TensorType, values: list[Any]) -> bytes:
    """Return raw bytes. Values of half floats may also be given as floats."""
    if kind.name == BYTES:
        return b"".join(LENGTH.pack(len(one)) + bytes(one) for one in values)
    if any(isinstance(one, float) for one in values) and kind.numpy[1] in "iu":
        if kind.name == "Float16":
            return _raw(values, "<f2")
        if kind.name == "BFloat16":
            return (np.frombuffer(_raw(values, "<f4"), "<u4") >> 16).astype("<u2").tobytes()
        raise ValueError(f"a value of {kind.name} is not an integer")
    return _raw(values, kind.numpy)


def _raw(values: list[Any], dtype: str) -> bytes:
    """Return numbers as bytes. Raise the errors of numpy for values that are none."""
    return b"".join(np.array(part, dtype).tobytes() for part in slices(values))
