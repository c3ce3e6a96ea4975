"""Objects that a graph has with every provider: the account of its pods, scaling adapters, entries and services."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.operator.reconcile.entries import entries
from dynamo.operator.reconcile.epp import epp_objects
from dynamo.operator.reconcile.graph_pass import GraphPass
from dynamo.operator.reconcile.memory_service import claim_template
from dynamo.operator.reconcile.multinode import framework_of, trtllm
from dynamo.operator.reconcile.multinode.nodes import node_count
from dynamo.operator.reconcile.multinode.vllm import EXECUTOR_ANNOTATION, ORIGIN_ANNOTATION
from dynamo.operator.reconcile.multinode.wait_for_leader import config_map
from dynamo.operator.reconcile.names import (
    DISCOVERY_BACKEND_ANNOTATION,
    ENABLE_METRICS,
    GRAPH,
    MAIN,
    RESTART_AT,
    SELECTOR,
    SUB_COMPONENT_TYPE,
    WORKER_HASH,
    GraphContext,
    is_worker,
    merged,
    replicas_of,
    service_name,
)
from dynamo.operator.reconcile.plan import EventNote, ObjectRef, ref_of
from dynamo.operator.reconcile.preserved import claims
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.shared import RBAC, joint_objects
from dynamo.operator.reconcile.topology import Topologies, add_policy, policy_of
from dynamo.operator.validation.facts import DISCOVERY_MODE
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

ADAPTER = "DynamoGraphDeploymentScalingAdapter"
DISCOVERY_RULES = [
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamoworkermetadatas"],
        "verbs": ["get", "list", "watch", "create", "patch"],
    },
]
PASSED_ON = (
    EXECUTOR_ANNOTATION,
    ORIGIN_ANNOTATION,
    DISCOVERY_MODE,
    DISCOVERY_BACKEND_ANNOTATION,
    ENABLE_METRICS,
)
"""Annotations of the graph itself that its pods have too."""


@dataclass(slots=True, kw_only=True)
class CommonObjects:
    """Objects that do not depend on the provider."""

    create: list[KubeObject] = field(default_factory=list)
    apply: list[KubeObject] = field(default_factory=list)
    keys: list[ObjectRef] = field(default_factory=list)
    """Secrets with a key pair, which several graphs share."""
    joint: list[KubeObject] = field(default_factory=list)
    """Objects that several graphs share."""
    adapters: list[KubeObject] = field(default_factory=list)
    """Scaling adapters; existing ones own their replicas and are not applied again."""


def common_objects(one_pass: GraphPass, facts: ClusterFacts) -> CommonObjects:
    """Return the objects that a graph has with every provider, and add the events of making them."""
    graph, context = one_pass.graph, one_pass.context
    found = CommonObjects(
        create=list(claims(graph, context)),
        apply=list(shared_objects(graph, context)),
        keys=key_secrets(graph, context),
        joint=list(joint_objects(one_pass.components, context)),
    )
    for component in one_pass.components:
        if component.scaling_adapter is not None:
            found.adapters.append(adapter_object(component, context))
        made = list(entries(graph, component, context, facts))
        template = claim_template(component, context, has_claims=facts.has_resource_claims)
        if template is not None:
            made.append(template)
        if component.type == "epp":
            made += epp_objects(component, context, facts)
        one_pass.events += [one for one in made if isinstance(one, EventNote)]
        found.apply += [one for one in made if not isinstance(one, EventNote)]
    return found


def component_fields(
    graph: DynamoGraphDeployment,
    component: ComponentSpec,
    topologies: Topologies = None,
    restart_at: str | None = None,
) -> KubeObject:
    """Return a component's fields with what the graph gives to all its components.

    Environment variables, labels and annotations of the component take precedence over those of the graph, and the
    variables of the graph's transfer policy over both. Raise `WorkloadError` for a policy that is not supported.
    """
    spec = encode(component)
    template = copy.deepcopy(spec.get("podTemplate") or {})
    _add_environment(template, graph.spec.env or [])
    policy = policy_of(graph, component)
    if policy is not None:
        add_policy(template, policy, topologies)
    metadata = template.setdefault("metadata", {})
    own = {name: value for name, value in graph.metadata.annotations.items() if name in PASSED_ON}
    restart = {RESTART_AT: restart_at} if restart_at else {}
    for name, values in (
        ("labels", merged(graph.spec.labels, metadata.get("labels"), _sub_type(component))),
        ("annotations", merged(own, graph.spec.annotations, metadata.get("annotations"), restart)),
    ):
        if values:
            metadata[name] = values
    if not metadata:
        del template["metadata"]
    if template:
        spec["podTemplate"] = template
    return spec


def _sub_type(component: ComponentSpec) -> dict[str, str]:
    """Return the label by which v1alpha1 distinguishes prefill and decode workers."""
    return {SUB_COMPONENT_TYPE: component.type} if component.type in ("prefill", "decode") else {}


def adapter_object(component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return a new scaling adapter of a component, in the version in which it is stored.

    An existing one owns its replicas and is not applied again.
    """
    name = service_name(context.name, component.name)
    # It outlives the workers' generation, which the other labels name.
    labels = {one: value for one, value in context.labels(component).items() if one not in (WORKER_HASH, SELECTOR)}
    made = graph_object(V1BETA1, ADAPTER, name, context, labels)
    reference = {"name": context.name, "componentName": component.name}
    return {**made, "spec": {"replicas": replicas_of(component), "dgdRef": reference}}


