"""Request headers: identity, tracing, metadata, routing and session of a request; headers take precedence over the body.

An invalid value is ignored, as upstream; an invalid worker id is refused, because the request would go to another worker.
"""

import logging
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.core.logging import scope_fields
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.nvext import AgentHints, NvExt
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.serving.response_stream import IncomingRequest
from dynamo.text.preparing import routing_of

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
"""Header names (lower case) and values."""

Change = Callable[[NvExt, str], None]

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1
TEXT_CHARS_MAX = 40  # Maximum number of characters of a value in an error message.
TRACE_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")
META_HEADER = b"x-dynamo-meta-"


# ---- identity and tracing -------------------------------------------------------------------------------------------


def identify(exchange: IncomingRequest) -> str:
    """Return the request id: the client's `x-dynamo-request-id` if it is a UUID, else a new one. Echo `x-request-id`."""
    echoed = exchange.header(b"x-request-id")
    if echoed is not None:
        exchange.header_bytes += b"x-request-id: %b\r\n" % echoed
    chosen = exchange.header(b"x-dynamo-request-id")
    if chosen is not None:
        try:
            return str(uuid.UUID(chosen.decode("ascii")))
        except ValueError:
            identities = scope_fields(("", trace_headers(exchange), "", ""))
            logger.warning("x-dynamo-request-id must be a valid UUID; it is ignored", extra=identities)
    return new_id()


UUID_RANDOM = ~(0xF000_C000 << 48) & (1 << 128) - 1
"""Random bits of a UUID."""
UUID_VERSION = 0x4000_8000 << 48
"""Version 4 and the variant of RFC 9562."""


def new_id() -> str:
    """Return a random UUID (version 4), generated without a system call: it is an identifier, not a secret."""
    digits = f"{random.getrandbits(128) & UUID_RANDOM | UUID_VERSION:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def trace_headers(exchange: IncomingRequest) -> dict[str, str]:
    """Return the client's tracing headers for the worker."""
    return {name.decode("ascii"): value.decode("latin-1") for name, value in exchange.headers if name in TRACE_HEADERS}


def new_traceparent() -> str:
    """Return the trace header of a new trace."""
    return f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-01"


def metadata_of(headers: Headers) -> dict[str, str]:
    """Return the context metadata of the worker's request: the client's headers `x-dynamo-meta-<key>`."""
    return {
        name[len(META_HEADER) :].decode("ascii"): value.decode("latin-1")
        for name, value in headers
        if name.startswith(META_HEADER)
    }


# ---- routing --------------------------------------------------------------------------------------------------------


def with_headers(nvext: NvExt | None, headers: Headers) -> NvExt | None:
    """Return the request's `nvext` with the headers applied, which take precedence. Raise `InvalidArgument`."""
    changes = [(change, value) for name, value in headers if (change := ROUTING.get(name)) is not None]
    if not changes:
        return nvext
    changed = NvExt() if nvext is None else msgspec.structs.replace(nvext)
    for change, value in changes:
        change(changed, value.decode("latin-1").strip())
    return changed


def _number(text: str, low: int, high: int) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if low <= number <= high else None


def _instance(header: str, text: str) -> int | None:
    """Parse an instance id: decimal as upstream, or hexadecimal as shown by `dynamo route`; None for empty text."""
    if not text:
        return None
    try:
        instance_id = int(text) if text.isdecimal() else int(text, 16)
    except ValueError:
        instance_id = -1
    if not 0 <= instance_id <= U64_MAX:
        raise InvalidArgument(
            f"{header} {text[:TEXT_CHARS_MAX]!r} is not an instance id: expected a decimal or hexadecimal number"
        )
    return instance_id


def _set_worker(nvext: NvExt, text: str) -> None:
    worker = _instance("x-dynamo-worker-instance-id", text)
    if worker is not None:
        nvext.backend_instance_id = nvext.decode_worker_id = worker


def _set_prefill_worker(nvext: NvExt, text: str) -> None:
    worker = _instance("x-dynamo-prefill-instance-id", text)
    if worker is not None:
        nvext.prefill_worker_id = worker


def _setter(field: str, high: int) -> Change:
    def change(nvext: NvExt, text: str) -> None:
        number = _number(text, 0, high)
        if number is not None:
            setattr(nvext, field, number)

    return change


def _hint(field: str, low: int, high: int) -> Change:
    def change(nvext: NvExt, text: str) -> None:
        number = _number(text, low, high)
        if number is not None:
            hints = AgentHints() if nvext.agent_hints is None else msgspec.structs.replace(nvext.agent_hints)
            setattr(hints, field, number)
            nvext.agent_hints = hints

    return change


