"""Operator: informers, controllers, webhooks, leader election and the health server, started and stopped in order."""

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.http_server import HttpServer, ServerLimits, metrics_response, plain_text
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeClient
from dynamo.k8s.controller import Controller, ReconcileResult
from dynamo.k8s.events import EventRecorder
from dynamo.k8s.informer import ObjectKey, key_of
from dynamo.k8s.kinds import (
    CHECKPOINTS,
    COMPONENTS,
    CONFIG_MAPS,
    DAEMON_SETS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GRAPH_REQUESTS,
    GRAPHS,
    INGRESSES,
    JOBS,
    MODELS,
    POD_CLIQUE_SETS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SCALING_ADAPTERS,
    SERVICE_ACCOUNTS,
    SERVICES,
    VOLUME_CLAIMS,
    ObjectKind,
)
from dynamo.k8s.leader import LeaderElection
from dynamo.k8s.workqueue import WorkQueue
from dynamo.operator.applier import Applier
from dynamo.operator.controllers import (
    SETTLE_S,
    AdapterController,
    ComponentController,
    GraphController,
    ObjectController,
    Reconciler,
)
from dynamo.operator.failover_groups import MEMBERS, FailoverGroupReconciler
from dynamo.operator.jobs import SELECTIONS, CheckpointController, RequestController, owner_of_job, requests_of_graph
from dynamo.operator.metrics import OperatorMetrics
from dynamo.operator.model_loader import AdapterLoader
from dynamo.operator.models import ModelReconciler
from dynamo.operator.namespace_scope import EveryNamespace, NamespaceScope
from dynamo.operator.optional_kinds import OptionalKinds, OptionalSettings
from dynamo.operator.pull_secrets import PullSecretIndex
from dynamo.operator.reconcile.names import BASE_MODEL_HASH, GRAPH, OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.requests.job import RequestSettings
from dynamo.operator.reconcile.restores import AGENT_LABEL, starts_from_checkpoint
from dynamo.operator.reconcile.topology import FROM_NODE
from dynamo.operator.topology_labels import TopologyLabelReconciler
from dynamo.operator.view import ClusterView

logger = logging.getLogger(__name__)

COMPONENT = "dynamo-operator"
SYNC_POLL_S = 0.05
STOP_S = 20.0
"""Time for running reconciliations at the end; the Lease is released after them."""
LABELLED = (DEPLOYMENTS, SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIG_MAPS, INGRESSES, VOLUME_CLAIMS)
"""Kinds of which only the objects of graphs are viewed."""


@dataclass(slots=True)
class RunningController:
    """One kind with its queue and workers."""

    kind: ObjectKind
    queue: WorkQueue[ObjectKey]
    controller: Controller[ObjectKey] | None = None


