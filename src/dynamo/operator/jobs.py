"""Controllers of the kinds that run jobs: DynamoGraphDeploymentRequests and DynamoCheckpoints."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

import msgspec

from dynamo.k8s.client import KubeListing, KubeRefused
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import (
    CHECKPOINTS,
    CONFIG_MAPS,
    GRAPH_REQUESTS,
    GRAPHS,
    JOBS,
    NODES,
    PODS,
    VOLUME_CLAIMS,
    ObjectKind,
)
from dynamo.operator.reconcile.checkpoints import checkpoint_plan, job_name
from dynamo.operator.reconcile.names import GRAPH, MANAGED_BY, OPERATOR
from dynamo.operator.reconcile.plan import Plan
from dynamo.operator.reconcile.requests.hardware import PRODUCT, is_complete
from dynamo.operator.reconcile.requests.job import (
    APP,
    PROFILER_APP,
    REQUEST_NAME,
    RequestSettings,
    is_tracked,
    output_name,
    profiling_job_name,
)
from dynamo.operator.reconcile.requests.phases import ObservedRequest, needs_job, request_plan
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest

FORBIDDEN = 403
SELECTIONS = (
    (JOBS, f"{MANAGED_BY}={OPERATOR}"),
    (PODS, f"{APP}={PROFILER_APP}"),
    (CONFIG_MAPS, REQUEST_NAME),
)
"""Kinds that these controllers view, with the labels of the objects that concern them."""


class KubeReader(Protocol):
    """Reads objects that are needed once and not viewed: `KubeClient`, or a fake in tests."""

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...
    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing: ...


class RequestController:
    """Reconciles DynamoGraphDeploymentRequests.

    Nodes and the claim of the model cache are read when a profiling job is made, and not viewed: they are needed once, and
    an operator without access to nodes is refused once per job.
    """

    kind: ClassVar = GRAPH_REQUESTS

    def __init__(self, view: ClusterView, reader: KubeReader, settings: RequestSettings) -> None:
        self._view = view
        self._reader = reader
        self._settings = settings

    async def plan(self, value: KubeObject, now: str) -> Plan:
        """Return the plan of a request."""
        request = decode(DynamoGraphDeploymentRequest, value)
        namespace, name = request.metadata.namespace, request.metadata.name
        job = self._view.get(JOBS, namespace, profiling_job_name(name))
        graph = request.status and request.status.dgd_name
        makes_job = needs_job(request, job)
        found = self._view.get(GRAPHS, namespace, graph) if graph else None
        observed = ObservedRequest(
            job=job,
            pods=self._view.children(job, PODS) if job else (),
            output=await self._output(request, job),
            graph=found,
            graph_pods=await self._graph_pods(found),
            config_maps=self._config_maps(request),
            nodes=await self._nodes(request) if makes_job else None,
            has_model_cache=not makes_job or await self._has_model_cache(request),
        )
        return request_plan(request, observed, self._settings, now)

    async def _output(self, request: DynamoGraphDeploymentRequest, job: KubeObject | None) -> KubeObject | None:
        """Return the output; once the job has ended, also one without the labels of the view."""
        namespace, name = request.metadata.namespace, output_name(request.metadata.name)
        found = self._view.get(CONFIG_MAPS, namespace, name)
        is_profiling = request.status is not None and request.status.phase == "Profiling"
        if found is None and is_profiling and job and (job.get("status") or {}).get("conditions"):
            return await self._reader.get(CONFIG_MAPS, name, namespace)
        return found

    async def _graph_pods(self, graph: KubeObject | None) -> list[KubeObject]:
        """Return the pods of a graph that is not ready: they are read, because a view of all pods would be large."""
        if graph is None or (graph.get("status") or {}).get("state") == "successful":
            return []
        metadata = graph["metadata"]
        return (await self._reader.list(PODS, metadata["namespace"], f"{GRAPH}={metadata['name']}")).items

    def _config_maps(self, request: DynamoGraphDeploymentRequest) -> list[KubeObject]:
        namespace, output = request.metadata.namespace, output_name(request.metadata.name)
        return [
            one
            for (space, name), one in self._view.objects(CONFIG_MAPS).items()
            if space == namespace and name != output and is_tracked(request, one)
        ]

    async def _nodes(self, request: DynamoGraphDeploymentRequest) -> list[KubeObject] | None:
        """Return the nodes with GPUs; None if they may not be read, or need not because the request has everything."""
        if is_complete(request.spec.hardware):
            return None
        try:
            return (await self._reader.list(NODES, labels=PRODUCT)).items
        except KubeRefused as error:
            if error.code != FORBIDDEN:
                raise
            return None

    async def _has_model_cache(self, request: DynamoGraphDeploymentRequest) -> bool:
        cache = request.spec.model_cache
        if cache is None or not cache.pvc_name:
            return True
        return await self._reader.get(VOLUME_CLAIMS, cache.pvc_name, request.metadata.namespace) is not None


def requests_of_graph(view: ClusterView, key: ObjectKey) -> Iterator[ObjectKey]:
    """Yield the requests that follow a graph, which may be gone."""
    graph = view.get(GRAPHS, *key)
    if graph is not None:
        name = (graph["metadata"].get("labels") or {}).get(REQUEST_NAME)
        if name:
            yield key[0], name
        return
    for at, request in view.objects(GRAPH_REQUESTS).items():
        if at[0] == key[0] and (request.get("status") or {}).get("dgdName") == key[1]:
            yield at


def owner_of_job(view: ClusterView, key: ObjectKey) -> ObjectKey | None:
    """Return the request or checkpoint whose job changed, or a pod of it."""
    job = view.get(JOBS, *key)
    owners = [] if job is None else job["metadata"].get("ownerReferences") or []
    return next(((key[0], one["name"]) for one in owners if one["kind"] == GRAPH_REQUESTS.kind), None)


class CheckpointController:
    """Reconciles DynamoCheckpoints."""

    kind: ClassVar = CHECKPOINTS

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    async def plan(self, value: KubeObject, now: str) -> Plan:
        """Return the plan of a checkpoint."""
        checkpoint = decode(DynamoCheckpoint, value)
        namespace = checkpoint.metadata.namespace
        job = self._view.get(JOBS, namespace, job_name(checkpoint))
        others = (
            one
            for (space, name), one in self._view.objects(CHECKPOINTS).items()
            if space == namespace and name != checkpoint.metadata.name
        )
        return checkpoint_plan(checkpoint, job, _decoded(others), now)


def _decoded(values: Iterable[KubeObject]) -> Iterator[DynamoCheckpoint]:
    for one in values:
        try:
            yield decode(DynamoCheckpoint, one)
        except msgspec.ValidationError:  # Reported when that object is reconciled itself.
            continue