def shared_objects(graph: DynamoGraphDeployment, context: GraphContext) -> Iterator[KubeObject]:
    """Yield the objects that all components of a graph use."""
    yield from discovery_access(context)
    if any(node_count(one) > 1 and is_worker(one) for one in graph.spec.components or []):
        yield config_map(context)


def key_secrets(graph: DynamoGraphDeployment, context: GraphContext) -> list[ObjectRef]:
    """Return the secret by which the nodes of a TensorRT-LLM worker connect, if a component has several.

    Raise `WorkloadError` for a command that runs another framework than the graph's.
    """
    several = [one for one in graph.spec.components or [] if node_count(one) > 1]
    if all(framework_of(one, graph.spec.backend_framework) != "trtllm" for one in several):
        return []
    return [ObjectRef("v1", "Secret", context.namespace, trtllm.SECRET)]


def discovery_access(context: GraphContext) -> Iterator[KubeObject]:
    """Yield the account of the graph's pods and its role, which discovery in Kubernetes requires."""
    if context.settings.discovery_backend != "kubernetes":
        return
    account = f"{context.name}-k8s-service-discovery"
    labels = {GRAPH: context.name}
    yield graph_object("v1", "ServiceAccount", account, context, labels)
    yield {**graph_object(f"{RBAC}/v1", "Role", f"{account}-role", context, labels), "rules": DISCOVERY_RULES}
    yield {
        **graph_object(f"{RBAC}/v1", "RoleBinding", f"{account}-binding", context, labels),
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}],
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": f"{account}-role"},
    }


def unwanted(one_pass: GraphPass, wanted: set[ObjectRef]) -> Iterator[ObjectRef]:
    """Yield the graph's adapters and further objects that it no longer requires."""
    adapters = (ObjectRef(V1BETA1, ADAPTER, one_pass.context.namespace, name) for name in one_pass.observed.adapters)
    for ref in (*adapters, *one_pass.observed.owned):
        if ref not in wanted:
            yield ref


def new_adapters(one_pass: GraphPass, common: CommonObjects) -> list[KubeObject]:
    """Return the scaling adapters that do not exist yet."""
    return [one for one in common.adapters if one["metadata"]["name"] not in one_pass.observed.adapters]


def refs_of(*objects: Sequence[KubeObject]) -> set[ObjectRef]:
    """Return the identities of objects."""
    return {ref_of(one) for several in objects for one in several}


def restart_id(graph: DynamoGraphDeployment, name: str, marked: frozenset[str]) -> str | None:
    """Return the restart that the pods of a component carry, if the component is among those that restart or have."""
    wanted = graph.spec.restart
    return wanted.id if wanted is not None and name in marked else None


def graph_object(
    api_version: str, kind: str, name: str, context: GraphContext, labels: Mapping[str, str]
) -> KubeObject:
    """Return an object of a graph without its content."""
    metadata = {"name": name, "namespace": context.namespace, "labels": dict(labels)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _add_environment(template: KubeObject, graph_env: Sequence[KubeObject]) -> None:
    if not graph_env:
        return
    containers = template.setdefault("spec", {}).setdefault("containers", [])
    main = next((one for one in containers if one.get("name") == MAIN), None)
    if main is None:
        main = {"name": MAIN}
        containers.insert(0, main)
    own = {one["name"] for one in main.get("env") or []}
    main["env"] = [*(one for one in graph_env if one["name"] not in own), *(main.get("env") or [])]
