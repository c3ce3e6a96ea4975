"""Controllers of graphs, components and scaling adapters: read the view, plan, and carry the plan out."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.k8s.client import KubeRefused
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import (
    CHECKPOINTS,
    CLAIM_TEMPLATES,
    COMPONENTS,
    CONFIG_MAPS,
    DAEMON_SETS,
    DEPLOYMENTS,
    GRAPHS,
    INFERENCE_POOLS,
    INGRESSES,
    LEADER_WORKER_SETS,
    POD_CLIQUE_SCALING_GROUPS,
    POD_CLIQUE_SETS,
    POD_CLIQUES,
    SCALING_ADAPTERS,
    SERVICES,
    VIRTUAL_SERVICES,
    ObjectKind,
)
from dynamo.k8s.times import seconds_time
from dynamo.operator.applier import Applier, EventLog, NotControlled
from dynamo.operator.device_claims import ClaimReader, claimed_gpus
from dynamo.operator.reconcile.adapters import adapter_plan
from dynamo.operator.reconcile.component import component_of, component_plan, workload_name
from dynamo.operator.reconcile.conditions import FAILED
from dynamo.operator.reconcile.graph import graph_plan
from dynamo.operator.reconcile.graph_pass import ObservedGraph
from dynamo.operator.reconcile.names import GRAPH, OperatorSettings, SnapshotStorage
from dynamo.operator.reconcile.plan import EventNote, ObjectRef, Plan
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.restores import restores_of, storage_of
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentSpec,
    DynamoComponentDeployment,
    DynamoGraphDeployment,
    DynamoGraphDeploymentScalingAdapter,
)

logger = logging.getLogger(__name__)

CONFLICT = 409
REJECTIONS = frozenset({400, 403, 422})
"""Codes with which the API server rejects an object that it would reject again."""
SETTLE_S = 0.1
"""Delay of a pass after a change, in which further changes arrive: those of one object's children come together."""
WORKLOADS = {"Deployment": DEPLOYMENTS, "LeaderWorkerSet": LEADER_WORKER_SETS}
REMOVABLE = (SERVICES, CONFIG_MAPS, INGRESSES, VIRTUAL_SERVICES, INFERENCE_POOLS, CLAIM_TEMPLATES)
"""Kinds whose objects are deleted when their graph no longer requires them."""
Facts = Callable[[], ClusterFacts]
"""Returns what the cluster has at present."""


def checkpoints_of(view: ClusterView, namespace: str, components: Sequence[ComponentSpec]) -> list[DynamoCheckpoint]:
    """Return the checkpoints of a namespace; none if no component starts from one."""
    if not any(one.experimental and one.experimental.checkpoint for one in components):
        return []
    found: list[DynamoCheckpoint] = []
    for (space, _), value in view.objects(CHECKPOINTS).items():
        if space == namespace:
            with contextlib.suppress(msgspec.ValidationError):  # Reported when that object is reconciled itself.
                found.append(decode(DynamoCheckpoint, value))
    return found


def storage_in(view: ClusterView, namespace: str) -> SnapshotStorage | None:
    """Return where the snapshot agents of a namespace keep checkpoints."""
    return storage_of(value for (space, _), value in view.objects(DAEMON_SETS).items() if space == namespace)


class ObjectController(Protocol):
    """Reconciles the objects of one kind."""

    kind: ClassVar[ObjectKind]

    async def plan(self, value: KubeObject, now: str) -> Plan: ...


class GraphController:
    """Reconciles DynamoGraphDeployments."""

    kind: ClassVar = GRAPHS

    def __init__(self, view: ClusterView, settings: OperatorSettings, facts: Facts, reader: ClaimReader) -> None:
        self._view = view
        self._reader = reader
        self._settings = settings
        self._facts = facts

    async def plan(self, value: KubeObject, now: str) -> Plan:
        """Return the plan of a graph."""
        namespace = value["metadata"]["namespace"]
        graph = decode(DynamoGraphDeployment, value)
        components = self._view.children(value, COMPONENTS)
        adapters = self._view.children(value, SCALING_ADAPTERS)
        sets = self._view.children(value, POD_CLIQUE_SETS)
        observed = ObservedGraph(
            components=[decode(DynamoComponentDeployment, one) for one in components],
            adapters=[one["metadata"]["name"] for one in adapters],
            owned=[
                ObjectRef(kind.api_version, kind.kind, one["metadata"]["namespace"], one["metadata"]["name"])
                for kind in REMOVABLE
                for one in self._view.children(value, kind)
                if GRAPH in (one["metadata"].get("labels") or {})  # Others are of the request that made the graph.
            ],
            clique_set=sets[0] if sets else None,
            cliques=[
                {"kind": kind.kind, **one}
                for owner in sets
                for kind in (POD_CLIQUES, POD_CLIQUE_SCALING_GROUPS)
                for one in self._view.children(owner, kind)
            ],
            checkpoints=checkpoints_of(self._view, namespace, graph.spec.components or []),
            snapshot_storage=storage_in(self._view, namespace),
        )
        claimed = await claimed_gpus(self._reader, namespace, graph.spec.components or [])
        settings = dataclasses.replace(self._settings, claimed_gpus=claimed)
        return graph_plan(graph, observed, settings, self._facts(), now)


