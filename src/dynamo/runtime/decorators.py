"""Decorators: `dynamo_worker` creates a runtime for a function; `dynamo_endpoint` parses requests of a handler."""

import asyncio
import contextlib
import functools
import logging
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from dynamo.core import logging as log
from dynamo.core.config import setting
from dynamo.runtime.config import default_discovery
from dynamo.runtime.distributed import DistributedRuntime

R = TypeVar("R")

END_S = 5.0  # After the runtime has closed, a function that still runs after this time is cancelled.


def dynamo_worker(
    enable_nats: bool | None = None,
) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R | None]]]:
    """Wrap `async f(runtime, …)`: create the runtime from the environment and shut it down afterwards.

    SIGTERM and Ctrl-C start the shutdown: endpoints are deregistered and drained, and a function that does not return
    with its runtime is cancelled; the result is then None. A function that serves nothing, and one at a second signal,
    is cancelled immediately. `enable_nats` is deprecated and has no effect.
    """
    if enable_nats is not None:
        warnings.warn("enable_nats has no effect; set DYN_REQUEST_PLANE", DeprecationWarning, stacklevel=2)

    def wrap(work: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R | None]]:
        @functools.wraps(work)
        async def run(*args: Any, **kwargs: Any) -> R | None:
            runtime = _from_environment()
            task = asyncio.ensure_future(_work(runtime, lambda: work(runtime, *args, **kwargs)))
            shutdowns: list[asyncio.Task[None]] = []

            def end() -> None:
                if shutdowns:
                    task.cancel()
                    return
                loop = asyncio.get_running_loop()
                if not runtime.is_serving:  # A client has no request to end; cancelled first, it sees no closed client.
                    task.cancel()
                shutdowns.append(runtime.shutdown())
                shutdowns[0].add_done_callback(lambda _: loop.call_later(END_S, task.cancel))

            try:
                with _on_signals(end):
                    return await task
            except asyncio.CancelledError:
                if shutdowns:
                    return None
                raise
            finally:
                await runtime.shutdown()

        return run

    return wrap


def dynamo_endpoint(
    request_model: type[Any], response_model: type[Any]
) -> Callable[[Callable[..., AsyncIterator[Any]]], Callable[..., AsyncIterator[Any]]]:
    """Parse the request of a handler into a pydantic model: `handler(request)` or `handler(self, request)`.

    A `str` is parsed as JSON and a `dict` as values; an invalid request raises `ValueError` when the first element is
    requested. A `request_model` that is not a pydantic model leaves requests unchanged; `response_model` is not
    enforced, as in Dynamo.
    """
    is_model = hasattr(request_model, "model_validate")

    def wrap(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        @functools.wraps(handler)
        async def generate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            if is_model and len(args) in (1, 2):
                args = (*args[:-1], _parsed(request_model, args[-1]))
            async for element in handler(*args, **kwargs):
                yield element

        return generate

    return wrap


def _from_environment() -> DistributedRuntime:
    if not logging.getLogger().handlers:  # Keep an existing logging configuration.
        log.setup()
    return DistributedRuntime(
        None,
        setting("DYN_DISCOVERY_BACKEND", default_discovery(), str),
        setting("DYN_REQUEST_PLANE", "tcp", str),
        event_plane=setting("DYN_EVENT_PLANE", "zmq", str),
    )


async def _work(runtime: DistributedRuntime, work: Callable[[], Awaitable[R]]) -> R:
    await runtime.connect()
    await runtime.start_system_server()
    return await work()


def _parsed(model: type[Any], value: Any) -> Any:
    if isinstance(value, model):
        return value
    try:
        if isinstance(value, str):
            return model.model_validate_json(value)
        if isinstance(value, dict):
            return model.model_validate(value)
    except ValueError as error:
        raise ValueError(f"Invalid request: {error}") from error
    raise ValueError(f"Invalid request: {value}")


@contextlib.contextmanager
def _on_signals(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` on SIGTERM and SIGINT, unless the program has its own handlers."""
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if _is_free(number)]
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _is_free(number: signal.Signals) -> bool:
    """Return whether a signal has no handler other than Python's default or that of `asyncio.run`."""
    handler = signal.getsignal(number)
    if isinstance(handler, functools.partial):
        return getattr(handler.func, "__qualname__", "") == "Runner._on_sigint"
    return handler in (signal.SIG_DFL, signal.default_int_handler)
