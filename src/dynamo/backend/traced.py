"""TracedReply: a reply that records the end of its response in a span, without overhead per token."""

from collections.abc import Callable
from typing import Any

from dynamo.core.errors import Cancelled
from dynamo.core.tracing import Span
from dynamo.protocols.engine import EngineOutput
from dynamo.runtime.request_plane.base import Reply


class TracedReply:
    """Wrapper of a reply. `token` is the reply's own method, so that tracing adds no cost per token."""

    __slots__ = ("_inner", "_span", "request_id", "token")

    def __init__(self, inner: Reply, span: Span) -> None:
        self._inner = inner
        self._span = span
        self.request_id = inner.request_id
        self.token: Callable[[int], None] = inner.token

    @property
    def is_cancelled(self) -> bool:
        return self._inner.is_cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._inner.on_cancel(callback)

    def item(self, value: Any) -> None:
        if isinstance(value, EngineOutput) and value.finish_reason is not None:
            self._span.set("finish_reason", value.finish_reason)
            if value.completion_usage is not None:
                self._span.set("input_tokens", value.completion_usage.prompt_tokens)
                self._span.set("output_tokens", value.completion_usage.completion_tokens)
        self._inner.item(value)

    def finish(self) -> None:
        self._span.end(Cancelled("the caller left") if self._inner.is_cancelled else None)
        self._inner.finish()

    def fail(self, error: BaseException) -> None:
        self._span.end(error)
        self._inner.fail(error)
