"""Embeddings, classification, pooling and reranking: requests to workers, and responses of the four endpoints."""

import asyncio
import binascii
import math
import sys
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument, StreamIncomplete, Unknown
from dynamo.protocols.embeddings import (
    EmbeddingOutput,
    EmbeddingRequest,
    EmbeddingWork,
    EncodingFormat,
    PoolingRequest,
    Ranked,
    inputs_of,
)
from dynamo.protocols.engine import CompletionUsage
from dynamo.protocols.strict import INVALID
from dynamo.serving.response_form import Form, Whole, converted
from dynamo.text.preparing import THREAD_CHARS_MIN

if TYPE_CHECKING:
    from dynamo.text.preprocessor import Preprocessor

HEAVY_FLOATS = 16384  # Writing more as JSON takes over 5 ms.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}

FLOAT_BYTES = 4


async def work_of(request: EmbeddingRequest, preprocessor: "Preprocessor", *, special: bool) -> EmbeddingWork:
    """Return the request for a worker that takes tokens; tokenize long texts in a thread. Raise `InvalidArgument`."""
    inputs = inputs_of(request.input)
    if sum(len(one) for one in inputs if isinstance(one, str)) < THREAD_CHARS_MIN:
        token_ids = tokens_of(inputs, preprocessor, special=special)
    else:
        token_ids = await asyncio.to_thread(tokens_of, inputs, preprocessor, special=special)
    work = EmbeddingWork(
        token_ids=token_ids,
        model=request.model,
        dimensions=request.dimensions,
        mdc_sum=preprocessor.mdc_sum,
        annotations=list((request.nvext.annotations if request.nvext is not None else None) or ()),
    )
    if request.encoding_format is not None:
        work.encoding_format = request.encoding_format
    if request.truncate_prompt_tokens is not None:
        work.truncate_prompt_tokens = request.truncate_prompt_tokens
    return work


def tokens_of(inputs: Sequence[str | list[int]], preprocessor: "Preprocessor", *, special: bool) -> list[list[int]]:
    """Return the tokens of each input. Raise `InvalidArgument` for an input without tokens and for invalid ids."""
    tokenizer = preprocessor.tokenizer
    made: list[list[int]] = []
    for place, one in enumerate(inputs):
        ids = tokenizer.encode(one, add_special_tokens=special) if isinstance(one, str) else one
        where = "input" if len(inputs) == 1 else f"input[{place}]"
        if not ids:
            raise InvalidArgument(f"{INVALID}{where} has no tokens", param=where)
        if ids is one and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise InvalidArgument(
                f"{INVALID}{where}: a token id is not in the vocabulary of {tokenizer.vocab_size} tokens", param=where
            )
        made.append(ids)
    return made


class EmbeddingForm(Form):
    """Response of `/v1/embeddings`, in the requested encoding, whichever encoding the worker used."""

    def __init__(self, model: str, inputs: int, encoding: EncodingFormat | None, *, takes_text: bool) -> None:
        self._model = model
        self._inputs = inputs
        self._encoding = encoding or "float"
        self._takes_text = takes_text
        self._vectors: list[str | list[float]] = []
        self._has_spoken = False
        self.usage = CompletionUsage(0, 0, 0)

    def add(self, value: Any) -> bytes:
        self._has_spoken = True
        if self._takes_text:
            self._add_list(value)
        else:
            output = converted(value, EmbeddingOutput)
            self._vectors += output.embeddings
            self._spend(output.prompt_tokens, output.total_tokens)
        return b""

    def _add_list(self, value: Any) -> None:
        data = list_of(value)
        for one in data:
            vector = one.get("embedding")
            if not isinstance(vector, str | list):
                raise Unknown("the worker's answer has an entry without its embedding")
            self._vectors.append(vector)
        self._model = value.get("model") or self._model
        usage = value.get("usage") or {}
        self._spend(usage.get("prompt_tokens") or 0, usage.get("total_tokens") or 0)

    def _spend(self, prompt_tokens: int, total_tokens: int) -> None:
        assert self.usage is not None, "it is made with the form"
        self.usage.prompt_tokens += prompt_tokens
        self.usage.total_tokens += total_tokens

    @property
    def is_heavy(self) -> bool:  # type: ignore[override]
        """Whether the response has enough numbers to block the loop."""
        return self._encoding == "float" and sum(map(len, self._vectors)) > HEAVY_FLOATS

    def end(self) -> Whole:
        if not self._has_spoken:
            raise StreamIncomplete("the worker ended its stream without an answer")
        if len(self._vectors) != self._inputs:
            raise Unknown(f"the worker answered {len(self._vectors)} embeddings for {self._inputs} inputs")
        assert self.usage is not None, "it is made with the form"
        data = b",".join(
            b'{"index":%d,"object":"embedding","embedding":%b}' % (index, self._encoded(vector))
            for index, vector in enumerate(self._vectors)
        )
        body = b'{"object":"list","model":%b,"data":[%b],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
            json_encode(self._model),
            data,
            self.usage.prompt_tokens,
            self.usage.total_tokens,
        )
        return Whole(body)

    def _encoded(self, vector: str | list[float]) -> bytes:
        """Return the vector in the requested encoding. Raise `Unknown`."""
        try:
            if isinstance(vector, str):
                return json_encode(vector) if self._encoding == "base64" else to_json(from_base64(vector))
            return json_encode(to_base64(vector)) if self._encoding == "base64" else json_encode(vector)
        except (ValueError, TypeError, OverflowError) as error:
            raise Unknown(f"the worker's embedding cannot be read: {error}") from None


