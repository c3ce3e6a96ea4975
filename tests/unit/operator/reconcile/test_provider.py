"""Choice of the workload provider."""

import pytest

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.provider import ClusterFacts, workload_provider
from dynamo.protocols.kubernetes.common import Multinode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

PROVIDER, GROVE = "nvidia.com/workload-provider", "nvidia.com/enable-grove"
SINGLE = [ComponentSpec(name="Frontend")]
SEVERAL = [*SINGLE, ComponentSpec(name="Decode", multinode=Multinode())]
ALL = ClusterFacts(has_grove=True, has_lws=True)
NONE = ClusterFacts()


@pytest.mark.parametrize(
    ("components", "annotations", "facts", "provider"),
    [
        (SINGLE, {}, NONE, "component"),
        (SEVERAL, {}, ALL, "grove"),
        (SEVERAL, {GROVE: "False"}, ALL, "component"),
        (SEVERAL, {PROVIDER: "component"}, ALL, "component"),
        (SEVERAL, {PROVIDER: "grove", GROVE: "false"}, ALL, "grove"),
        (SEVERAL, {}, ClusterFacts(has_lws=True), "component"),
        (SEVERAL, {}, ClusterFacts(has_grove=True), "grove"),
        (SINGLE, {GROVE: "true"}, NONE, "component"),
    ],
)
def test_provider_follows_annotations_and_cluster(components, annotations, facts, provider) -> None:
    assert workload_provider(components, annotations, facts) == provider


def test_graph_without_annotation_continues_with_its_own_workloads() -> None:
    assert workload_provider(SINGLE, {}, ALL, ["component"]) == "component"
    assert workload_provider(SINGLE, {GROVE: "false"}, ALL, ["grove"]) == "grove"
    assert workload_provider(SINGLE, {PROVIDER: "grove"}, ALL, ["component", "grove"]) == "grove"


@pytest.mark.parametrize(
    ("components", "annotations", "facts", "message"),
    [
        (
            SEVERAL,
            {},
            NONE,
            "spec.components[Decode].multinode: several nodes require Grove or LeaderWorkerSet; neither",
        ),
        (
            SEVERAL,
            {GROVE: "false"},
            ClusterFacts(has_grove=True),
            f"spec.components[Decode].multinode: several nodes require LeaderWorkerSet, because metadata.annotations[{GROVE}]",
        ),
        (
            SEVERAL,
            {PROVIDER: "component"},
            ClusterFacts(has_grove=True),
            f"spec.components[Decode].multinode: several nodes require LeaderWorkerSet, because metadata.annotations[{PROVIDER}]",
        ),
        (SINGLE, {PROVIDER: "grove"}, NONE, f"metadata.annotations[{PROVIDER}]: grove requires Grove"),
        (
            SINGLE,
            {PROVIDER: "disaggregatedset"},
            ALL,
            f"metadata.annotations[{PROVIDER}]: 'disaggregatedset' is not supported",
        ),
    ],
)
def test_workload_unsupported_by_the_cluster_is_refused(components, annotations, facts, message) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload_provider(components, annotations, facts)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_workloads_of_two_providers_are_refused() -> None:
    with pytest.raises(WorkloadError, match="several providers"):
        workload_provider(SINGLE, {}, ALL, ["grove", "component"])
