"""Worker control: status of one worker for frontends, and its drain and resume, as an auxiliary endpoint.

It stays registered while the worker is drained, so that a frontend still lists the worker and can resume it.
"""

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo import __version__
from dynamo.backend.drain import Service
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.load import WorkerLoad
from dynamo.protocols.worker_control import ACTIONS, DRAIN, RESUME, STATUS


class WorkerControl:
    """Control of one worker."""

    def __init__(
        self,
        service: Service,
        facts: Mapping[str, Any],
        *,
        loads: Callable[[], Mapping[int, WorkerLoad]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`facts` are fixed fields of the status; `loads` returns the last load of each rank."""
        self._service = service
        self._loads = loads
        self._facts = {"version": __version__, "host": socket.gethostname(), "started_at": wall(), **facts}

    async def answer(self, body: Any) -> dict[str, Any]:
        """Execute an action and return the status after it. Raise `InvalidArgument` for another action."""
        action = body.get("action", STATUS) if isinstance(body, dict) else STATUS
        if action not in ACTIONS:
            raise InvalidArgument(f"action {action!r}: expected one of {', '.join(ACTIONS)}")
        if action == DRAIN:
            await self._service.drain()
        elif action == RESUME:
            await self._service.resume()
        status: dict[str, Any] = msgspec.to_builtins(self._service.status())
        ranks = [msgspec.to_builtins(load) for _, load in sorted(self._loads().items())]
        return {**self._facts, **status, "ranks": ranks}