class ListForm(Form):
    """Response of classification and pooling: the worker's responses, joined."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None

    def add(self, value: Any) -> bytes:
        data = list_of(value)
        if self._whole is None:
            self._whole = {**value, "data": list(data)}
        else:
            self._whole["data"] += data
            before, more = self._whole.get("usage") or {}, value.get("usage") or {}
            self._whole["usage"] = {key: (before.get(key) or 0) + (more.get(key) or 0) for key in {**before, **more}}
        usage = self._whole.get("usage") or {}
        self.usage = CompletionUsage(usage.get("prompt_tokens") or 0, 0, usage.get("total_tokens") or 0)
        return b""

    def end(self) -> Whole:
        return Whole(json_encode(self.whole()))

    def whole(self) -> dict[str, Any]:
        """Return the joined response. Raise `StreamIncomplete` if the worker sent none."""
        if self._whole is None:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return self._whole


class PoolingForm(ListForm):
    """Pooling response: JSON, the raw bytes, or the bytes with a metadata header."""

    def __init__(self, request: PoolingRequest) -> None:
        super().__init__()
        self._request = request

    def end(self) -> Whole:
        kind = self._request.encoding_format
        whole = self.whole()
        if kind not in ("bytes", "bytes_only"):
            return Whole(json_encode(whole))
        parts = [self._bytes(one) for one in whole["data"]]
        media = b"application/octet-stream"
        if kind == "bytes_only":
            return Whole(b"".join(parts), media)
        described, start = [], 0
        for one, part in zip(whole["data"], parts, strict=True):
            described.append(
                {
                    "index": one.get("index"),
                    "embed_dtype": self._request.embed_dtype or "float32",
                    "endianness": self._request.endianness or "native",
                    "start": start,
                    "end": start + len(part),
                    "shape": one.get("shape"),
                }
            )
            start += len(part)
        metadata = {key: whole.get(key) for key in ("id", "created", "model")} | {
            "data": described,
            "usage": whole.get("usage"),
        }
        return Whole(b"".join(parts), media, headers=b"metadata: %b\r\n" % json_encode(metadata))

    def _bytes(self, entry: dict[str, Any]) -> bytes:
        """Return the decoded vector. Raise `Unknown` for invalid base64, or if the length differs from the shape."""
        text = entry.get("data")
        try:
            data = b64decode(text if isinstance(text, str) else "?", validate=True)
        except (binascii.Error, ValueError):
            raise Unknown("the worker's pooled data is not valid base64") from None
        size = DTYPE_BYTES[self._request.embed_dtype or "float32"]
        for length in entry.get("shape") or ():
            size *= length
        if entry.get("shape") is not None and size != len(data):
            raise Unknown(f"the worker's pooled data has {len(data)} bytes: expected {size}")
        return data


class RankForm(Form):
    """Response of reranking: the documents in order."""

    def __init__(self) -> None:
        self._ranked: list[Ranked] | None = None

    def add(self, value: Any) -> bytes:
        ranked: list[Ranked] = converted(value, list[Ranked])
        self._ranked = [*(self._ranked or ()), *ranked]
        return b""

    def end(self) -> Whole:
        if self._ranked is None:
            raise StreamIncomplete("the worker ended its stream without an answer")
        return Whole(json_encode(self._ranked))


def list_of(value: Any) -> list[dict[str, Any]]:
    """Return the entries of a worker's list. Raise `Unknown` if there is no list."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise Unknown("the worker's answer has no list of data")
    return data


def to_base64(values: Sequence[float]) -> str:
    """Encode as little-endian float32. Raise `OverflowError` for a number out of range, `TypeError` for others."""
    return b64encode(_little(array("f", values)).tobytes()).decode("ascii")


def from_base64(text: str) -> "array[float]":
    """Decode the numbers. Raise `ValueError` for anything but float32 in base64."""
    try:
        data = b64decode(text, validate=True)
    except Base64Error as error:
        raise ValueError(f"not base64: {error}") from None
    if len(data) % FLOAT_BYTES:
        raise ValueError(f"{len(data)} bytes: the length must be a multiple of 4 (float32)")
    values = array("f")
    values.frombytes(data)
    return _little(values)


def to_json(values: "array[float]") -> bytes:
    """Encode as a JSON array; nine digits distinguish any two float32. Raise `ValueError` for infinity and NaN."""
    if not math.isfinite(sum(values)) and not all(map(math.isfinite, values)):
        raise ValueError("a number is infinite or not a number")
    return ("[" + ",".join(["%.9g" % value for value in values]) + "]").encode("ascii")  # noqa: UP031 - the fastest way


def _little(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
