"""Requests of the selection service: bodies, their routing requests, and errors."""

from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument, SelectionServiceError
from dynamo.kv_router.router import RouteRequest
from dynamo.kv_router.runs import pack
from dynamo.kv_router.tracking import TrackingKey
from dynamo.routing.services.worker_catalog import DEFAULT, Id, Signed
from dynamo.text.multimodal.routing_hashes import hashes_of, media_of
from dynamo.tokens.hashing import U64, packed_sequence_hashes

STATUS_OF_KIND = {
    "invalid_request": 400,
    "not_found": 404,
    "conflict": 409,
    "not_ready": 503,
    "overloaded": 529,
    "internal": 500,
}


class PromptBody(msgspec.Struct, kw_only=True):
    """Prompt with its routing parameters."""

    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    token_ids: list[int] | None = None
    block_hashes: list[Signed] | None = None
    """Token hashes, signed, in place of the tokens."""
    isl_tokens: Id | None = None
    selection_id: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[Any] | None = None
    allowed_worker_ids: list[Id] | None = None
    routing_constraints: dict[str, Any] | None = None
    router_config_override: dict[str, Any] | None = None
    session_id: str | None = None
    priority_jump: float = 0.0
    strict_priority: int = 0
    expected_output_tokens: Id | None = None


class ReservationBody(msgspec.Struct, kw_only=True):
    """Reservation of an earlier selection, or of a worker that the caller chose."""

    selection_id: str
    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    worker_id: Id | None = None
    dp_rank: Id | None = None
    token_ids: list[int] | None = None
    sequence_hashes: list[Signed] | None = None
    effective_prefill_tokens: Id = 0
    lora_name: str | None = None
    cache_salt: str | None = None


def failed(kind: str, message: str) -> SelectionServiceError:
    """Return an error with its kind and HTTP status."""
    return SelectionServiceError(message, kind, STATUS_OF_KIND[kind])


def route_request_of(body: PromptBody, block_size: int) -> RouteRequest:
    """Return the request of a prompt, without parameters. Raises `SelectionServiceError` if its blocks are unknown."""
    if body.token_ids is None:
        if body.block_hashes is None:
            raise failed("invalid_request", "block_hashes is required without token_ids")
        tokens = body.isl_tokens if body.isl_tokens is not None else len(body.block_hashes) * block_size
        return RouteRequest("", pack([one & U64 for one in body.block_hashes]), tokens)
    try:
        hashes = hashes_of(
            body.token_ids,
            block_size,
            block_mm_infos=body.block_mm_infos,
            lora_name=body.lora_name,
            cache_salt=body.cache_salt,
        )
    except InvalidArgument as error:
        raise failed("invalid_request", str(error)) from None
    return RouteRequest("", pack(hashes), len(body.token_ids))


def sequence_of(body: PromptBody | ReservationBody, block_size: int, blocks: bytes, key: TrackingKey | None) -> bytes:
    """Return the sequence hashes under which peers exchange a prompt's blocks. Raises `SelectionServiceError`."""
    if key is None:
        return packed_sequence_hashes(blocks)
    if body.token_ids is None:
        raise failed("invalid_request", "token_ids is required with a tracking key")
    seeds = key.seeds(
        body.model_name,
        block_size,
        group=body.routing_group,
        cache_salt=body.cache_salt,
        lora_name=body.lora_name,
    )
    media = media_of(body.block_mm_infos) if isinstance(body, PromptBody) else ()
    return key.sequence(body.token_ids, block_size, seeds, media)
