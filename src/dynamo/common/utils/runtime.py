"""Endpoint names, and the runtime of a worker."""

import asyncio
import re
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from dynamo.core.errors import InvalidArgument
from dynamo.runtime import DistributedRuntime

R = TypeVar("R")

RESPONSE_PLANES = ("tcp", "quic")


def parse_endpoint(endpoint: str) -> tuple[str, str, str]:
    """Return namespace, component and endpoint of `dyn://namespace.component.endpoint`. Raise `ValueError`."""
    address = re.fullmatch(r"(?:dyn://)?([^.]*)[.]([^.]*)[.]([^.]*)", endpoint)
    if address is None:
        raise InvalidArgument(f"endpoint {endpoint!r}: must be dyn://namespace.component.endpoint")
    return address[1], address[2], address[3]


def create_runtime(
    discovery_backend: str,
    request_plane: str,
    event_plane: str | None = None,
    use_kv_events: bool | None = None,
    response_plane: str = "tcp",
) -> tuple[DistributedRuntime, asyncio.AbstractEventLoop]:
    """Return a runtime on the running loop, and the loop. `use_kv_events` has no effect."""
    planes: dict[str, Any] = {"event_plane": event_plane, "response_plane": response_plane}
    if response_plane not in RESPONSE_PLANES:
        raise InvalidArgument(f"response_plane {response_plane!r}: expected {' or '.join(RESPONSE_PLANES)}")
    if use_kv_events is not None:
        warnings.warn("use_kv_events has no effect; the event plane decides", DeprecationWarning, stacklevel=2)
    running = asyncio.get_running_loop()
    return DistributedRuntime(running, discovery_backend, request_plane, **planes), running


def run_async(func: Callable[..., Coroutine[Any, Any, R]], *args: Any, **kwargs: Any) -> R:
    """Run a coroutine function to its end and return the result, in a thread if a loop is running in this one."""
    run = partial(asyncio.run, func(*args, **kwargs))
    if not _is_in_loop():
        return run()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
