"""NVTX ranges for NVIDIA's profilers: active with `DYN_NVTX=1` and the nvtx package, else without effect."""

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from dynamo.core.config import environ

logger = logging.getLogger(__name__)


def _domain() -> Any:
    """Return the NVTX domain of ranges; None if they are disabled or the package is missing."""
    if not int(environ().get("DYN_NVTX") or 0):
        return None
    try:
        import nvtx  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        logger.warning("DYN_NVTX=1 has no effect: the nvtx package is not installed")
        return None
    return nvtx.get_domain("dynamo")


_DOMAIN = _domain()
ENABLED: bool = _DOMAIN is not None


class _Unmarked(nullcontext[None]):
    """The context manager and decorator that marks nothing."""

    def __call__(self, func: Any) -> Any:
        return func


@functools.lru_cache(maxsize=1024)
def _attributes(message: str, color: str) -> Any:
    return _DOMAIN.get_event_attributes(message=message, color=color)


def start_range(message: str, color: str = "white") -> Any:
    """Begin a range and return it for `end_range`."""
    return _DOMAIN.start_range(_attributes(message, color)) if ENABLED else None


def end_range(rng: Any) -> None:
    """End a range."""
    if ENABLED:
        _DOMAIN.end_range(rng)


def annotate(message: str = "", color: str = "white") -> Any:
    """Return a context manager, also a decorator, that marks a range of the calling thread."""
    if not ENABLED:
        return _Unmarked()
    import nvtx

    return nvtx.annotate(message, color=color, domain="dynamo")


def range_decorator(message: str = "", color: str = "white") -> Callable[[Any], Any]:
    """Return a decorator that marks each call of a function, or the whole iteration of an async generator."""
    if not ENABLED:
        return lambda func: func
    return lambda func: _marked(func, message, color)


@contextmanager
def _range(message: str, color: str) -> Iterator[None]:
    begun = start_range(message, color)
    try:
        yield
    finally:
        end_range(begun)


def _marked(func: Any, message: str, color: str) -> Any:
    """Return the function, each call of which is in a range."""

    async def iterate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with _range(message, color):
            async for item in func(*args, **kwargs):
                yield item

    def call(*args: Any, **kwargs: Any) -> Any:
        with _range(message, color):
            return func(*args, **kwargs)

    return functools.wraps(func)(iterate if inspect.isasyncgenfunction(func) else call)
