"""Request trace: a row per finished request, optionally with request and response.

Rows are built on the loop from the request's state and generations, and given to the sinks in batches by a thread
(`sinks`). No request waits for it: rows beyond the capacity are dropped and counted.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.generation import Generation, total_usage
from dynamo.serving.request_state import RequestState
from dynamo.serving.request_trace.otel import MAX_PAYLOAD_BYTES, make_otel_sink
from dynamo.serving.request_trace.payload import Capture, Fold, chat_response, last_response, message_response
from dynamo.serving.request_trace.rows import (
    SCHEMA,
    AgentContext,
    FinishReasons,
    Payload,
    Replay,
    RequestEnd,
    TracedChoice,
    TraceRow,
    Worker,
)
from dynamo.serving.request_trace.s3 import S3Options, S3Sink, S3Writer
from dynamo.serving.request_trace.sinks import FileOptions, FileSink, Row, Sink, StderrSink, make_nats_sink
from dynamo.serving.request_trace.wanted import audit_sinks, is_trace_wanted
from dynamo.serving.response_stream import IncomingRequest
from dynamo.tokens.hashing import block_hashes, sequence_hashes

logger = logging.getLogger(__name__)

RECORDS = ("request_end", "tool", "request_payload")
SINKS = ("file", "stderr", "nats", "otel", "s3")
CLOSE_S = 2.0  # Rows that the sinks have not written by then are lost: shutdown must not hang on a full disk.
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie"})
"""Headers that are never captured, even if listed: more people may read a trace than may use a key."""
AGENT_HEADERS = {
    "x-claude-code-session-id": "session",
    "x-claude-code-agent-id": "agent",
    "x-claude-code-parent-agent-id": "parent",
    "session-id": "session",
    "thread-id": "agent",
    "x-codex-parent-thread-id": "parent",
}
"""Headers of known agents for session, agent within the session, and parent session."""
PAYLOAD_ENDPOINTS = {
    "chat_completions": "openai.chat_completion",
    "responses": "openai.response",
    "anthropic_messages": "anthropic.message",
}


FOLDS: dict[str, Fold] = {
    "chat_completions": chat_response,
    "responses": last_response,
    "anthropic_messages": message_response,
}
"""Function that merges the events of a stream into a whole response, by endpoint."""


class TraceVariables:
    """The variables `DYN_REQUEST_TRACE_*`, and `DYN_AUDIT_*` where an older name exists."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def text(self, name: str, default: str, older: str = "") -> str:
        """Return a text; empty counts as absent."""
        given = self._given
        return given.get(f"DYN_REQUEST_TRACE_{name}") or (given.get(f"DYN_AUDIT_{older}") if older else "") or default

    def number(self, name: str, default: int, older: str = "", least: int = 1) -> int:
        """Return an integer. Raise `ConfigError`."""
        value = self.text(name, str(default), older)
        if not value.isdigit() or int(value) < least:
            raise ConfigError(f"DYN_REQUEST_TRACE_{name}={value!r}: must be an integer >= {least}")
        return int(value)

    def file(self) -> FileOptions:
        """Return the options of the file sink. Raise `ConfigError`."""
        kind = self.text("FILE_FORMAT", "jsonl_gz")
        if kind not in ("jsonl", "jsonl_gz"):
            raise ConfigError(f"DYN_REQUEST_TRACE_FILE_FORMAT={kind!r}: must be jsonl or jsonl_gz")
        return FileOptions(
            path=self.text("FILE_PATH", "", "OUTPUT_PATH") or self.text("OUTPUT_PATH", "/tmp/dynamo-request-trace"),  # noqa: S108 - upstream's default
            gzip=kind == "jsonl_gz",
            buffer_bytes=self.number("FILE_BUFFER_BYTES", 1 << 20, "JSONL_BUFFER_BYTES"),
            flush_s=self.number("FILE_FLUSH_INTERVAL_MS", 1000, "JSONL_FLUSH_INTERVAL_MS") / 1000,
            roll_bytes=self.number("FILE_ROLL_BYTES", 256 << 20, "JSONL_GZ_ROLL_BYTES"),
            roll_lines=self.number("FILE_ROLL_LINES", 0, "JSONL_GZ_ROLL_LINES", least=0),
        )

    def s3(self) -> S3Options:
        """Return the options of the S3 sink. Raise `ConfigError`."""
        return S3Options(
            bucket=self.text("S3_BUCKET", ""),
            region=self.text("S3_REGION", ""),
            prefix=self.text("S3_PREFIX", ""),
            roll_bytes=self.number("S3_ROLL_UNCOMPRESSED_BYTES", 64 << 20),
            flush_s=self.number("S3_FLUSH_INTERVAL_MS", 10_000) / 1000,
        )


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the request trace (`DYN_REQUEST_TRACE*`)."""

    records: tuple[str, ...]
    sinks: tuple[str, ...]
    capacity: int
    headers: frozenset[str]
    file: FileOptions
    nats_subject: str
    otel_max_payload_bytes: int = MAX_PAYLOAD_BYTES
    s3: S3Options | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> "TraceOptions | None":
        """Return the settings; None if tracing is disabled. Raise `ConfigError`, also for unsupported settings."""
        given = environ() if variables is None else variables
        read = TraceVariables(given)
        if not is_trace_wanted(given):
            return None
        audit = audit_sinks(given)
        for name in given:
            if name.startswith("DYN_REQUEST_TRACE_TOOL_EVENTS_") and given[name]:
                raise ConfigError(f"{name} is not supported by this release")
        default_records = "request_payload" if audit else "request_end,tool"
        records = _words("DYN_REQUEST_TRACE_RECORDS", read.text("RECORDS", default_records), RECORDS)
        sinks = _words("DYN_REQUEST_TRACE_SINKS", read.text("SINKS", ",".join(audit) or "file"), SINKS)
        if "s3" in sinks and not read.text("S3_BUCKET", ""):
            raise ConfigError("DYN_REQUEST_TRACE_SINKS=s3: DYN_REQUEST_TRACE_S3_BUCKET must name a bucket")
        wanted = {word.strip().lower() for word in read.text("HTTP_HEADER_CAPTURE_LIST", "").split(",")}
        return cls(
            records=records,
            sinks=sinks,
            capacity=read.number("CAPACITY", 1024, "CAPACITY"),
            headers=frozenset(wanted - SECRET_HEADERS - {""}),
            file=read.file(),
            nats_subject=read.text("NATS_SUBJECT", "dynamo.request_trace.v1", "NATS_SUBJECT"),
            otel_max_payload_bytes=read.number("OTEL_MAX_PAYLOAD_BYTES", MAX_PAYLOAD_BYTES, "OTEL_MAX_PAYLOAD_BYTES"),
            s3=read.s3() if "s3" in sinks else None,
        )


class TracedResponse(Protocol):
    """Response of a traced request."""

    exchange: IncomingRequest
    state: RequestState
    generations: list[Generation]


class RequestTrace:
    """Trace of one frontend, from `start` to `close`."""

    def __init__(self, options: TraceOptions, registry: MetricsRegistry, prefix: str) -> None:
        self._options = options
        self._sinks: list[Sink] = []
        self._rows: deque[Row] = deque()
        self._hurry = asyncio.Event()
        self._is_closing = False
        self._tasks = TaskOwner("request trace")
        self._began_s = time.monotonic()
        self._wants_end = "request_end" in options.records
        self._wants_payload = "request_payload" in options.records
        self._dropped = registry.counter(f"{prefix}_request_trace_dropped_total", "Rows that no sink accepted").labels()
        self._written = registry.counter(f"{prefix}_request_trace_rows_total", "Rows given to the sinks").labels()

    async def start(self) -> None:
        """Open the sinks. Raise `ConfigError` for an unusable sink."""
        options = self._options
        for name in options.sinks:
            self._sinks.append(await self._sink(name))
        self._tasks.start(self._write(), "write")
        logger.info("request trace", extra={"sinks": list(options.sinks), "records": list(options.records)})

    async def _sink(self, name: str) -> Sink:
        """Return a started sink. Raise `ConfigError` for an unusable sink."""
        options = self._options
        if name == "file":
            return await asyncio.to_thread(FileSink, options.file)
        if name == "stderr":
            return StderrSink()
        if name == "nats":
            return await make_nats_sink(options.nats_subject)
        if name == "otel":
            exported = make_otel_sink(options.otel_max_payload_bytes, environ())
            exported.start()
            return exported
        assert options.s3 is not None, "the options of a sink are parsed with its name"
        sink = S3Sink(options.s3, await asyncio.to_thread(S3Writer, options.s3), self._dropped.inc)
        sink.start()
        return sink

    async def close(self) -> None:
        """Write the remaining rows and close the sinks."""
        self._is_closing = True
        self._hurry.set()
        if not await self._tasks.wait(CLOSE_S):
            logger.warning("request trace: the last rows were not written within %g s and are lost", CLOSE_S)
        await self._tasks.cancel_and_wait(CLOSE_S)

    # Called by the pipeline.

    def begin(self, answer: TracedResponse, block_size: int) -> None:
        """Start tracing a request; capture its response if payloads are traced."""
        # The exchange frees its body before the response ends.
        answer.state.trace(block_size, agent_context(answer.exchange) if self._wants_end else None)
        if self._wants_payload and answer.state.endpoint in PAYLOAD_ENDPOINTS:
            answer.state.keep_payload(answer.exchange.capture(), bytes(answer.exchange.body))

    def end(self, answer: TracedResponse, error_type: str) -> None:
        """Add the rows of a finished request."""
        now_ms = time.time_ns() // 1_000_000
        took_s = time.perf_counter() - answer.state.started_s
        received_ms = now_ms - int(took_s * 1000)
        if self._wants_end:
            for place, generation in enumerate(answer.generations):
                request = request_end(answer, generation, place, received_ms, took_s)
                self._add(self._row("request_end", now_ms, answer, generation, request))
        if answer.state.capture is not None:
            row = TraceRow(
                schema=SCHEMA,
                event_type="request_payload",
                event_time_unix_ms=received_ms,
                event_source="dynamo",
                payload=self._payload(answer, error_type),
            )
            usage = total_usage(answer.generations) if answer.generations else None
            capture = answer.state.capture if not error_type else None
            self._add(Unread(row, answer.state.traced_body, capture, FOLDS[answer.state.endpoint], usage))

    def _row(
        self, event: str, now_ms: int, answer: TracedResponse, generation: Generation, request: RequestEnd
    ) -> TraceRow:
        context = answer.state.agent_context
        return TraceRow(
            schema=SCHEMA,
            event_type=event,
            event_time_unix_ms=now_ms,
            event_source=None if context is None else "dynamo",
            agent_context=context,
            request=request if context is None else with_agent(request, answer, generation),
        )

    def _payload(self, answer: TracedResponse, error_type: str) -> Payload:
        """Return the payload row without request and response."""
        exchange, state = answer.exchange, answer.state
        captured = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in exchange.headers
            if name.decode("latin-1") in self._options.headers
        }
        return Payload(
            request_id=state.request_id,
            endpoint=PAYLOAD_ENDPOINTS[state.endpoint],
            model=state.model,
            http_request_headers=captured or None,
            payload_complete=False,
            payload_drop_reason="response_stream_dropped" if error_type == "cancelled" else error_type or "unknown",
        )

    # Writing to the sinks.

    def _add(self, row: "TraceRow | Unread") -> None:
        if len(self._rows) >= self._options.capacity:
            self._dropped.inc()
            return
        self._rows.append(Row(int((time.monotonic() - self._began_s) * 1000), row))
        if len(self._rows) * 2 >= self._options.capacity:
            self._hurry.set()

    async def _write(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.file.flush_s):  # `wait_for` may swallow a cancellation.
                    await self._hurry.wait()
            self._hurry.clear()
            await self._give()
            if self._is_closing:
                break
        await asyncio.gather(*(self._close(sink) for sink in self._sinks))

    @staticmethod
    async def _close(sink: Sink) -> None:
        try:
            await sink.close()
        except OSError as error:
            logger.warning("request trace: %s: %s", sink.name, error)

    async def _give(self) -> None:
        """Write all waiting rows to every sink."""
        taken = [self._rows.popleft() for _ in range(len(self._rows))]
        if not taken:
            return
        rows = await asyncio.to_thread(lambda: [Row(row.timestamp_ms, read(row.event)) for row in taken])
        await asyncio.gather(*(self._give_to(sink, rows) for sink in self._sinks))

    async def _give_to(self, sink: Sink, rows: Sequence[Row]) -> None:
        try:
            await sink.write(rows)
            await sink.flush()
        except OSError as error:
            self._dropped.inc(len(rows))
            logger.warning("request trace: %s: %s", sink.name, error)
        else:
            self._written.inc(len(rows))


class Unread(NamedTuple):
    """Payload row whose request and response are still encoded; a thread decodes them, as they may be long."""

    row: TraceRow
    request: bytes
    capture: Capture | None
    fold: Fold
    usage: CompletionUsage | None


def read(event: TraceRow | Unread) -> TraceRow:
    """Return the row, with its request and response decoded."""
    if not isinstance(event, Unread):
        return event
    payload, response, reason = event.row.payload, None, "response_too_long"
    assert payload is not None, "only payload rows have request and response"
    if event.capture is not None:
        try:
            response = event.capture.response(event.fold)
        except (ValueError, LookupError, TypeError) as error:
            logger.warning("request trace: the response of %s cannot be decoded: %r", payload.request_id, error)
            reason = "response_unreadable"
        if isinstance(response, dict) and "choices" in response and not response.get("usage"):
            response["usage"] = event.usage
    drop = {} if event.capture is None else {"payload_drop_reason": None if response is not None else reason}
    decoded = msgspec.structs.replace(
        payload, request=as_object(event.request), response=response, payload_complete=response is not None, **drop
    )
    return msgspec.structs.replace(event.row, payload=decoded)


def request_end(
    answer: TracedResponse,
    generation: Generation,
    place: int,
    received_ms: int,
    took_s: float,
) -> RequestEnd:
    """Return the statistics of one of a response's engine requests."""
    state = answer.state
    tokens = generation.request.token_ids
    is_batch = len(answer.generations) > 1
    has_first = bool(state.first_s)
    wait_ms = max(0.0, (state.sent_s or state.started_s) - state.started_s) * 1e3
    ttft_ms = (state.first_s - state.started_s) * 1e3
    gaps = generation.tokens - 1
    usage = generation.counted()
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    worker = state.workers[place] if place < len(state.workers) else None
    return RequestEnd(
        request_id=f"{state.request_id}-{place}" if is_batch else state.request_id,
        input_tokens=len(tokens),
        output_tokens=generation.tokens,
        cached_tokens=cached or 0,
        request_received_ms=received_ms,
        prefill_wait_time_ms=wait_ms if state.sent_s else None,
        prefill_time_ms=max(0.0, ttft_ms - wait_ms) if has_first else None,
        ttft_ms=ttft_ms if has_first else None,
        total_time_ms=took_s * 1e3,
        avg_itl_ms=(state.last_s - state.first_s) * 1e3 / gaps if has_first and gaps > 0 else None,
        worker=None if worker is None else Worker(worker if state.prefill is None else state.prefill[0], worker),
        replay=replay(tokens, state.kv_block_size) if state.kv_block_size else None,
    )


