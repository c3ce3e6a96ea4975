"""Boundaries: contexts that undo work after a failure, or keep a failure from the code around them."""

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType


class Rollback:
    """Call `undo` if the block raises, cancellation included; the exception propagates."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo()


class AsyncRollback:
    """Await `undo()` if the block raises, cancellation included; the exception propagates."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], Awaitable[object]]) -> None:
        self._undo = undo

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            await self._undo()


class ErrorBoundary:
    """Pass an exception of the block to `on_error` and continue after the block.

    For one request, connection or callback among others that must go on whatever fails. Cancellation and exits, which are
    no `Exception`, propagate.
    """

    __slots__ = ("_on_error",)

    def __init__(self, on_error: Callable[[Exception], object]) -> None:
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._on_error(error)
        return True


def logged(logger: logging.Logger, message: str, *args: object) -> ErrorBoundary:
    """Return a boundary that logs the exception with its traceback."""
    return ErrorBoundary(lambda error: logger.error(message, *args, exc_info=error))
