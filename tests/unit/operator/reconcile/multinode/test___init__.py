"""Pod templates of leader and workers."""

import copy

import pytest
from tests.unit.operator.reconcile.worlds import CONTEXT, MP, RAY, worker

from dynamo.operator.reconcile.multinode import RoleTemplates, framework_of, gpus_of, main_of, role_templates
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, leader_worker_set_nodes
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

PROBES = {"livenessProbe", "readinessProbe", "startupProbe"}


def templates(component: ComponentSpec, framework: str | None, annotations: dict[str, str] = MP) -> RoleTemplates:
    template = pod_template(component, CONTEXT, [])
    given = copy.deepcopy(template)
    group = leader_worker_set_nodes(2)
    found = role_templates(component, CONTEXT, template, group, framework=framework, annotations=annotations)
    assert template == given
    return found


def env(template: dict) -> set[str]:
    return {one["name"] for one in main_of(template)["env"]}


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
def test_leader_keeps_its_probes_and_workers_only_required_ones(framework: str) -> None:
    found = templates(worker(framework), framework)
    assert set(main_of(found.leader)) >= PROBES
    remaining = set(main_of(found.worker)) & PROBES
    assert remaining == ({"readinessProbe"} if framework == "trtllm" else set())


def test_worker_of_processes_waits_for_the_leader() -> None:
    found = templates(worker("vllm", "-tp", "16"), "vllm")
    assert [one["name"] for one in found.worker["spec"]["initContainers"]] == ["wait-for-leader-mp"]
    assert "initContainers" not in found.leader["spec"]
    for template in (found.leader, found.worker):
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in env(template)
    assert found.is_changed


def test_ray_worker_does_not_wait_for_the_leader() -> None:
    found = templates(worker("vllm", "-tp", "16"), "vllm", {**MP, **RAY})
    assert "initContainers" not in found.worker["spec"]
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in env(found.worker)


def test_annotation_of_the_pod_template_precedes_that_of_the_graph() -> None:
    component = worker("vllm", "-tp", "16")
    assert component.pod_template is not None
    component.pod_template["metadata"] = {"annotations": RAY}
    found = templates(component, "vllm", {**MP, next(iter(RAY)): "mp"})
    assert main_of(found.worker)["args"] == ["ray start --address=$(LWS_LEADER_ADDRESS):6379 --block"]


@pytest.mark.parametrize(
    "main", [{"command": [], "args": []}, {"command": ["sh", "-c", "/opt/run.sh"], "args": []}], ids=["image", "script"]
)
@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_command_that_cannot_be_adapted_is_unchanged(framework: str, main: dict) -> None:
    found = templates(worker(framework, "-tp", "16", main=main), framework)
    assert not found.is_changed
    assert "initContainers" not in found.worker["spec"]


def test_workers_variables_of_the_component_remain() -> None:
    own = {"env": [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "h"}]}
    found = templates(worker("vllm", "-tp", "16", main=own), "vllm")
    values = [one for one in main_of(found.worker)["env"] if one["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"]
    assert values == own["env"]


def test_tensorrt_llm_nodes_share_ssh_keys_and_full_host_names() -> None:
    found = templates(worker("trtllm"), "trtllm")
    for template in (found.leader, found.worker):
        assert "OMPI_MCA_orte_keep_fqdn_hostnames" in env(template)
        assert "mpi-run-ssh-secret" in {one["name"] for one in template["spec"]["volumes"]}
    assert main_of(found.worker)["readinessProbe"]["tcpSocket"] == {"port": 2222}
    assert "-x OMPI_MCA_orte_keep_fqdn_hostnames" in main_of(found.leader)["args"][0]


def test_tensorrt_llm_without_gpus_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"components\[Decode\].*limits: nvidia.com/gpu is required"):
        templates(worker("trtllm", gpus=0), "trtllm")


def test_component_without_framework_is_unchanged() -> None:
    found = templates(worker("mocker"), None)
    assert found.leader == found.worker
    assert not found.is_changed


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
def test_framework_is_derived_from_the_command(framework: str) -> None:
    assert framework_of(worker(framework), None) == framework
    script = {"command": ["sh", "-c"], "args": [f"cd /x && exec python3 -m dynamo.{framework} -x"]}
    assert framework_of(worker(framework, main=script), None) == framework


def test_framework_is_the_given_one_without_a_command() -> None:
    assert framework_of(worker("vllm", main={"command": [], "args": []}), "sglang") == "sglang"
    assert framework_of(ComponentSpec(name="a", type="decode"), "vllm") == "vllm"
    assert framework_of(ComponentSpec(name="a", type="decode"), None) is None


def test_non_worker_component_has_no_framework() -> None:
    assert framework_of(worker("vllm", type="frontend"), "vllm") is None


def test_contradicting_frameworks_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"runs vllm, but spec\.backendFramework is sglang"):
        framework_of(worker("vllm"), "sglang")
    both = {"args": ["python3 -m dynamo.vllm & python3 -m dynamo.sglang"], "command": ["sh", "-c"]}
    with pytest.raises(WorkloadError, match="runs vllm and sglang"):
        framework_of(worker("vllm", main=both), None)


def test_gpu_count_is_read_from_limits_or_requests() -> None:
    assert gpus_of({"resources": {"limits": {"nvidia.com/gpu": 8, "cpu": "4"}}}) == 8
    assert gpus_of({"resources": {"requests": {"amd.com/gpu": "4"}}}) == 4
    assert gpus_of({}) == 0
