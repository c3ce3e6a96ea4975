"""Completions: converts a KServe text request to a completion, and its response to KServe's outputs. Pure."""

import math
from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.grpc.descriptions import VERSION
from dynamo.grpc.messages import CLASSES
from dynamo.grpc.tensors import LENGTH, Tensor, inputs_of, parameters_of
from dynamo.protocols.openai import CompletionRequest, completion_of
from dynamo.protocols.openai_answers import TextCompletion

TEXT_INPUT = "text_input"
STREAMING = ("streaming", "stream")
SET_BY_US = frozenset({"model", "prompt", "stream", "stream_options", "user"})
FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(CompletionRequest)) - SET_BY_US
"""Fields of a completion that request parameters may set. Other parameters are ignored."""


def completion_request(message: Any) -> CompletionRequest:
    """Return the completion of a `ModelInferRequest`. Raise `InvalidArgument` that names the invalid field."""
    prompt: str | None = None
    streams = False
    for tensor in inputs_of(message):
        name = tensor.metadata.name
        if name == TEXT_INPUT:
            prompt = _text(tensor)
        elif name in STREAMING:
            streams = bool(_single(tensor, "Bool"))
        else:
            raise InvalidArgument(f"unknown input {name!r}: expected {TEXT_INPUT} or {STREAMING[0]}", param=name)
    if prompt is None:
        raise InvalidArgument(f"missing input {TEXT_INPUT}", param=TEXT_INPUT)
    fields: dict[str, Any] = {"model": message.model_name, "prompt": prompt, "stream": streams}
    if message.id:
        fields["user"] = message.id
    for name, value in parameters_of(message.parameters).items():
        if name in FIELDS:
            [fields[name]] = value.values()
            if isinstance(fields[name], float) and not math.isfinite(fields[name]):
                raise InvalidArgument(f"parameter {name} is {fields[name]}: expected a finite number", param=name)
    return completion_of(fields)


def response_of(completion: TextCompletion, request_id: str, *, is_raw: bool = False) -> Any:
    """Return a completion, or a chunk of one, as `ModelInferResponse`: a choice is an element.

    `is_raw`: the client sent raw contents, and expects them. The typed contents are filled as well, as by the released
    frontend; Triton's client cannot convert those with numpy 2.
    """
    message = CLASSES["ModelInferResponse"](model_name=completion.model, model_version=VERSION, id=request_id)
    choices = completion.choices
    columns = {
        "text_output": [choice.text.encode() for choice in choices],
        "finish_reason": [(choice.finish_reason or "").encode() for choice in choices],
    }
    for name, texts in columns.items():
        output = message.outputs.add(name=name, datatype="BYTES", shape=[len(choices)])
        output.contents.bytes_contents.extend(texts)
        if is_raw:
            message.raw_output_contents.append(b"".join(LENGTH.pack(len(text)) + text for text in texts))
    return message


def _text(tensor: Tensor) -> str:
    try:
        text: bytes = _single(tensor, "Bytes")
        return text.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"input {TEXT_INPUT}: must be UTF-8", param=TEXT_INPUT) from None


def _single(tensor: Tensor, data_type: str) -> Any:
    name, metadata = tensor.metadata.name, tensor.metadata
    if metadata.data_type != data_type:
        raise InvalidArgument(f"input {name} is {metadata.data_type}: expected {data_type}", param=name)
    if metadata.shape != [1]:
        raise InvalidArgument(f"input {name} has the shape {metadata.shape}: expected [1]", param=name)
    return tensor.data.values[0]
