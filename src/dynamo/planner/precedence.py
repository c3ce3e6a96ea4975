"""Precedence: which of several planners of one namespace scales.

Planners of this package choose the smallest instance id among those that are not advisory. A planner without the endpoint of its
status is a released one, which never holds: all of this package hold while it is registered.
"""

import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from dynamo.protocols.discovery import INSTANCES, PLANNER_COMPONENT, PLANNER_STATUS_ENDPOINT, EndpointId
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

READY_ENDPOINT, ADVISORY_ENDPOINT = "generate", "advisory"
DECISIONS_SHOWN = 20
"""Last decisions in a status whose request names no number."""


class Precedence:
    """Registration of this planner in its namespace, and its right to scale."""

    def __init__(self, runtime: DistributedRuntime, namespace: str, *, is_advisory: bool = False) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._is_advisory = is_advisory
        self._serving: list[Any] = []
        self._cause = ""

    async def join(self, status: Callable[[int], dict[str, Any]]) -> None:
        """Register the endpoint that released tools call to see that the planner is ready, and that of its status."""

        async def report(request: Any) -> AsyncIterator[Any]:
            count = request.get("decisions") if isinstance(request, dict) else None
            yield status(count if isinstance(count, int) and count > 0 else DECISIONS_SHOWN)

        endpoints = {ADVISORY_ENDPOINT: _ready} if self._is_advisory else {}
        endpoints |= {PLANNER_STATUS_ENDPOINT: report, READY_ENDPOINT: _ready}  # The last one makes it a candidate.
        for name, reply in endpoints.items():
            endpoint = self._runtime.endpoint(str(self._endpoint(name)))
            self._serving.append(await endpoint.serve(GeneratorHandler(reply, self._runtime.tasks)))
        await self.preceding()

    async def preceding(self) -> str:
        """Return which other planner scales this namespace; empty if it is this one. Log a change."""
        if self._is_advisory:
            return ""
        keys = await self._runtime.discovery.snapshot(INSTANCES)
        names = (READY_ENDPOINT, PLANNER_STATUS_ENDPOINT, ADVISORY_ENDPOINT)
        ready, own, advisory = ({*_instances(keys, self._endpoint(name))} for name in names)
        this = self._runtime.instance_id
        released, smaller = ready - own, {one for one in (ready & own) - advisory if one < this}
        cause = ""
        if released:
            cause = f"planner {min(released):x} of the same namespace, a released one, has precedence"
        elif smaller:
            cause = f"planner {min(smaller):x} of the same namespace has precedence"
        if cause and not self._cause:
            logger.warning("%s: this one, %x, records decisions and does not scale", cause, this)
        elif self._cause and not cause:
            logger.warning("planner %x scales from now on: the preceding one has left", this)
        self._cause = cause
        return cause

    async def leave(self) -> None:
        """Remove the registrations."""
        serving, self._serving = self._serving, []
        for one in reversed(serving):
            await one.close(0.0)

    def _endpoint(self, name: str) -> EndpointId:
        return EndpointId(self._namespace, PLANNER_COMPONENT, name)


def _instances(keys: Collection[str], endpoint: EndpointId) -> list[int]:
    """Return the ids of an endpoint's instances."""
    return [int(key.rpartition("/")[2], 16) for key in keys if key.startswith(f"{endpoint.path}/")]


async def _ready(request: Any) -> AsyncIterator[str]:
    yield "mock endpoint"
