"""InferencePool: the pods of one pool, as its selector and target port name them, kept current while the pool changes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo.core.tasks import TaskOwner
from dynamo.epp.addresses import PodAddresses
from dynamo.k8s.informer import Informer, ObjectKey, ObjectSource
from dynamo.k8s.kinds import INFERENCE_POOLS
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Pods of a pool: their labels, and the port at which each serves."""

    selector: str
    port: int


def spec_of(pool: KubeObject) -> PoolSpec | None:
    """Return the pods of a pool; None if it names no labels or not exactly one port."""
    spec: dict[str, Any] = pool.get("spec") or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = [one.get("number") for one in spec.get("targetPorts") or []]
    if not labels or len(ports) != 1 or not isinstance(ports[0], int):
        return None
    return PoolSpec(",".join(f"{name}={value}" for name, value in sorted(labels.items())), ports[0])


class PoolPods:
    """Pods of one InferencePool."""

    def __init__(self, source: ObjectSource, namespace: str, name: str, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of the pool or its pods."""
        self._source = source
        self._namespace = namespace
        self._name = name
        self._on_change = on_change
        self._spec: PoolSpec | None = None
        self._pods: PodAddresses | None = None
        self._former: PodAddresses | None = None
        """Pods of the pool before its change, which are used until those after it are known."""
        self._informer = Informer(source, INFERENCE_POOLS, namespace, on_change=self._apply, on_sync=self._synced)
        self._tasks = TaskOwner(f"InferencePool {name}")

    def start(self) -> None:
        """Start to watch the pool and its pods."""
        self._tasks.supervise(self._informer.run, "watch")

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.cancel_and_wait()
        for pods in (self._pods, self._former):
            if pods is not None:
                await pods.close()

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of the ready pods by instance id."""
        pods = self._pods if self._pods is not None and self._pods.is_synced else self._former
        if pods is None:
            return {}
        return {one: address for one in pods.names if (address := pods.address_of(one)) is not None}

    def _synced(self) -> None:
        if self._pods is None:
            logger.warning(
                "InferencePool %s/%s does not exist or has no matchLabels with one target port",
                self._namespace, self._name,
            )  # fmt: skip

    def _apply(self, key: ObjectKey, pool: KubeObject | None) -> None:
        if key != (self._namespace, self._name):
            return
        spec = None if pool is None else spec_of(pool)
        if spec == self._spec:
            return
        self._spec = spec
        replaced, self._pods = self._pods, None
        if spec is None:
            self._close_former()
        elif replaced is not None and replaced.is_synced:
            replaced, self._former = self._former, replaced
        if replaced is not None:
            self._tasks.start(replaced.close(), "close")
        if spec is not None:
            self._pods = PodAddresses(
                self._source, self._namespace, spec.selector, port=spec.port, on_change=self._pods_changed
            )
            self._pods.start()
        self._on_change()

    def _pods_changed(self) -> None:
        if self._pods is not None and self._pods.is_synced:
            self._close_former()
        self._on_change()

    def _close_former(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            self._tasks.start(former.close(), "close")
