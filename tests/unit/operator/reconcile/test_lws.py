"""LeaderWorkerSets of components. Golden files: `UPDATE_GOLDEN=1`."""

import copy
from pathlib import Path

import pytest
from tests.golden import check_golden
from tests.unit.operator.reconcile.worlds import CONTEXT, MP, RAY, worker

from dynamo.operator.reconcile.lws import leader_worker_set, pod_group
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "lws-vllm-mp": ("vllm", worker("vllm", "--tensor-parallel-size", "16", replicas=2), MP),
    "lws-vllm-ray": ("vllm", worker("vllm", "--tensor-parallel-size", "16", '{"a": "b c"}'), RAY),
    "lws-vllm-data-parallel": ("vllm", worker("vllm", "--data-parallel-size", "16", "--enable-expert-parallel"), MP),
    "lws-vllm-elastic": ("vllm", worker("vllm", "-dp", "8", "--enable-elastic-ep", "-dpb", "ray"), MP),
    "lws-sglang": ("sglang", worker("sglang", "--tp", "16"), MP),
    "lws-trtllm": ("trtllm", worker("trtllm", "--override-engine-args", '{"a": "b c"}', nodes=3, gpus=4), MP),
}


def rendered(component: ComponentSpec, framework: str | None, annotations: dict[str, str], **facts: bool) -> KubeObject:
    template = pod_template(component, CONTEXT, [])
    given = copy.deepcopy(template)
    found = leader_worker_set(component, CONTEXT, template, framework=framework, annotations=annotations, **facts)
    assert template == given
    return found


@pytest.mark.parametrize("name", CASES)
def test_leader_worker_set_objects_equal_the_golden_file(name: str) -> None:
    framework, component, annotations = CASES[name]
    check_golden(GOLDEN / f"{name}.yaml", rendered(component, framework, annotations))


def test_leader_worker_set_name_differs_from_the_service_name() -> None:
    assert rendered(worker("sglang"), "sglang", MP)["metadata"]["name"] == "g-decode-0a1b2c3d-0"


def test_pods_of_both_roles_have_the_labels_of_the_component_and_their_role() -> None:
    spec = rendered(worker("sglang"), "sglang", MP)["spec"]["leaderWorkerTemplate"]
    for role in ("leader", "worker"):
        labels = spec[f"{role}Template"]["metadata"]["labels"]
        assert labels["role"] == role
        assert labels.items() >= CONTEXT.labels(worker("sglang")).items()


def test_volcano_schedules_pods_of_a_graph_with_a_queue() -> None:
    queue = {"nvidia.com/volcano-queue": "gpus"}
    found = rendered(worker("sglang"), "sglang", queue, has_volcano=True)
    spec = found["spec"]["leaderWorkerTemplate"]
    assert found["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "gpus"}
    assert spec["leaderTemplate"]["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in rendered(worker("sglang"), "sglang", queue)["spec"]["leaderWorkerTemplate"]
    assert "annotations" not in rendered(worker("sglang"), "sglang", {}, has_volcano=True)["metadata"]


def test_volcano_starts_all_pods_or_none() -> None:
    component = worker("sglang", nodes=4, replicas=3)
    found = rendered(component, "sglang", MP, has_volcano=True)
    group = pod_group(component, CONTEXT, {"nvidia.com/volcano-queue": "gpus"})
    assert group["metadata"]["name"] == found["metadata"]["name"]
    assert group["spec"] == {"minMember": 12, "queue": "gpus"}
    for role in ("leader", "worker"):
        template = found["spec"]["leaderWorkerTemplate"][f"{role}Template"]
        assert template["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
        assert template["spec"]["schedulerName"] == "volcano"
    assert pod_group(component, CONTEXT, {})["spec"] == {"minMember": 12}


def test_image_without_command_is_refused() -> None:
    component = worker("vllm", main={"command": [], "args": []})
    with pytest.raises(WorkloadError, match=r"spec\.components\[Decode\].*\.command: is required"):
        rendered(component, "vllm", MP)
