"""Rules of a DynamoGraphDeployment, at creation and on update."""

import re

from dynamo.operator.reconcile.grove_names import NAME_BUDGET, clique_set_name, name_length
from dynamo.operator.validation.component import check_component, check_component_update
from dynamo.operator.validation.facts import (
    ANNOTATION,
    DISCOVERY_MODE,
    WORKLOAD_PROVIDER,
    AdmissionFacts,
    Findings,
    annotations_of,
    part,
    spec_of,
    uses_grove,
)
from dynamo.operator.validation.views import ComponentView, components_of
from dynamo.protocols.kubernetes.common import KubeObject

SEMVER = r"v?\d+(\.\d+){0,2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
ANNOTATION_VALUES = {
    f"{ANNOTATION}vllm-distributed-executor-backend": ("mp", "ray"),
    f"{ANNOTATION}grove-update-strategy": ("RollingRecreate", "OnDelete"),
    f"{ANNOTATION}deployment-strategy": ("RollingUpdate", "Recreate"),
    DISCOVERY_MODE: ("pod", "container"),
    WORKLOAD_PROVIDER: ("component", "grove", "disaggregatedset"),
}
ORIGIN_VERSION = f"{ANNOTATION}dynamo-operator-origin-version"


def check_graph(value: KubeObject, facts: AdmissionFacts, found: Findings, *, is_alpha: bool) -> None:
    """Check a graph by itself."""
    spec, metadata = spec_of(value), part(value, "metadata")
    grove = uses_grove(metadata, facts)
    components = components_of(spec, is_alpha=is_alpha)
    _check_annotations(metadata, found)
    if not components:
        found.refuse("spec.services" if is_alpha else "spec.components", "must have at least one component")
    _check_names(str(metadata.get("name") or ""), components, found, grove=grove)
    for one in components:
        check_component(one, found, uses_grove=grove)
    epps = [one for one in components if one.type == "epp"]
    for one in epps[1:]:
        found.refuse(one.type_path, f"at most one component may have type epp; {epps[0].name} has it")
    if spec.get("priorityClassName") and grove is False:
        found.refuse("spec.priorityClassName", "is supported only with Grove")
    _check_sharing(spec, metadata, components, found, grove=grove)
    _check_restart(spec, components, found)
    _check_topology(spec, components, found, is_alpha=is_alpha)
    _check_transfer_policy(spec, found)
    if is_alpha:
        _check_claims(spec, found)


def _check_annotations(metadata: KubeObject, found: Findings) -> None:
    annotations = annotations_of(metadata)
    for name, allowed in ANNOTATION_VALUES.items():
        if name in annotations and annotations[name] not in allowed:
            found.refuse(f"metadata.annotations[{name}]", f"{annotations[name]!r} is not one of {', '.join(allowed)}")
    origin = annotations.get(ORIGIN_VERSION)
    if origin is not None and not re.fullmatch(SEMVER, origin):
        found.refuse(f"metadata.annotations[{ORIGIN_VERSION}]", f"{origin!r} is not a semantic version")


def _check_names(graph: str, components: list[ComponentView], found: Findings, *, grove: bool | None) -> None:
    seen: dict[str, str] = {}
    lengths = [
        name_length(
            one.name,
            is_multinode=one.is_multinode,
            has_group=bool(part(one.raw, "experimental", "grove").get("forceScalingGroup")),
            memory_nodes=(one.node_count or 1) if one.memory_mode == "InterPod" else 0,
        )
        for one in components
    ]
    set_name = clique_set_name(graph, lengths)
    for one, own in zip(components, lengths, strict=True):
        lower = one.name.lower()
        if lower in seen:
            found.refuse(one.name_path, f"{one.name!r} equals {seen[lower]!r} without regard to case")
        seen.setdefault(lower, one.name)
        length = len(set_name) + own
        if grove and length > NAME_BUDGET:
            found.refuse(
                one.name_path,
                f"the names of the PodCliqueSet {set_name!r} and of component {one.name!r} have {length} characters; "
                f"at most {NAME_BUDGET} are allowed with Grove",
            )


def _check_sharing(
    spec: KubeObject, metadata: KubeObject, components: list[ComponentView], found: Findings, *, grove: bool | None
) -> None:
    mode = annotations_of(metadata).get(DISCOVERY_MODE)
    for one in components:
        if one.failover_mode == "IntraPod" and mode != "container":
            found.refuse(
                f"metadata.annotations[{DISCOVERY_MODE}]", f"must be container: {one.name} has failover within the pod"
            )
        if one.memory_mode == "InterPod":
            if grove is False:
                found.refuse(f"{one.memory_path}.mode", "InterPod is supported only with Grove")
            backend = spec.get("backendFramework")
            if backend != "vllm":
                found.refuse(
                    f"{one.memory_path}.mode", f"InterPod requires spec.backendFramework vllm, not {backend or 'unset'}"
                )


