"""Shutdown of a worker: unregister, wait, drain, stop the engine, stop the runtime."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from dynamo.core.boundaries import logged
from dynamo.core.config import environ
from dynamo.runtime import DistributedRuntime

logger = logging.getLogger(__name__)

GRACE_PERIOD = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
GRACE_PERIOD_S = 5.0  # Upstream's default: frontends that still have the instance in view may send requests.
STEP_S = 30.0  # Maximum for each callback: a hanging engine must not keep the process alive.

SIGNALS = (signal.SIGTERM, signal.SIGINT)

Step = Callable[[], Coroutine[Any, Any, Any]]

_shutdown_started = asyncio.Event()


def get_grace_period_seconds() -> float:
    """Return the seconds between unregistration and the end of the endpoints."""
    text = environ().get(GRACE_PERIOD) or GRACE_PERIOD_S
    with suppress(ValueError):
        return max(0.0, float(text))
    logger.warning("ignored %s=%s: must be seconds, 0 or more; using %s", GRACE_PERIOD, text, GRACE_PERIOD_S)
    return GRACE_PERIOD_S


async def _unregister_endpoints(endpoints: Iterable[Any]) -> None:
    """Unregister each endpoint once; a failure does not stop the shutdown."""

    async def unregister(endpoint: Any) -> None:
        with logged(logger, "shutdown: cannot unregister an endpoint"):
            await endpoint.unregister_endpoint_instance()

    await asyncio.gather(*map(unregister, {id(endpoint): endpoint for endpoint in endpoints}.values()))


async def _run(name: str, callback: Callable[[], Awaitable[Any]] | None) -> None:
    """Run one step of the shutdown, whose failure does not stop the next ones."""
    if callback is not None:
        logger.info("shutdown: %s", name)
        with logged(logger, "shutdown: %s failed", name):
            await asyncio.wait_for(callback(), STEP_S)


async def graceful_shutdown_with_discovery(
    runtime: DistributedRuntime,
    endpoints: Iterable[Any],
    shutdown_event: asyncio.Event | None = None,
    grace_period_s: float | None = None,
    drain_callback: Step | None = None,
    pre_shutdown_callback: Step | None = None,
    cleanup_callback: Step | None = None,
) -> None:
    """Shut down a worker once per process. The event is set after the draining, before the cleanup."""
    if _shutdown_started.is_set():
        return
    _shutdown_started.set()
    grace_s = get_grace_period_seconds() if grace_period_s is None else grace_period_s
    logger.info("shutdown: unregister endpoints, then wait %.2f s", grace_s)
    await _unregister_endpoints(list(endpoints))
    if grace_s > 0:
        await asyncio.sleep(grace_s)
    await _run("drain", drain_callback)
    await _run("withdraw the worker's records", pre_shutdown_callback)
    if shutdown_event is not None:
        shutdown_event.set()
    await _run("clean up the engine", cleanup_callback)
    runtime.shutdown()


def install_signal_handlers(
    loop: asyncio.AbstractEventLoop,
    runtime: Any,
    endpoints: Iterable[Any],
    shutdown_event: asyncio.Event | None = None,
    grace_period_s: float | None = None,
    drain_callback: Step | None = None,
    pre_shutdown_callback: Step | None = None,
    cleanup_callback: Step | None = None,
) -> None:
    """Shut down gracefully at SIGTERM and SIGINT."""
    steps = (drain_callback, pre_shutdown_callback, cleanup_callback)
    running: set[asyncio.Task[None]] = set()  # The loop does not keep tasks alive.

    async def shut_down() -> None:
        with logged(logger, "shutdown failed"):
            await graceful_shutdown_with_discovery(runtime, endpoints, shutdown_event, grace_period_s, *steps)

    def on_signal() -> None:
        if not running:
            running.add(loop.create_task(shut_down()))

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
