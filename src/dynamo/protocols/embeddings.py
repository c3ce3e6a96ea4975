"""Requests and responses of `/v1/embeddings`, `/v1/classify`, `/v1/pooling` and `/v1/rerank`, and of their workers.

A worker that takes text receives the client's request. A worker that takes tokens, which exists for embeddings only,
receives an `EmbeddingWork` and returns an `EmbeddingOutput` (as observed with the released frontend).
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import NvExt
from dynamo.protocols.strict import INVALID, MALFORMED, StrictDecoder

INPUTS_MAX = 2048
"""Maximum number of inputs of one request, as in OpenAI's API."""

Input = str | list[str | int | list[int]]
"""A text, a list of texts, token ids, or lists of token ids; `check_input` rejects mixed lists."""
Inputs = str | list[str] | list[int] | list[list[int]]
EncodingFormat = Literal["float", "base64"]
PoolingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


class EmbeddingRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/embeddings`."""

    model: str
    input: Input
    encoding_format: EncodingFormat | None = None
    user: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    nvext: NvExt | None = None


class EmbeddingWork(msgspec.Struct, kw_only=True):
    """The request to a worker that takes tokens."""

    token_ids: list[list[int]]
    model: str
    encoding_format: EncodingFormat | UnsetType = UNSET
    truncate_prompt_tokens: int | UnsetType = UNSET
    dimensions: int | None = None
    mdc_sum: str | None = None
    annotations: list[str] = msgspec.field(default_factory=list)


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The worker's output: each input's vector, little-endian float32 in base64."""

    embeddings: list[str | list[float]]
    prompt_tokens: int
    total_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of an embeddings request."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    index: int
    embedding: str | list[float]
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response of `/v1/embeddings`."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class PooledRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that classification and pooling share."""

    model: str
    input: Input
    user: str | None = None
    request_id: str | None = None
    priority: int = msgspec.field(default_factory=int)  # Always sent: a factory default is not omitted.
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class ClassifyRequest(PooledRequest, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/classify`."""


class PoolingRequest(PooledRequest, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/pooling`."""

    task: str | None = None
    encoding_format: PoolingFormat = msgspec.field(default_factory=lambda: "float")
    dimensions: int | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None


class RerankRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `/v1/rerank`."""

    model: str
    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = msgspec.field(default_factory=lambda: True)
    user: str | UnsetType = UNSET


class Ranked(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Index and score of one document."""

    score: float
    index: int
    document: str | None = None
    meta_info: dict[str, Any] | None = None


_embedding = StrictDecoder(EmbeddingRequest)
_classify = StrictDecoder(ClassifyRequest)
_pooling = StrictDecoder(PoolingRequest)
_rerank = StrictDecoder(RerankRequest)


def decode_embedding(body: bytes, *, ignore_unknown: bool = False) -> EmbeddingRequest:
    """Decode the body of `/v1/embeddings`. Raise `InvalidArgument`."""
    request = _embedding.decode(body, ignore_unknown=ignore_unknown)
    check_input(request.input)
    if request.dimensions is not None and request.dimensions < 1:
        raise InvalidArgument(f"{INVALID}dimensions must be at least 1", param="dimensions")
    if request.truncate_prompt_tokens is not None and (
        request.truncate_prompt_tokens < -1 or request.truncate_prompt_tokens == 0
    ):
        raise InvalidArgument(
            f"{INVALID}truncate_prompt_tokens must be at least 1, or -1 for the model's maximum",
            param="truncate_prompt_tokens",
        )
    return request


def decode_classify(body: bytes, *, ignore_unknown: bool = False) -> ClassifyRequest:
    """Decode the body of `/v1/classify`. Raise `InvalidArgument`."""
    request = _classify.decode(body, ignore_unknown=ignore_unknown)
    check_input(request.input)
    return request


def decode_pooling(body: bytes, *, ignore_unknown: bool = False) -> PoolingRequest:
    """Decode the body of `/v1/pooling`. Raise `InvalidArgument`."""
    request = _pooling.decode(body, ignore_unknown=ignore_unknown)
    check_input(request.input)
    if request.dimensions is not None:
        raise InvalidArgument("dimensions is currently not supported", param="dimensions")
    return request


def decode_rerank(body: bytes, *, ignore_unknown: bool = False) -> RerankRequest:
    """Decode the body of `/v1/rerank`. Raise `InvalidArgument`."""
    request = _rerank.decode(body, ignore_unknown=ignore_unknown)
    request.user = UNSET  # The engine does not need the caller's name, and upstream does not send it.
    if not request.query.strip():
        raise InvalidArgument("Query cannot be empty or whitespace only", param="query")
    if not request.documents:
        raise InvalidArgument("Documents cannot be empty", param="documents")
    if len(request.documents) > INPUTS_MAX:
        raise InvalidArgument(
            f"{INVALID}documents has {len(request.documents)} entries, at most {INPUTS_MAX}", param="documents"
        )
    if request.top_n is not None and request.top_n < 1:
        raise InvalidArgument("Parameter 'top_n' must be larger than 0", param="top_n")
    return request


def check_input(given: Input) -> None:
    """Raise `InvalidArgument` for an input of another type, without entries or with too many."""
    if isinstance(given, str):
        return
    if not given:
        raise InvalidArgument(f"{INVALID}input must not be empty", param="input")
    first = given[0].__class__
    if any(one.__class__ is not first for one in given):
        raise InvalidArgument(
            f"{MALFORMED}input: expected a string, strings, token ids, or lists of token ids", param="input"
        )
    if first is not int and len(given) > INPUTS_MAX:
        raise InvalidArgument(f"{INVALID}input has {len(given)} entries, at most {INPUTS_MAX}", param="input")


def inputs_of(given: Input) -> list[str | list[int]]:
    """Return the inputs as a list."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return given  # type: ignore[return-value]