def _check_restart(spec: KubeObject, components: list[ComponentView], found: Findings) -> None:
    restart = spec.get("restart")
    if not isinstance(restart, dict):
        return
    if not restart.get("id"):
        found.refuse("spec.restart.id", "is required")
    strategy = part(restart, "strategy")
    order = strategy.get("order")
    if not order:
        return
    path = "spec.restart.strategy.order"
    if strategy.get("type") == "Parallel":
        found.refuse(path, "must be absent when the type is Parallel")
        return
    names = {one.name for one in components}
    for index, name in enumerate(order):
        if name in order[:index]:
            found.refuse(f"{path}[{index}]", f"repeats {name}")
        elif name not in names:
            found.refuse(f"{path}[{index}]", f"{name!r} is not a component of the graph")
    missing = sorted(names - set(order))
    if missing:
        found.refuse(path, f"must name every component; {', '.join(missing)} is missing")


def _check_topology(spec: KubeObject, components: list[ComponentView], found: Findings, *, is_alpha: bool) -> None:
    constraint = spec.get("topologyConstraint")
    constrained = [one for one in components if one.has_topology]
    path = "spec.topologyConstraint"
    if not isinstance(constraint, dict):
        for one in constrained:
            found.refuse(f"{one.path}.topologyConstraint", f"requires {path} with the name of the topology")
        return
    name = constraint.get("clusterTopologyName") or (constraint.get("topologyProfile") if is_alpha else None)
    if not name:
        found.refuse(f"{path}.clusterTopologyName", "is required")
    if not constraint.get("packDomain") and not constrained:
        found.refuse(f"{path}.packDomain", "is required unless a component has a topologyConstraint")


def _check_transfer_policy(spec: KubeObject, found: Findings) -> None:
    policy = part(spec, "experimental").get("kvTransferPolicy")
    path = "spec.experimental.kvTransferPolicy"
    if not isinstance(policy, dict):
        return
    if (policy.get("labelKey") is None) == (policy.get("clusterTopologyName") is None):
        found.refuse(path, "exactly one of labelKey and clusterTopologyName must be set")
    if not policy.get("domain"):
        found.refuse(f"{path}.domain", "is required")
    if policy.get("preferredWeight") is not None and policy.get("enforcement") == "required":
        found.refuse(f"{path}.preferredWeight", "must be absent when enforcement is required")


def _check_claims(spec: KubeObject, found: Findings) -> None:
    for index, claim in enumerate(spec.get("pvcs") or ()):
        path = f"spec.pvcs[{index}]"
        if not claim.get("name"):
            found.refuse(f"{path}.name", "is required")
        if claim.get("create"):
            for name in ("size", "storageClass"):
                if claim.get(name) in {None, ""}:
                    found.refuse(f"{path}.{name}", "is required when create is true")


def check_graph_update(
    new: KubeObject, old: KubeObject, facts: AdmissionFacts, found: Findings, *, is_alpha: bool
) -> None:
    """Check a graph against the one before it, in the same version."""
    spec, before = spec_of(new), spec_of(old)
    path = "spec.services" if is_alpha else "spec.components"
    components = {one.name: one for one in components_of(spec, is_alpha=is_alpha)}
    previous = {one.name: one for one in components_of(before, is_alpha=is_alpha)}
    for name in sorted(components.keys() - previous.keys()):
        found.refuse(components[name].name_path, f"{name} cannot be added: the set of components is immutable")
    for name in sorted(previous.keys() - components.keys()):
        found.refuse(path, f"{name} cannot be removed: the set of components is immutable")
    for name in components.keys() & previous.keys():
        check_component_update(components[name], previous[name], found, may_scale=facts.may_scale)
    for name in ("backendFramework", "topologyConstraint"):
        # A backend that was not set may be added: it was detected from the commands before.
        is_fixed = name == "topologyConstraint" or before.get(name)
        if is_fixed and spec.get(name) != before.get(name):
            found.refuse(f"spec.{name}", "is immutable")
    provider = annotations_of(part(old, "metadata")).get(WORKLOAD_PROVIDER)
    given = annotations_of(part(new, "metadata")).get(WORKLOAD_PROVIDER)
    if given != provider and not (provider is None and facts.user in facts.operator_users):
        found.refuse(f"metadata.annotations[{WORKLOAD_PROVIDER}]", "is immutable")
    _check_restart_update(spec, before, old, found)


def check_graph_creation(value: KubeObject, facts: AdmissionFacts, found: Findings) -> None:
    """Check what must be absent when a graph is created."""
    if part(spec_of(value), "restart").get("id"):
        report = found.warn if facts.may_exist else found.refuse
        report("spec.restart.id", "must be absent at creation; there is nothing to restart")


def _check_restart_update(spec: KubeObject, before: KubeObject, old: KubeObject, found: Findings) -> None:
    if spec.get("restart") == before.get("restart"):
        return
    phase = part(old, "status", "rollingUpdate").get("phase")
    if phase in {"Pending", "InProgress"}:
        found.refuse("spec.restart", f"cannot change while a rolling update is {phase}")
