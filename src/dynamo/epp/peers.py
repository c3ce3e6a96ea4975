"""Replica peers: the addresses of a picker's replicas, from the EndpointSlices of their Service."""

from collections.abc import Callable
from typing import Any

from dynamo.core.tasks import TaskOwner
from dynamo.k8s.informer import Informer, ObjectKey, ObjectSource
from dynamo.k8s.kinds import ENDPOINT_SLICES
from dynamo.protocols.kubernetes.common import KubeObject

SERVICE_LABEL = "kubernetes.io/service-name"


class ServicePeers:
    """Ready addresses of a Service without the own one."""

    def __init__(
        self, source: ObjectSource, namespace: str, service: str, own_ip: str, on_change: Callable[[set[str]], None]
    ) -> None:
        """Call `on_change` with all addresses after every change."""
        self._own_ip = own_ip
        self._on_change = on_change
        self._slices: dict[ObjectKey, set[str]] = {}
        self.is_synced = False
        self._informer = Informer(
            source, ENDPOINT_SLICES, namespace, f"{SERVICE_LABEL}={service}",
            on_change=self._apply, on_sync=self._synced,
        )  # fmt: skip
        self._tasks = TaskOwner(f"replicas of {service}")

    def start(self) -> None:
        """Start to watch the Service."""
        self._tasks.supervise(self._informer.run, "watch")

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.cancel_and_wait()

    def _synced(self) -> None:
        self.is_synced = True

    def _apply(self, key: ObjectKey, slice_: KubeObject | None) -> None:
        self._slices.pop(key, None)
        if slice_ is not None:
            self._slices[key] = ready_addresses(slice_)
        self._on_change(set().union(*self._slices.values()) - {self._own_ip})


def ready_addresses(slice_: KubeObject) -> set[str]:
    """Return the addresses of a slice's ready endpoints; an endpoint without the condition is ready."""
    endpoints: list[dict[str, Any]] = slice_.get("endpoints") or []
    return {
        address
        for one in endpoints
        if (one.get("conditions") or {}).get("ready") is not False
        for address in one.get("addresses") or []
    }