def as_object(body: bytes) -> Any:
    """Return a client's request as one line of JSON, whatever its original layout."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")


def replay(tokens: Sequence[int], block_size: int) -> Replay:
    """Return the prompt as hashes of its blocks; here, unlike elsewhere, the last block may be partial."""
    hashes = block_hashes(tokens, block_size)
    rest = len(tokens) % block_size
    if rest:
        hashes += block_hashes(tokens[-rest:], rest)
    return Replay(block_size, len(tokens), sequence_hashes(hashes))


def with_agent(request: RequestEnd, answer: TracedResponse, generation: Generation) -> RequestEnd:
    """Return the row with the fields of an agent's request."""
    echoed = answer.exchange.header(b"x-request-id")
    reasons = [(place, one.finish_reason) for place, one in enumerate(generation.choices) if one.finish_reason]
    choices = [TracedChoice(place, reason, reason) for place, reason in reasons]
    finished = FinishReasons(choices[0].finish_reason, choices[0].finish_reason, choices) if choices else None
    return msgspec.structs.replace(
        request,
        x_request_id=None if echoed is None else echoed.decode("latin-1"),
        model=answer.state.model,
        finish_reason_metadata=finished,
    )


def agent_context(exchange: IncomingRequest) -> AgentContext | None:
    """Return the agent session from the client's headers: Dynamo's own, or those of known agents."""
    own: dict[str, str] = {}
    theirs: dict[str, list[str]] = {}
    parts: dict[str, str] = {}
    for raw_name, raw_value in exchange.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name.startswith("x-dynamo-"):
            own[name] = value
        elif name in AGENT_HEADERS:
            theirs.setdefault(name, []).append(value)
            parts.setdefault(AGENT_HEADERS[name], value)
    session = own.get("x-dynamo-session-id") or parts.get("agent") or parts.get("session")
    if not session:
        return None
    final = own.get("x-dynamo-session-final", "")
    return AgentContext(
        session_id=session,
        parent_session_id=own.get("x-dynamo-parent-session-id") or parts.get("parent"),
        session_final=final.strip().lower() in ("1", "true"),
        agent_headers=dict(sorted(theirs.items())) or None,
        input_trigger=input_trigger(bytes(exchange.body)),
    )


def input_trigger(body: bytes) -> str:
    """Return the cause of an agent's request: a person, a tool, or something else."""
    try:
        request = json.loads(body)
    except ValueError:
        return "other"
    messages = request.get("messages", request.get("input")) if isinstance(request, dict) else None
    if isinstance(messages, str):
        return "user_message"
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return "other"
    if last.get("type") == "function_call_output":
        return "tool_result"
    return {"user": "user_message", "tool": "tool_result"}.get(str(last.get("role")), "other")


def _words(variable: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in known:
            raise ConfigError(f"{variable}: {word!r} is not supported by this release; expected {', '.join(known)}")
    return words
