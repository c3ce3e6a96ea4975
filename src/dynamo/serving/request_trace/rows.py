"""Rows of a request trace: the schema of one line."""

from collections.abc import Mapping
from typing import Any

import msgspec

SCHEMA = "dynamo.request.trace.v1"


class AgentContext(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Agent session of a request."""

    session_id: str
    parent_session_id: str | None = None
    session_final: bool = False
    agent_headers: Mapping[str, list[str]] | None = None
    input_trigger: str | None = None


class Worker(msgspec.Struct, frozen=True):
    """Workers of a request."""

    prefill_worker_id: int
    decode_worker_id: int


class Replay(msgspec.Struct, frozen=True):
    """Data needed to replay the request in a simulation."""

    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class TracedChoice(msgspec.Struct, frozen=True):
    choice_index: int
    finish_reason: str
    backend_finish_reason: str


class FinishReasons(msgspec.Struct, frozen=True):
    """Finish reasons of an agent's request."""

    finish_reason: str
    backend_finish_reason: str
    choices: list[TracedChoice]


class RequestEnd(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Statistics of one engine request."""

    request_id: str
    x_request_id: str | None = None
    model: str | None = None
    input_tokens: int = -1
    output_tokens: int = -1
    cached_tokens: int = -1
    request_received_ms: int
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float
    avg_itl_ms: float | None = None
    worker: Worker | None = None
    replay: Replay | None = None
    finish_reason_metadata: FinishReasons | None = None


class Payload(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Request and response of one request."""

    request_id: str
    endpoint: str
    model: str
    request: Any = None
    response: Any = None
    http_request_headers: Mapping[str, str] | None = None
    payload_complete: bool | None = None
    payload_drop_reason: str | None = None


class TraceRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of a trace."""

    schema: str | None = None
    event_type: str
    event_time_unix_ms: int
    event_source: str | None = None
    agent_context: AgentContext | None = None
    request: RequestEnd | None = None
    payload: Payload | None = None