class ComponentController:
    """Reconciles DynamoComponentDeployments."""

    kind: ClassVar = COMPONENTS

    def __init__(self, view: ClusterView, settings: OperatorSettings, facts: Facts, reader: ClaimReader) -> None:
        self._view = view
        self._reader = reader
        self._settings = settings
        self._facts = facts

    async def plan(self, value: KubeObject, now: str) -> Plan:
        """Return the plan of a component."""
        deployed = decode(DynamoComponentDeployment, value)
        kind, name = workload_name(deployed)
        namespace = deployed.metadata.namespace
        workload = self._view.get(WORKLOADS[kind], namespace, name)
        component = component_of(deployed)
        checkpoints = checkpoints_of(self._view, namespace, [component])
        restores = restores_of([component], checkpoints, storage_in(self._view, namespace))
        restore = restores.get(component.name or "")
        claimed = await claimed_gpus(self._reader, namespace, [component])
        settings = dataclasses.replace(self._settings, claimed_gpus=claimed)
        return component_plan(deployed, workload, settings, self._facts(), now, restore)


class AdapterController:
    """Reconciles DynamoGraphDeploymentScalingAdapters."""

    kind: ClassVar = SCALING_ADAPTERS

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    async def plan(self, value: KubeObject, now: str) -> Plan:
        """Return the plan of a scaling adapter."""
        adapter = decode(DynamoGraphDeploymentScalingAdapter, value)
        graph = self._view.get(GRAPHS, adapter.metadata.namespace, adapter.spec.dgd_ref.name)
        return adapter_plan(adapter, None if graph is None else decode(DynamoGraphDeployment, graph), now)


class Reconciler:
    """Reconciles one object of a kind: the function that the work queue's workers call."""

    def __init__(
        self,
        controller: ObjectController,
        view: ClusterView,
        applier: Applier,
        events: EventLog,
        clock: Clock | None = None,
    ) -> None:
        self._controller = controller
        self._events = events
        self._view = view
        self._applier = applier
        self._clock = clock or SystemClock()
        self._deferred: set[ObjectKey] = set()
        """Objects whose last pass wrote children and left the status to the next one, when these have changed too."""

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Make the cluster match an object. Return the seconds after which to look again, or None.

        An object that does not match its schema is not retried: it gets an event, and its next change is waited for.
        """
        kind = self._controller.kind
        value = self._view.get(kind, *key)
        if value is None or value["metadata"].get("deletionTimestamp"):
            self._deferred.discard(key)
            return None  # Its children are collected with it.
        plan = await self._plan(value)
        try:
            has_written = await self._applier.write_objects(plan, value, kind)
        except NotControlled as error:  # Retried: the other object may be removed.
            await self._report(error, "NotControlled", value)
            raise
        except KubeRefused as error:
            if plan.if_rejected is not None and error.code in REJECTIONS:
                await self._applier.write_status(plan.if_rejected(str(error)), value, kind, self._now)
                return None
            if error.code != CONFLICT:  # A conflict is resolved by the next pass.
                await self._report(error, FAILED, value)
            raise
        value = self._view.get(kind, *key) or value
        if has_written and plan.describes_observed:
            if key not in self._deferred:
                self._deferred.add(key)
                return SETTLE_S
            plan = await self._plan(value)
        self._deferred.discard(key)
        await self._applier.write_status(plan, value, kind, self._now)
        return plan.requeue_s

    async def _report(self, error: Exception, reason: str, value: KubeObject) -> None:
        """Record a failure as an event and as a condition."""
        kind = self._controller.kind
        self._events.record(kind, value, "Warning", reason, str(error))
        await self._applier.write_failure(str(error), value, kind, self._now)

    @property
    def _now(self) -> str:
        return seconds_time(self._clock.wall())

    async def _plan(self, value: KubeObject) -> Plan:
        try:
            return await self._controller.plan(value, self._now)
        except msgspec.ValidationError as error:
            return Plan(events=[EventNote("Warning", "InvalidObject", str(error))])
