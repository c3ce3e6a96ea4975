"""Workload provider: which controllers of the cluster run the components of a graph.

Grove runs a whole graph as one PodCliqueSet. The component provider runs each component as a Deployment, or as a
LeaderWorkerSet when its replicas have several nodes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dynamo.operator.reconcile.multinode.nodes import WorkloadError, node_count
from dynamo.operator.validation.facts import ENABLE_GROVE, WORKLOAD_PROVIDER
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

Provider: TypeAlias = Literal["component", "grove"]
ANNOTATION = f"metadata.annotations[{WORKLOAD_PROVIDER}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Controllers that are installed in the cluster and enabled for the operator."""

    has_grove: bool = False
    has_lws: bool = False
    has_kai: bool = False
    """Whether Grove's pods use the KAI scheduler."""
    has_volcano: bool = False
    """Whether pods that start together use the Volcano scheduler."""
    has_virtual_services: bool = False
    """Whether Istio's VirtualServices are installed."""
    topologies: Mapping[str, Mapping[str, str]] | None = None
    """Node label of each domain, by the name of the cluster topology; None: not known."""
    has_inference_pools: bool = False
    has_resource_claims: bool = False
    """Whether GPUs can be claimed, which the GPU memory service requires."""
    """Whether InferencePools of the Gateway API Inference Extension are installed."""


class ProviderUnavailable(WorkloadError):
    """The provider that a graph needs is not in the cluster, or cannot be decided."""

    def __init__(self, reason: str, message: str) -> None:
        """`reason` is that of the graph's condition."""
        super().__init__(message)
        self.reason = reason


def workload_provider(
    components: Sequence[ComponentSpec],
    annotations: Mapping[str, str],
    facts: ClusterFacts,
    owned: Collection[Provider] = (),
) -> Provider:
    """Return the provider of a graph; the caller records it in the annotation, after which it does not change.

    `owned` are the providers whose workloads the graph already has. A graph without the annotation continues with its
    own workloads. Raise `ProviderUnavailable` when the cluster cannot run the graph.
    """
    provider = _chosen(annotations, facts, owned)
    if provider == "grove" and not facts.has_grove:
        text = f"{ANNOTATION}: grove requires Grove, which is not installed or not enabled"
        raise ProviderUnavailable("selected_workload_provider_unavailable", text)
    if provider == "component" and not facts.has_lws:
        several = next((one for one in components if node_count(one) > 1), None)
        if several is not None:
            raise ProviderUnavailable("no_multinode_orchestrator_available", _missing(several, annotations, facts))
    return provider


def _chosen(annotations: Mapping[str, str], facts: ClusterFacts, owned: Collection[Provider]) -> Provider:
    match annotations.get(WORKLOAD_PROVIDER):
        case "grove":
            return "grove"
        case "component":
            return "component"
        case None:
            pass
        case other:
            text = f"{ANNOTATION}: {other!r} is not supported; component and grove are allowed"
            raise ProviderUnavailable("unsupported_workload_provider", text)
    if len(set(owned)) > 1:
        text = f"{ANNOTATION}: is required, because the graph owns workloads of several providers"
        raise ProviderUnavailable("conflicting_workload_providers", text)
    for provider in owned:
        return provider
    is_disabled = annotations.get(ENABLE_GROVE, "").lower() == "false"
    return "grove" if facts.has_grove and not is_disabled else "component"


def _missing(component: ComponentSpec, annotations: Mapping[str, str], facts: ClusterFacts) -> str:
    path = f"spec.components[{component.name}].multinode"
    if not facts.has_grove:
        return f"{path}: several nodes require Grove or LeaderWorkerSet; neither is installed and enabled"
    name = WORKLOAD_PROVIDER if WORKLOAD_PROVIDER in annotations else ENABLE_GROVE
    return f"{path}: several nodes require LeaderWorkerSet, because metadata.annotations[{name}] excludes Grove"
