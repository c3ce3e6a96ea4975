"""Worker addresses: the gateway's destination of each worker, from its pod, or without a cluster from its instance."""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from dynamo.core.tasks import TaskOwner
from dynamo.k8s.informer import Informer, ObjectKey, ObjectSource
from dynamo.k8s.kinds import PODS
from dynamo.protocols.discovery import Instance
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.runtime.discovery.pod_identity import id_of_name, record_name

logger = logging.getLogger(__name__)

HTTP_PORT_NAME = "http"
"""Name of the container port that serves inference; a worker's other ports serve metrics."""


class WorkerAddresses(Protocol):
    """Addresses of workers by instance id."""

    is_synced: bool
    """Whether the first complete view has been read."""

    def address_of(self, worker_id: int) -> str | None:
        """Return the address `ip:port` of a worker, None if it has none."""
        ...

    def all(self) -> dict[int, str]:
        """Return the addresses of all ready workers."""
        ...


def is_in(address: str, subset: Collection[str] | None) -> bool:
    """Return whether an address is among the gateway's candidates, which are `ip:port` or `ip`."""
    return subset is None or address in subset or address.rpartition(":")[0].strip("[]") in subset


class PodAddresses:
    """Addresses of the pods that a label selector matches."""

    def __init__(
        self,
        source: ObjectSource,
        namespace: str,
        selector: str,
        *,
        port: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`port`: the port of every pod; None for the container port named `http`."""
        self._port = port
        self._on_change = on_change
        self._by_id: dict[int, tuple[str, ObjectKey]] = {}
        self._ids: dict[ObjectKey, tuple[int, ...]] = {}
        self.names: dict[int, str] = {}
        """Names of the pods by the instance id of their main container."""
        self._informer = Informer(source, PODS, namespace, selector, on_change=self._apply, on_sync=self._synced)
        self.is_synced = False
        self._tasks = TaskOwner("worker pods")

    def start(self) -> None:
        """Start to watch the pods."""
        self._tasks.supervise(self._informer.run, "watch")

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.cancel_and_wait()

    def address_of(self, worker_id: int) -> str | None:
        """Return the address of a worker, None if its pod is not ready."""
        found = self._by_id.get(worker_id)
        return None if found is None else found[0]

    def all(self) -> dict[int, str]:
        """Return the addresses of all ready workers."""
        return {worker_id: address for worker_id, (address, _) in self._by_id.items()}

    def _apply(self, key: ObjectKey, pod: KubeObject | None) -> None:
        for worker_id in self._ids.pop(key, ()):
            self._by_id.pop(worker_id, None)
            self.names.pop(worker_id, None)
        address = None if pod is None else address_of_pod(pod, self._port)
        if pod is not None and address is not None:
            name = key[1]
            ids = tuple(dict.fromkeys(id_of_name(record) for record in (name, *records_of(pod))))
            self._ids[key] = ids
            self._by_id.update(dict.fromkeys(ids, (address, key)))
            self.names[ids[0]] = name
        self._on_change()

    def _synced(self) -> None:
        self.is_synced = True
        self._on_change()


def records_of(pod: KubeObject) -> Iterable[str]:
    """Return the discovery records of a pod's containers, which exist in container mode."""
    name = pod["metadata"]["name"]
    return [record_name(name, one.get("name", "")) for one in containers_of(pod)]


def containers_of(pod: KubeObject) -> list[dict[str, Any]]:
    """Return the containers of a pod."""
    return list((pod.get("spec") or {}).get("containers") or [])


def address_of_pod(pod: KubeObject, port: int | None) -> str | None:
    """Return the address of a pod that is ready and does not end; None for any other one or without a port."""
    status = pod.get("status") or {}
    ip = status.get("podIP")
    conditions = status.get("conditions") or []
    is_ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    if not ip or not is_ready or pod["metadata"].get("deletionTimestamp"):
        return None
    if port is None:
        port = next(
            (
                one["containerPort"]
                for container in containers_of(pod)
                for one in container.get("ports") or []
                if one.get("name") == HTTP_PORT_NAME
            ),
            None,
        )
        if port is None:
            logger.warning("pod %s has no container port named %s", pod["metadata"]["name"], HTTP_PORT_NAME)
            return None
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


class InstanceAddresses:
    """Addresses from the discovery records of instances, for workers outside a cluster: their host, and one port."""

    is_synced = True

    def __init__(self, instances: Callable[[], Iterable[Instance]], port: int) -> None:
        self._instances = instances
        self._port = port

    def address_of(self, worker_id: int) -> str | None:
        """Return the address of a worker, None if it is not present or has no TCP address."""
        return self.all().get(worker_id)

    def all(self) -> dict[int, str]:
        """Return the addresses of all instances."""
        found = {}
        for one in self._instances():
            host = (one.transport.tcp or "").partition("/")[0].rpartition(":")[0]
            if host:
                found[one.instance_id] = f"{host}:{self._port}"
        return found