def _set_salt(nvext: NvExt, text: str) -> None:
    if text:
        nvext.cache_salt = text


_set_rank = _setter("dp_rank", U32_MAX)

ROUTING: dict[bytes, Change] = {
    b"x-dynamo-worker-instance-id": _set_worker,
    b"x-worker-instance-id": _set_worker,
    b"x-dynamo-prefill-instance-id": _set_prefill_worker,
    b"x-dynamo-dp-rank": _set_rank,
    b"x-dp-rank": _set_rank,
    b"x-data-parallel-rank": _set_rank,
    b"x-dynamo-prefill-dp-rank": _setter("prefill_dp_rank", U32_MAX),
    b"x-dynamo-request-priority": _hint("priority", -(1 << 31), (1 << 31) - 1),
    b"x-dynamo-request-strict-priority": _hint("strict_priority", 0, U32_MAX),
    b"x-tenant-id": _set_salt,
}
"""Setter of each routing header."""


def headed(request: PreprocessedRequest, headers: Headers) -> PreprocessedRequest:
    """Return the request with routing and session from its headers, which take precedence."""
    context = agent_context(headers, "other")
    if context is not None:
        request = msgspec.structs.replace(request, agent_context=context)
    nvext = with_headers(None, headers)
    named = routing_of(nvext, None if nvext is None else nvext.cache_salt)
    if named is None:
        return request
    changes = {name: value for name in named.__struct_fields__ if (value := getattr(named, name)) is not None}
    return msgspec.structs.replace(request, routing=msgspec.structs.replace(request.routing or Routing(), **changes))


# ---- sessions -------------------------------------------------------------------------------------------------------


class _Client(NamedTuple):
    """Agent with its own session headers."""

    session: str
    parent: str
    agent: str = ""
    """Header of an agent's session within the session, which then is its parent unless `parent` names another one."""


CLIENTS = (
    _Client("x-claude-code-session-id", "x-claude-code-parent-agent-id", "x-claude-code-agent-id"),
    _Client("thread-id", "x-codex-parent-thread-id"),
    _Client("x-session-id", "x-parent-session-id"),
)
"""Known agents; the first with a session header applies."""

SESSION, PARENT, FINAL = "x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final"
_NATIVE = frozenset(name.encode() for client in CLIENTS for name in client if name)
_SESSIONS = _NATIVE | {SESSION.encode(), PARENT.encode(), FINAL.encode()}
TRUE_WORDS = ("true", "1", "yes", "on")


def agent_context(headers: Headers, trigger: str) -> dict[str, Any] | None:
    """Return the session of the request; None without a session header. `trigger` is the cause of the request."""
    given: dict[str, str] = {}
    native: dict[str, list[str]] = {}
    for name, value in headers:
        if name in _SESSIONS:
            text = value.decode("latin-1").strip()
            if text:
                given.setdefault(name.decode(), text)
                if name in _NATIVE:
                    native.setdefault(name.decode(), []).append(text)
    if not given:
        return None
    session, parent = _session_of(given)
    if session is None:
        return None
    context: dict[str, Any] = {"session_id": session}
    if parent is not None:
        context["parent_session_id"] = parent
    if FINAL in given:
        context["session_final"] = given[FINAL].lower() in TRUE_WORDS
    if native:
        context["agent_headers"] = native
    context["input_trigger"] = trigger
    return context


CACHE_KEY = "prompt_cache_key:"
"""Prefix of the ids of sessions that no header names."""


def cache_key_context(prompt_cache_key: str | None, trigger: str) -> dict[str, Any] | None:
    """Return the session of requests with the same `prompt_cache_key`, None without one.

    OpenAI routes requests with the same key to the same machine, as session affinity does here.
    """
    return {"session_id": CACHE_KEY + prompt_cache_key, "input_trigger": trigger} if prompt_cache_key else None


def _session_of(given: dict[str, str]) -> tuple[str | None, str | None]:
    """Return the session and its parent."""
    if SESSION in given:
        return given[SESSION], given.get(PARENT)
    for client in CLIENTS:
        session = given.get(client.session)
        if session is None:
            continue
        agent = given.get(client.agent) if client.agent else None
        if agent is not None:
            return agent, given.get(client.parent, session)
        return session, None if client.agent else given.get(client.parent)
    return None, None


def trigger_of(request: ChatCompletionRequest | CompletionRequest) -> str:
    """Return the cause of an agent's request: its user, a tool's result, or something else."""
    role = request.messages[-1].role if isinstance(request, ChatCompletionRequest) else None
    return {"user": "user_message", "tool": "tool_result"}.get(role or "", "other")
