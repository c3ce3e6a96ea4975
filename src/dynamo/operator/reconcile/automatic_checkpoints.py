"""DynamoCheckpoints that a graph makes for its components: of `experimental.checkpoint` without a `checkpointRef`. Pure.

There is one for each generation of the workers. Its job runs the component's own container, changed by
`experimental.checkpoint.job.podTemplate`, and the component refers to it as to one that a user made.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.operator.reconcile.checkpoints import ARTIFACT_VERSION, CHECKPOINT_ID, DEFAULT_ARTIFACT_VERSION
from dynamo.operator.reconcile.graph_objects import component_fields
from dynamo.operator.reconcile.multinode import framework_of
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, node_count
from dynamo.operator.reconcile.names import COMPONENT, GRAPH, MAIN, PREFIX, WORKER_HASH, GraphContext, is_worker
from dynamo.operator.reconcile.overlay import overlaid
from dynamo.operator.reconcile.pods import pod_template
from dynamo.operator.reconcile.restores import with_identity
from dynamo.operator.reconcile.topology import Topologies
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject, decode
from dynamo.protocols.kubernetes.models import DynamoCheckpoint
from dynamo.protocols.kubernetes.v1beta1 import ComponentCheckpoint, ComponentSpec, DynamoGraphDeployment

IS_AUTOMATIC = f"{PREFIX}dynamo-auto-checkpoint"
DELETION_POLICY = f"{PREFIX}dynamo-checkpoint-deletion-policy"
DELETE, RETAIN = "Delete", "Retain"
ID_LENGTH = 32
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticCheckpoints:
    """A graph whose components refer to their checkpoints, and the checkpoints that do not exist yet."""

    graph: DynamoGraphDeployment
    owned: Sequence[KubeObject] = ()
    """Deleted with the graph."""
    retained: Sequence[KubeObject] = ()


def automatic_checkpoints(
    graph: DynamoGraphDeployment,
    context: GraphContext,
    known: Sequence[DynamoCheckpoint],
    topologies: Topologies = None,
) -> AutomaticCheckpoints:
    """Return the graph with references to the checkpoints of its components. `known` are the namespace's.

    Raise `WorkloadError` for a component of which no checkpoint can be made.
    """
    names = {one.metadata.name for one in known}
    components: list[ComponentSpec] = []
    owned: list[KubeObject] = []
    retained: list[KubeObject] = []
    for component in graph.spec.components or []:
        wanted = component.experimental.checkpoint if component.experimental else None
        if wanted is None or not _is_automatic(component, wanted, known):
            components.append(component)
            continue
        name = f"checkpoint-{automatic_id(graph, component, context)}"
        components.append(_referring(component, wanted, name))
        if name not in names:
            made = _checkpoint(graph, component, wanted, context, topologies)
            (retained if wanted.deletion_policy == RETAIN else owned).append(made)
    spec = msgspec.structs.replace(graph.spec, components=components)
    return AutomaticCheckpoints(graph=msgspec.structs.replace(graph, spec=spec), owned=owned, retained=retained)


def automatic_id(graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext) -> str:
    """Return the identity of a component's checkpoint: 32 hexadecimal digits, as upstream computes them."""
    values = {
        "namespace": context.namespace,
        "dgdName": context.name,
        "dgdUID": graph.metadata.uid,
        "componentName": component.name,
        "workerHash": context.worker_hash if is_worker(component) else "",
    }
    text = msgspec.json.encode({name: value for name, value in values.items() if value})
    return hashlib.sha256(text).hexdigest()[:ID_LENGTH]


def _is_automatic(component: ComponentSpec, wanted: ComponentCheckpoint, known: Sequence[DynamoCheckpoint]) -> bool:
    if not wanted.enabled or wanted.checkpoint_ref or node_count(component) > 1:
        return False
    return wanted.identity is None or not with_identity(known, wanted.identity)


def _referring(component: ComponentSpec, wanted: ComponentCheckpoint, name: str) -> ComponentSpec:
    checkpoint = msgspec.structs.replace(wanted, checkpoint_ref=name, job=None, identity=None)
    assert component.experimental is not None
    experimental = msgspec.structs.replace(component.experimental, checkpoint=checkpoint)
    return msgspec.structs.replace(component, experimental=experimental)


def _checkpoint(
    graph: DynamoGraphDeployment,
    component: ComponentSpec,
    wanted: ComponentCheckpoint,
    context: GraphContext,
    topologies: Topologies,
) -> KubeObject:
    framework = framework_of(component, graph.spec.backend_framework)
    if framework is None and wanted.identity is not None:
        framework = wanted.identity.backend_framework
    if framework is None:
        path = f"spec.components[{component.name}].experimental.checkpoint"
        raise WorkloadError(f"{path}: the engine is not known from the command: set spec.backendFramework")
    identifier = automatic_id(graph, component, context)
    of_graph = {GRAPH: context.name, COMPONENT: component.name}
    if is_worker(component):
        of_graph[WORKER_HASH] = context.worker_hash
    target = wanted.target_container_name or MAIN
    template = _job_template(graph, component, target, wanted.job or {}, context, topologies)
    template["metadata"]["labels"] |= of_graph
    parameters = {"dgdUID": graph.metadata.uid, "component": component.name, "checkpointID": identifier}
    return {
        "apiVersion": V1ALPHA1,
        "kind": "DynamoCheckpoint",
        "metadata": {
            "name": f"checkpoint-{identifier}",
            "namespace": context.namespace,
            "labels": {CHECKPOINT_ID: identifier, **of_graph},
            "annotations": {
                ARTIFACT_VERSION: DEFAULT_ARTIFACT_VERSION,
                IS_AUTOMATIC: "true",
                DELETION_POLICY: wanted.deletion_policy or DELETE,
            },
        },
        "spec": {
            "identity": {
                "model": f"{context.namespace}/{context.name}",
                "backendFramework": framework,
                "extraParameters": parameters,
            },
            "job": {"podTemplateSpec": template, "targetContainerName": target},
        },
    }


def _job_template(
    graph: DynamoGraphDeployment,
    component: ComponentSpec,
    target: str,
    job: Mapping[str, object],
    context: GraphContext,
    topologies: Topologies,
) -> KubeObject:
    """Return the pod template of the job: the target container alone, without the labels by which services find pods."""
    plain = msgspec.structs.replace(component, experimental=None, frontend_sidecar=None)
    complete = decode(ComponentSpec, component_fields(graph, plain, topologies))
    spec = pod_template(complete, dataclasses.replace(context, restores={}), [])["spec"]
    container = next((one for one in spec["containers"] if one.get("name") == target), None)
    if container is None:
        path = f"spec.components[{component.name}].experimental.checkpoint.targetContainerName"
        raise WorkloadError(f"{path}: {target!r} is not a container of the pod template")
    metadata = (component.pod_template or {}).get("metadata") or {}
    template: KubeObject = {
        "metadata": {name: dict(metadata.get(name) or {}) for name in ("labels", "annotations")},
        "spec": {**spec, "containers": [container], "restartPolicy": "Never"},
    }
    given = job.get("podTemplate")
    if not isinstance(given, dict):
        return template
    changes: KubeObject = next(
        (one for one in (given.get("spec") or {}).get("containers") or () if one.get("name") == target), {}
    )
    for probe in PROBES:
        if changes.get(probe):  # A probe of another kind replaces the one before as a whole.
            container.pop(probe, None)
    own = {name: (given.get("metadata") or {}).get(name) or {} for name in ("labels", "annotations")}
    result: KubeObject = overlaid(template, {"metadata": own, "spec": given.get("spec") or {}})
    return result
