"""Span events: log lines for the beginning and the end of every span (`DYN_LOGGING_SPAN_EVENTS`).

Their target is `request_span`, as upstream's; set its level in `DYN_LOG` to suppress them.
"""

import logging
import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.core.tracing import Span, Tracer, Value

logger = logging.getLogger("request_span")

TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
TAKEN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
"""Attribute names that every log record has already."""
PATH = ("instance_id", "namespace", "component", "endpoint")
"""Names of the parts of a handler's path."""


class OwnSpan:
    """A span that is not exported; its id becomes the parent of further spans."""

    __slots__ = ("_headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        parent = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        trace, flags = (parent[1], parent[3]) if parent else (f"{random.getrandbits(128) or 1:032x}", "01")
        self._headers = {"traceparent": f"00-{trace}-{random.getrandbits(64) or 1:016x}-{flags}"}
        if parent and "tracestate" in headers:
            self._headers["tracestate"] = headers["tracestate"]

    def headers(self) -> dict[str, str]:
        return self._headers

    def set(self, name: str, value: "Value") -> None:
        """Do nothing: the span is not exported."""

    def event(self, name: str, facts: "Mapping[str, Value]") -> None:
        """Do nothing: the span is not exported."""

    def judge(self, *, is_well: bool, why: str = "") -> None:
        """Do nothing: the span is not exported."""

    def end(self, error: BaseException | None = None) -> None:
        """Do nothing: the span is not exported."""


class LoggedSpan:
    """A span whose beginning and end are logged."""

    __slots__ = ("_began_s", "_fields", "_is_over", "_span")

    def __init__(self, span: "Span", name: str, facts: "Mapping[str, Value]") -> None:
        self._span = span
        self._is_over = False
        _, trace, own, *_ = span.headers()["traceparent"].split("-")
        self._fields: dict[str, Any] = {"span_name": name, "trace_id": trace, "span_id": own, **_named(facts)}
        self._began_s = time.monotonic()
        logger.info("SPAN_FIRST_ENTRY", extra=self._fields)

    def headers(self) -> dict[str, str]:
        return self._span.headers()

    def set(self, name: str, value: "Value") -> None:
        self._fields.update(_named({name: value}))
        self._span.set(name, value)

    def event(self, name: str, facts: "Mapping[str, Value]") -> None:
        self._span.event(name, facts)
        identity = {key: self._fields[key] for key in ("span_name", "trace_id", "span_id")}
        logger.info(name, extra={**_named(facts), **identity})

    def judge(self, *, is_well: bool, why: str = "") -> None:
        self._span.judge(is_well=is_well, why=why)
        if not is_well:
            self._fields["error"] = why

    def end(self, error: BaseException | None = None) -> None:
        self._span.end(error)
        if self._is_over:
            return
        self._is_over = True
        if error is not None:
            self._fields["error"] = str(error) or type(error).__name__
        self._fields["time.duration_us"] = int((time.monotonic() - self._began_s) * 1e6)
        logger.info("SPAN_CLOSED", extra=self._fields)


class LoggedTracer:
    """Tracer whose spans are logged, and also exported if there is an inner tracer."""

    def __init__(self, inner: "Tracer | None") -> None:
        self._inner = inner

    def start(self, name: str, headers: Mapping[str, str], **facts: "Value") -> LoggedSpan:
        span = OwnSpan(headers) if self._inner is None else self._inner.start(name, headers, **facts)
        return LoggedSpan(span, name, facts)


def _named(facts: "Mapping[str, Value]") -> "dict[str, Value]":
    """Return the fields of a log line: names of record attributes get a suffix, a handler's path is split in four."""
    named = {f"{name}_" if name in TAKEN else name: value for name, value in facts.items()}
    path = str(facts.get("endpoint", "")).split("/")
    return {**named, **dict(zip(PATH, path, strict=True))} if len(path) == len(PATH) else named
