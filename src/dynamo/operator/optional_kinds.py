"""Kinds of other controllers, which may be installed and removed while the operator runs, and what follows from them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import (
    CLAIM_TEMPLATES,
    CLUSTER_TOPOLOGIES,
    INFERENCE_POOLS,
    LEADER_WORKER_SETS,
    POD_CLIQUE_SCALING_GROUPS,
    POD_CLIQUE_SETS,
    POD_CLIQUES,
    POD_GROUPS,
    QUEUES_OF_KAI,
    TOPOLOGY_BINDINGS,
    VIRTUAL_SERVICES,
    ObjectKind,
)
from dynamo.operator.reconcile.names import GRAPH
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

LOOK_S = 30.0
"""Interval in which the kinds of the API server are read."""
RETRY_S = 2.0
"""Pause before the kinds of an API server that is away are read again."""
SYNC_POLL_S = 0.1
SYNC_S = 5.0
"""Limit of the wait for the first list of a kind that has appeared; its facts follow with the next look otherwise."""
GROVE = (POD_CLIQUE_SETS, POD_CLIQUES, POD_CLIQUE_SCALING_GROUPS)
VIEWED = {
    LEADER_WORKER_SETS: GRAPH,
    POD_GROUPS: GRAPH,
    POD_CLIQUE_SETS: GRAPH,
    POD_CLIQUES: "",  # Grove gives groups no labels of the graph.
    POD_CLIQUE_SCALING_GROUPS: "",
    VIRTUAL_SERVICES: GRAPH,
    INFERENCE_POOLS: GRAPH,
    CLAIM_TEMPLATES: GRAPH,
    TOPOLOGY_BINDINGS: "",
    CLUSTER_TOPOLOGIES: "",
}
"""Kinds whose objects are viewed, with the label that they must have."""
TOPOLOGIES = (TOPOLOGY_BINDINGS, CLUSTER_TOPOLOGIES)
"""Kinds of the cluster, which an operator of one namespace may not be allowed to read."""
UNREQUIRED = (*TOPOLOGIES, CLAIM_TEMPLATES)
"""Kinds without which the view is complete: roles of earlier charts do not grant them."""
NOTED = (QUEUES_OF_KAI,)
"""Kinds of which only the presence matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalSettings:
    """Use of optional kinds."""

    grove: bool = True
    """Whether Grove is used where it is installed."""
    lws: bool = True
    """Whether LeaderWorkerSets are used where they are installed."""
    gang_scheduler: str = "auto"
    """Scheduler of pods that must start together: kai, volcano, none; auto: KAI if it is installed, otherwise Volcano if that is."""
    look_s: float = LOOK_S


class KindSource(Protocol):
    """Finds kinds: `KubeClient`, or a fake in tests."""

    async def kinds_of(self, api_version: str) -> Sequence[ObjectKind]: ...


class OptionalKinds:
    """The optional kinds that the cluster has, looked for repeatedly and viewed while they exist."""

    def __init__(
        self,
        source: KindSource,
        view: ClusterView,
        settings: OptionalSettings,
        on_change: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        """Call `on_change` when a kind has appeared and was listed, and when one has vanished."""
        self._source = source
        self._view = view
        self._settings = settings
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._noted: frozenset[ObjectKind] = frozenset()

    @property
    def facts(self) -> ClusterFacts:
        """What is installed and enabled; a kind counts from the time when its objects are in the view."""
        chosen, noted = self._settings.gang_scheduler, self._noted
        has_kai = QUEUES_OF_KAI in noted and chosen in ("auto", "kai")
        return ClusterFacts(
            has_grove=all(self._view.has(one) for one in GROVE),
            has_lws=self._view.has(LEADER_WORKER_SETS),
            has_kai=has_kai,
            has_volcano=self._view.has(POD_GROUPS) and chosen in ("auto", "volcano") and not has_kai,
            has_virtual_services=self._view.has(VIRTUAL_SERVICES),
            has_inference_pools=self._view.has(INFERENCE_POOLS),
            has_resource_claims=self._view.has(CLAIM_TEMPLATES),
            topologies=self._topologies(),
        )

    async def begin(self) -> None:
        """View the kinds that the cluster has, once the API server responds."""
        while not await self._look():
            await self._clock.sleep(RETRY_S)

    async def follow(self) -> None:
        """Look again and again until cancelled; begin once the view is complete."""
        last = self.facts
        while True:
            await self._clock.sleep(self._settings.look_s)
            await self._look()
            await self.wait_for_lists()
            if self.facts != last:
                last = self.facts
                logger.info("installed for workloads: %s", ", ".join(_present(last)) or "nothing optional")
                self._on_change()

    async def wait_for_lists(self) -> None:
        """Wait until the optional kinds were listed, for a bounded time: the operator may not be allowed to read one."""
        for _ in range(int(SYNC_S / SYNC_POLL_S)):
            if all(self._view.has(one) for one in VIEWED if self._view.is_watched(one)):
                return
            await self._clock.sleep(SYNC_POLL_S)

    async def _look(self) -> bool:
        """View each kind that has appeared and leave each that has vanished; return False if the server is away."""
        try:
            wanted = [one for one in (*VIEWED, *NOTED) if self._is_enabled(one)]
            versions = sorted({one.api_version for one in wanted})
            listed = await asyncio.gather(*map(self._source.kinds_of, versions))
        except (KubeRefused, KubeUnavailable) as error:
            logger.warning("cannot read the kinds of the API server: %s", error)
            return False
        known = {(one.api_version, one.kind) for several in listed for one in several}
        present = [one for one in wanted if (one.api_version, one.kind) in known]
        for kind, label in VIEWED.items():
            if kind in present and not self._view.is_watched(kind):
                self._view.watch(kind, label, is_required=kind not in UNREQUIRED)
            elif kind not in present and self._view.is_watched(kind):
                self._view.unwatch(kind)
        self._noted = frozenset(one for one in present if one in NOTED)
        return True

    def _topologies(self) -> Mapping[str, Mapping[str, str]] | None:
        """Return the node label of each domain of each topology; None if the operator cannot read them."""
        if any(self._view.is_watched(one) and not self._view.has(one) for one in TOPOLOGIES):
            return None
        values = [value for one in TOPOLOGIES if self._view.has(one) for value in self._view.objects(one).values()]
        return {one["metadata"]["name"]: _levels(one) for one in values}

    def _is_enabled(self, kind: ObjectKind) -> bool:
        if kind == LEADER_WORKER_SETS:
            return self._settings.lws
        return self._settings.grove or kind not in (*GROVE, *TOPOLOGIES)


def _levels(topology: KubeObject) -> Mapping[str, str]:
    return {one["domain"]: one["key"] for one in (topology.get("spec") or {}).get("levels") or ()}


def _present(facts: ClusterFacts) -> Iterable[str]:
    names = {
        "Grove": facts.has_grove,
        "LeaderWorkerSet": facts.has_lws,
        "KAI": facts.has_kai,
        "Volcano": facts.has_volcano,
        "VirtualService": facts.has_virtual_services,
        "InferencePool": facts.has_inference_pools,
        "ResourceClaimTemplate": facts.has_resource_claims,
    }
    return [name for name, is_present in names.items() if is_present]