class Operator:
    """Reconciles the objects of one cluster, or of one namespace of it."""

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        *,
        requests: RequestSettings | None = None,
        namespace: str | None = None,
        optional: OptionalSettings | None = None,
        workers: int = 4,
        election: LeaderElection | None = None,
        scope: NamespaceScope | None = None,
        metrics: MetricsRegistry | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use the kinds of other controllers that the cluster has, by the `optional` settings.

        With an `election`, nothing is written before this process is the leader.
        """
        self._clock = clock or SystemClock()
        self._workers = workers
        self._election = election
        self._scope = scope or EveryNamespace()
        self.metrics = OperatorMetrics(metrics or MetricsRegistry())
        self._page = MetricsPage(self.metrics.registry)
        self.view = ClusterView(client, namespace, self._clock)
        self.events = EventRecorder(client, COMPONENT, clock=self._clock)
        self.applier = Applier(client, self.view, self.events)
        self._tasks = TaskOwner("operator")
        self.kinds = OptionalKinds(client, self.view, optional or OptionalSettings(), self._reconcile_all, self._clock)
        self.pull_secrets = PullSecretIndex(client, namespace, self._reconcile_all, self._clock)
        settings = dataclasses.replace(settings, pull_secrets=self.pull_secrets.names)
        self._running = [
            self._controlled(one)
            for one in (
                GraphController(self.view, settings, self._facts, client),
                ComponentController(self.view, settings, self._facts, client),
                AdapterController(self.view),
                RequestController(self.view, client, requests or RequestSettings(operator=settings)),
                CheckpointController(self.view),
            )
        ]
        loader = AdapterLoader()
        models = ModelReconciler(self.view, self.applier, self.events, loader, client, self._clock)
        self._running.append(self._run(models.kind, models.reconcile))
        self._topology = TopologyLabelReconciler(self.view, client, self.events, self._facts)
        self._failover = FailoverGroupReconciler(self.view, client, self.events)
        self._running.append(self._run(PODS, self._reconcile_pod))
        for labels in (FROM_NODE, MEMBERS):
            self.view.watch(PODS, labels)
        self.view.listen(GRAPHS, self._graph_changed)
        self.view.listen(ENDPOINT_SLICES, self._pods_changed)
        self.view.listen(JOBS, self._job_changed)
        self.view.listen(CHECKPOINTS, self._checkpoint_changed)
        self.view.watch(DAEMON_SETS, AGENT_LABEL)
        self.view.listen(DAEMON_SETS, self._checkpoint_changed)
        for kind in (GRAPHS, COMPONENTS, SCALING_ADAPTERS, MODELS, GRAPH_REQUESTS, CHECKPOINTS):
            self.view.watch(kind)
        for kind, labels in SELECTIONS:
            self.view.watch(kind, labels)
        self.view.watch(ENDPOINT_SLICES, BASE_MODEL_HASH)
        self.view.listen(POD_CLIQUE_SETS, self._cliques_changed)
        for kind in LABELLED:
            self.view.watch(kind, GRAPH)
        self.http = HttpServer(self._application(), ServerLimits())

    @property
    def is_ready(self) -> bool:
        """Whether every kind was listed and every worker runs; a follower is ready too."""
        return (
            self.view.is_synced
            and not self._scope.waits_for
            and all(one.controller is not None and one.controller.is_sound for one in self._running)
        )

    @property
    def is_idle(self) -> bool:
        """Whether no object waits to be reconciled or is being reconciled."""
        return self.is_ready and not any(
            one.queue.depth or one.queue.delayed or one.queue.processing for one in self._running
        )

    def start(self) -> None:
        """View the cluster, and reconcile from the time when the view is complete and this process leads."""
        self.events.start()
        self._scope.start(self._namespace_freed)
        if self._election is not None:
            self._election.start()
        self._tasks.start(self._begin(), "begin")

    async def close(self) -> None:
        """Let running reconciliations end, then stop, and release the Lease last."""
        await self._tasks.cancel_and_wait()
        for one in self._running:
            if one.controller is not None:
                await one.controller.stop(STOP_S)
            else:
                await one.queue.close()
        await self._scope.close()
        await self.view.close()
        await self.events.close()
        if self._election is not None:
            await self._election.close()

    async def _begin(self) -> None:
        await self.kinds.begin()
        await self.pull_secrets.read()
        self.view.start()
        while not self.view.is_synced or self._scope.waits_for:
            await self._clock.sleep(SYNC_POLL_S)
        await self.kinds.wait_for_lists()
        self._tasks.supervise(self.kinds.follow, "optional kinds", clock=self._clock)  # Webhooks of followers use it.
        self._tasks.supervise(self.pull_secrets.follow, "pull secrets", clock=self._clock)
        if self._election is not None:
            await self._election.wait_until_leader()
        await self._scope.acquire()
        for one in self._running:
            assert one.controller is not None
            one.controller.start()
        logger.info("reconciling %d graphs", self.view.count(GRAPHS))

    def has_grove(self) -> bool | None:
        """Return whether new graphs run with Grove; None before the view is complete."""
        return self.kinds.facts.has_grove if self.view.is_synced else None

    def _facts(self) -> ClusterFacts:
        return self.kinds.facts

    def _reconcile_all(self) -> None:
        """Reconcile all graphs and components, because what the cluster can run has changed."""
        for one in self._running:
            if one.kind in (GRAPHS, COMPONENTS):
                self._enqueue(one.kind, self.view.objects(one.kind))

    def _cliques_changed(self, key: ObjectKey) -> None:
        """Reconcile the graph of a PodCliqueSet that changed, or one of whose cliques did."""
        value = self.view.get(POD_CLIQUE_SETS, *key)
        owners = value["metadata"].get("ownerReferences") or () if value else ()
        graphs = (one["name"] for one in owners if one.get("controller") and one["kind"] == GRAPHS.kind)
        self._enqueue(GRAPHS, ((key[0], name) for name in graphs))

    def _controlled(self, made: ObjectController) -> RunningController:
        reconciler = Reconciler(made, self.view, self.applier, self.events, self._clock)
        return self._run(made.kind, reconciler.reconcile)

    def _run(self, kind: ObjectKind, reconcile: Callable[[ObjectKey], Awaitable[float | None]]) -> RunningController:
        running = RunningController(kind, WorkQueue(clock=self._clock))

        def record(result: ReconcileResult[ObjectKey]) -> None:
            self.metrics.record(kind, result)

        async def reconcile_in_scope(key: ObjectKey) -> float | None:
            return None if self._scope.excludes(key[0]) else await reconcile(key)

        running.controller = Controller(
            kind.kind, reconcile_in_scope, running.queue, self._workers, on_result=record, clock=self._clock
        )
        self.view.listen(kind, _adder(running.queue))
        return running

    async def _reconcile_pod(self, key: ObjectKey) -> float | None:
        await self._failover.reconcile(key)
        return await self._topology.reconcile(key)

    def _namespace_freed(self, namespace: str) -> None:
        """Reconcile the objects of a namespace that another operator has left."""
        for one in self._running:
            self._enqueue(one.kind, (key for key in self.view.objects(one.kind) if key[0] == namespace))

    def _pods_changed(self, key: ObjectKey) -> None:
        """Reconcile the models of a namespace."""
        self._enqueue(MODELS, (model for model in self.view.objects(MODELS) if model[0] == key[0]))

    def _graph_changed(self, key: ObjectKey) -> None:
        """Reconcile the scaling adapters of a graph and the request that made it: their status shows the graph's."""
        graph = self.view.get(GRAPHS, *key)
        adapters = self.view.children(graph, SCALING_ADAPTERS) if graph else ()
        self._enqueue(SCALING_ADAPTERS, (key_of(one) for one in adapters))
        self._enqueue(GRAPH_REQUESTS, requests_of_graph(self.view, key))

    def _job_changed(self, key: ObjectKey) -> None:
        """Reconcile the request of a job whose pod changed."""
        owner = owner_of_job(self.view, key)
        self._enqueue(GRAPH_REQUESTS, (owner,) if owner else ())

    def _checkpoint_changed(self, key: ObjectKey) -> None:
        """Reconcile the graphs and components of a namespace that start from checkpoints."""
        for kind in (GRAPHS, COMPONENTS):
            objects = self.view.objects(kind).items()
            self._enqueue(kind, [one for one, value in objects if one[0] == key[0] and starts_from_checkpoint(value)])

    def _enqueue(self, kind: ObjectKind, keys: Iterable[ObjectKey]) -> None:
        queue = next(one.queue for one in self._running if one.kind == kind)
        for key in keys:
            queue.add_after(key, SETTLE_S)

    def _application(self) -> Starlette:
        routes = [
            Route("/healthz", self._show_live),
            Route("/readyz", self._show_ready),
            Route("/metrics", self._show_metrics),
        ]
        return Starlette(routes=routes)

    async def _show_live(self, request: Request) -> Response:
        return plain_text(200, "ok")

    async def _show_ready(self, request: Request) -> Response:
        if self.is_ready:
            return plain_text(200, "ok")
        return plain_text(
            503, "; ".join(filter(None, [*self.view.waits_for, self._scope.waits_for])) or "a controller does not run"
        )

    async def _show_metrics(self, request: Request) -> Response:
        self.metrics.read(self.view, self.applier, [(one.kind, one.queue) for one in self._running])
        return await metrics_response(request, self._page)


def _adder(queue: WorkQueue[ObjectKey]) -> Callable[[ObjectKey], None]:
    def add(key: ObjectKey) -> None:
        queue.add_after(key, SETTLE_S)

    return add
