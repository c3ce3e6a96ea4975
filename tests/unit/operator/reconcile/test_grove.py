"""PodCliqueSets of graphs. Golden files: `UPDATE_GOLDEN=1`."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden import check_golden
from tests.unit.operator.reconcile.worlds import CONTEXT, MP, worker

from dynamo.operator.reconcile.grove import grove_component_name, pod_clique_set, pod_clique_set_name, scale_patches
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import replicas_of
from dynamo.operator.reconcile.pods import pod_template
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject, Multinode, ObjectMeta, TopologyConstraint
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentExperimental,
    ComponentSpec,
    DynamoGraphDeployment,
    Failover,
    GpuMemoryService,
    GraphSpec,
    GraphTopologyConstraint,
    GroveOptions,
)

GOLDEN = Path(__file__).parent / "golden"
FRONTEND = ComponentSpec(
    name="Frontend", type="frontend", pod_template={"spec": {"containers": [{"name": "main", "image": "f:1"}]}}
)
GROVE = ClusterFacts(has_grove=True)
IN_PLACE = replace(CONTEXT, is_in_place=True)


def graph(*components: ComponentSpec, annotations: dict[str, str] | None = None, **spec: Any) -> DynamoGraphDeployment:
    return DynamoGraphDeployment(
        metadata=ObjectMeta(name="g", namespace="prod", annotations={**MP, **(annotations or {})}),
        spec=GraphSpec(components=list(components), **spec),
    )


def rendered(one: DynamoGraphDeployment, facts: ClusterFacts = GROVE) -> KubeObject:
    components = one.spec.components or []
    templates = {part.name: pod_template(part, IN_PLACE, one.spec.env or []) for part in components}
    before = copy.deepcopy(templates)
    found = pod_clique_set(one, IN_PLACE, templates, facts=facts, termination_delay="4h0m0s")
    assert templates == before
    return found


CASES = {
    "grove-vllm-mp": (graph(FRONTEND, worker("vllm", "-tp", "16", replicas=2)), GROVE),
    "grove-sglang-kai": (
        graph(
            FRONTEND,
            worker("sglang", name="Prefill", type="prefill", nodes=1, replicas=3),
            worker("sglang", "--tp", "32", nodes=4, topology_constraint=TopologyConstraint(pack_domain="rack")),
            annotations={"nvidia.com/kai-scheduler-queue": "team"},
            priority_class_name="high",
            topology_constraint=GraphTopologyConstraint(cluster_topology_name="gpus", pack_domain="zone"),
            labels={"team": "a"},
        ),
        ClusterFacts(has_grove=True, has_kai=True),
    ),
    "grove-trtllm-volcano": (
        graph(
            FRONTEND,
            worker("trtllm", gpus=4),
            annotations={"nvidia.com/volcano-queue": "team", "nvidia.com/grove-update-strategy": "OnDelete"},
        ),
        ClusterFacts(has_grove=True, has_volcano=True),
    ),
    "grove-memory-failover": (
        graph(
            worker(
                "vllm",
                "-tp",
                "16",
                replicas=2,
                experimental=ComponentExperimental(
                    gpu_memory_service=GpuMemoryService(mode="InterPod"), failover=Failover(mode="InterPod")
                ),
            )
        ),
        GROVE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_grove_objects_equal_the_golden_file(name: str) -> None:
    check_golden(GOLDEN / f"{name}.yaml", rendered(*CASES[name]))


def template_of(found: KubeObject) -> KubeObject:
    template: KubeObject = found["spec"]["template"]
    return template


def test_selector_is_independent_of_the_worker_generation() -> None:
    for clique in template_of(rendered(graph(FRONTEND, worker("vllm", "-tp", "16"))))["cliques"]:
        name = clique["name"].partition("-")[0]
        assert clique["labels"]["nvidia.com/selector"] == f"g-{name}"


def test_scheduler_of_the_template_remains() -> None:
    component = worker("vllm", nodes=1)
    assert component.pod_template is not None
    component.pod_template["spec"]["schedulerName"] = "own"
    [clique] = template_of(rendered(graph(component), ClusterFacts(has_grove=True, has_kai=True)))["cliques"]
    assert clique["spec"]["podSpec"]["schedulerName"] == "own"
    assert "kai.scheduler/queue" not in clique["labels"]


def test_component_uses_the_topology_without_a_graph_pack_domain() -> None:
    component = worker("vllm", nodes=1, topology_constraint=TopologyConstraint(pack_domain="rack"))
    constraint = GraphTopologyConstraint(cluster_topology_name="gpus")
    template = template_of(rendered(graph(component, topology_constraint=constraint)))
    assert template["cliques"][0]["topologyConstraint"] == {"topologyName": "gpus", "pack": {"required": "rack"}}
    assert "topologyConstraint" not in template


@pytest.mark.parametrize(
    ("one", "facts", "message"),
    [
        (graph(FRONTEND), ClusterFacts(has_kai=True, has_volcano=True), "KAI and Volcano are both enabled"),
        (graph(FRONTEND, annotations={"nvidia.com/grove-update-strategy": "x"}), GROVE, "RollingRecreate and OnDelete"),
        (
            graph(
                worker(
                    "sglang", experimental=ComponentExperimental(gpu_memory_service=GpuMemoryService(mode="InterPod"))
                )
            ),
            GROVE,
            r"components\[Decode\]\.experimental\.gpuMemoryService\.mode: InterPod requires vllm",
        ),
        (graph(worker("vllm"), backend_framework="sglang"), GROVE, "runs vllm, but"),
    ],
)
def test_graph_that_grove_cannot_run_is_refused(one, facts, message) -> None:
    with pytest.raises(WorkloadError, match=message):
        rendered(one, facts)


@pytest.mark.parametrize("nodes", [1, 2])
def test_replicas_that_are_scheduled_together_are_those_of_the_component(nodes: int) -> None:
    template = template_of(rendered(graph(worker("vllm", nodes=nodes, replicas=4, min_available=3))))
    made = template["cliques"][0]["spec"] if nodes == 1 else template["podCliqueScalingGroups"][0]
    assert (made["replicas"], made["minAvailable"]) == (4, 3)


def test_component_of_one_node_is_a_scaling_group_where_it_is_forced() -> None:
    forced = ComponentExperimental(grove=GroveOptions(force_scaling_group=True))
    component = worker("vllm", nodes=1, replicas=4, experimental=forced)
    one = graph(component)
    template = template_of(rendered(one))
    (clique,), (group,) = template["cliques"], template["podCliqueScalingGroups"]
    assert (clique["name"], clique["spec"]["replicas"], clique["spec"]["minAvailable"]) == ("decode", 1, 1)
    assert group == {"name": "decode", "cliqueNames": ["decode"], "replicas": 4, "minAvailable": 1}
    observed = [{"kind": "PodCliqueScalingGroup", "metadata": {"name": "g-0-decode"}, "spec": {"replicas": 1}}]
    (patch,) = scale_patches(one, IN_PLACE, observed)
    assert (patch.ref.kind, patch.value) == ("PodCliqueScalingGroup", {"spec": {"replicas": 4}})


def test_existing_cliques_and_groups_are_scaled() -> None:
    one = graph(FRONTEND, worker("vllm", name="A", nodes=1, replicas=3), worker("vllm", replicas=2))

    def existing(kind: str, name: str, replicas: int) -> KubeObject:
        return {"kind": kind, "metadata": {"name": name}, "spec": {"replicas": replicas}}

    observed = [
        existing("PodClique", "g-0-frontend", 7),  # Without replicas in the graph: another owner scales it.
        existing("PodClique", "g-0-a", 1),
        existing("PodCliqueScalingGroup", "g-0-decode", 1),
        existing("PodClique", "g-0-decode-0-decode-ldr", 1),
    ]
    found = scale_patches(one, IN_PLACE, observed)
    assert [(patch.ref.kind, patch.ref.name, patch.value) for patch in found] == [
        ("PodClique", "g-0-a", {"spec": {"replicas": 3}}),
        ("PodCliqueScalingGroup", "g-0-decode", {"spec": {"replicas": 2}}),
    ]
    observed[1]["spec"]["replicas"], observed[2]["spec"]["replicas"] = 3, 2
    assert scale_patches(one, IN_PLACE, observed) == []
    assert scale_patches(one, IN_PLACE, []) == []


def test_name_of_the_set_is_shortened_with_a_hash() -> None:
    components = [worker("vllm", name="VllmDecodeWorker")]
    assert pod_clique_set_name("short", components) == "short"
    assert pod_clique_set_name("a-long-name-of-a-graph", components) == "a-lo-6c50"
    assert pod_clique_set_name("a-long-name-of-a-graph", [FRONTEND]) == "a-long-name-of-a-graph"
    assert grove_component_name("short", components, components[0]) == "short-0-vllmdecodeworker"


COMPONENTS = st.lists(
    st.builds(
        ComponentSpec,
        name=st.from_regex(r"[A-Za-z][a-z0-9]{0,15}", fullmatch=True),
        type=st.sampled_from(["frontend", "worker", "prefill", "decode", "planner", None]),
        replicas=st.none() | st.integers(0, 5),
        multinode=st.none() | st.builds(Multinode, node_count=st.none() | st.integers(2, 9)),
    ),
    max_size=6,
    unique_by=lambda one: one.name.lower(),
)


@settings(max_examples=30)
@given(components=COMPONENTS, framework=st.sampled_from(["vllm", "sglang", None]))
def test_every_component_has_its_cliques(components: list[ComponentSpec], framework: str | None) -> None:
    one = graph(*components, backend_framework=framework)
    found = rendered(one)
    assert found == rendered(one)
    template = template_of(found)
    cliques = {clique["name"]: clique for clique in template["cliques"]}
    assert len(cliques) == len(template["cliques"])
    groups = {group["name"]: group for group in template.get("podCliqueScalingGroups", [])}
    for component in components:
        name, replicas = component.name.lower(), max(1, replicas_of(component))
        if component.multinode is None:
            assert cliques.pop(name)["spec"]["replicas"] == replicas
        else:
            group = groups.pop(name)
            assert group["replicas"] == replicas
            pods = [cliques.pop(one)["spec"]["replicas"] for one in group["cliqueNames"]]
            assert pods == [1, (component.multinode.node_count or 2) - 1]
    assert not cliques
    assert not groups


@given(components=COMPONENTS, name=st.from_regex(r"[a-z][a-z0-9-]{0,60}[a-z0-9]", fullmatch=True))
def test_pod_names_are_within_the_length_limit(components: list[ComponentSpec], name: str) -> None:
    found = pod_clique_set_name(name, components)
    longest = max(
        (len(one.name) * (2 if one.multinode else 1) + (4 if one.multinode else 0) for one in components), default=0
    )
    assert len(found) <= max(45 - longest, 8)
    assert found == name or (len(name) > 45 - longest and found[-5] == "-")
