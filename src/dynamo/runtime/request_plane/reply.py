"""Reply life cycle shared by all transports: open, stopped, closed."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dynamo.core.boundaries import logged
from dynamo.core.errors import Cancelled
from dynamo.core.metrics import Counter

logger = logging.getLogger(__name__)

OPEN = 0
LATE = 1  # An item of this stream is queued in the current iteration: a token now would overtake it.
CLOSED = 2
CANCELLED = 4

OnReplyDone = Callable[["ReplyBase", BaseException | None], None]


UNASSIGNED_BYTES = Counter()
"""Byte counter of replies that are not assigned to an endpoint yet."""


class ReplyBase(ABC):
    """Reply without transport. Subclasses write; this class handles closing and cancellation."""

    __slots__ = ("_callbacks", "_on_done", "_state", "bytes_sent", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._state = OPEN
        self.bytes_sent = UNASSIGNED_BYTES
        """Counter of bytes sent to the caller."""
        self._callbacks: list[Callable[[], None]] = []
        self._on_done: OnReplyDone | None = None

    @property
    def is_cancelled(self) -> bool:
        return bool(self._state & CANCELLED)

    @property
    def is_killed(self) -> bool:
        """Return True once the response has no receiver; after a stop alone the caller still receives it."""
        return self._state & (CLOSED | CANCELLED) == CLOSED | CANCELLED

    def on_cancel(self, callback: Callable[[], None]) -> None:
        if self._state & CANCELLED:
            callback()
        elif not self._state & CLOSED:
            self._callbacks.append(callback)

    def on_done(self, callback: OnReplyDone) -> None:
        """Call `callback` once, when the handler or the caller closes the reply."""
        self._on_done = callback

    @abstractmethod
    def token(self, token_id: int) -> None:
        """Write one more token of choice 0."""

    @abstractmethod
    def item(self, value: Any) -> None:
        """Write one more element."""

    def finish(self) -> None:
        if self._state & CLOSED:
            return
        self.write_end()
        self._close(None)

    def fail(self, error: BaseException) -> None:
        if self._state & CLOSED:
            return
        self.write_error(error)
        self._close(error)

    def stop(self) -> None:
        """Handle the caller's request for a graceful end."""
        if not self._state & (CLOSED | CANCELLED):
            self._state |= CANCELLED
            self._call_back()

    def kill(self) -> None:
        """Handle a caller that disconnected or killed the request."""
        if self._state & CLOSED:
            return
        was_stopped = self._state & CANCELLED
        self._state |= CANCELLED | CLOSED
        if not was_stopped:
            self._call_back()
        self._done(Cancelled("caller disconnected"))

    @abstractmethod
    def write_end(self) -> None:
        """Send the end of the response to the caller."""

    @abstractmethod
    def write_error(self, error: BaseException) -> None:
        """Send the error that ends the response to the caller."""

    def _close(self, error: BaseException | None) -> None:
        self._state |= CLOSED
        self._callbacks.clear()
        self._done(error)

    def _done(self, error: BaseException | None) -> None:
        done, self._on_done = self._on_done, None
        if done is not None:
            done(self, error)

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            with logged(logger, "cancellation callback of request %s failed", self.request_id):
                callback()
