"""GPU memory service between pods: cliques of the service and of the engines, which share claims of Grove."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.operator.reconcile.worlds import CONTEXT, MP, worker

from dynamo.operator.reconcile.grove_names import name_length
from dynamo.operator.reconcile.memory_pods import MemoryPods, clique_names, memory_pods
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.v1beta1 import ComponentExperimental, ComponentSpec, Failover, GpuMemoryService

SERVICE = ComponentExperimental(gpu_memory_service=GpuMemoryService(mode="InterPod"))
STANDBY = ComponentExperimental(
    gpu_memory_service=GpuMemoryService(mode="InterPod", device_class_name="gpu.example.com"),
    failover=Failover(mode="InterPod", num_shadows=1),
)
GROVE = replace(CONTEXT, is_in_place=True)


def rendered(component: ComponentSpec, framework: str | None = "vllm") -> MemoryPods:
    template = pod_template(component, GROVE, [])
    return memory_pods(component, GROVE, template, framework=framework, annotations=MP)


def test_one_node_has_the_service_and_an_engine_that_restarts_in_place() -> None:
    found = rendered(worker("vllm", nodes=1, experimental=SERVICE))
    (server, servers, service, _), (engine, engines, pod, after) = found.templates
    assert (server, servers, engine, engines, after) == ("decode-gms-0", 1, "decode", 1, "decode-gms-0")
    main = pod["spec"]["containers"][0]
    assert main["args"] == ["--model", "m", "--load-format", "gms"]
    names = {one["name"] for one in main["env"]}
    assert {"ENGINE_ID", "GMS_SOCKET_DIR", "FAILOVER_LOCK_PATH"} <= names
    assert not names & {"DYN_VLLM_GMS_SHADOW_MODE", "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"}
    assert pod["spec"]["restartPolicy"] == "Always"
    assert "nvidia.com/dynamo-failover-engine-group-member" not in pod["metadata"]["labels"]
    for one in (service, pod):
        container = one["spec"]["containers"][0]
        assert "limits" not in container["resources"]
        mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "gms-shared")
        assert mount["subPathExpr"] == "$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)/rank-0"
        assert one["spec"]["initContainers"][-1]["command"] == ["sh", "-c", "chmod 1777 /run/gms/shared"]
        assert one["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "nvidia.com/dynamo-discovery-enabled" not in service["metadata"]["labels"]
    server_main = service["spec"]["containers"][0]
    assert server_main["startupProbe"]["exec"]["command"][-1].endswith("-ge 16")
    assert not server_main.keys() & {"livenessProbe", "readinessProbe"}


def test_nodes_with_standby_engines_form_groups_by_index() -> None:
    found = rendered(worker("vllm", "-tp", "16", nodes=2, experimental=STANDBY))
    assert [(name, count, after) for name, count, _, after in found.templates] == [
        ("decode-gms-0", 1, ""),
        ("decode-ldr", 2, "decode-gms-0"),
        ("decode-gms-1", 1, ""),
        ("decode-wkr-1", 2, "decode-gms-1"),
    ]
    leader, worker_pod = found.templates[1][2], found.templates[3][2]
    for rank, pod in enumerate((leader, worker_pod)):
        args = pod["spec"]["containers"][0]["args"]
        address = "$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)-decode-ldr-$(GROVE_PCLQ_POD_INDEX).$(GROVE_HEADLESS_SERVICE)"
        assert args[args.index("--master-addr") + 1] == address
        assert args[args.index("--node-rank") + 1] == str(rank)
        assert {"name": "DYN_VLLM_GMS_SHADOW_MODE", "value": "true"} in pod["spec"]["containers"][0]["env"]
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["metadata"]["labels"]["nvidia.com/dynamo-failover-engine-group-member"] == "true"
    assert found.sharing == [
        {
            "name": f"decode-gpu-rank-{rank}",
            "scope": "PerReplica",
            "filter": {"childCliqueNames": [f"decode-gms-{rank}", engine]},
        }
        for rank, engine in enumerate(("decode-ldr", "decode-wkr-1"))
    ]
    requests = [one["templateSpec"]["spec"]["devices"]["requests"] for one in found.claim_templates]
    exactly = {"deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 8}
    assert requests == [[{"name": "gpu", "exactly": exactly}]] * 2


@pytest.mark.parametrize("nodes", [1, 2, 11])
def test_length_of_names_is_that_of_the_longest_clique(nodes: int) -> None:
    component = worker("vllm", nodes=nodes, experimental=SERVICE)
    longest = max(len(name) for rank in range(nodes) for name in clique_names(component, rank))
    assert name_length("Decode", is_multinode=nodes > 1, has_group=True, memory_nodes=nodes) == 6 + longest


@pytest.mark.parametrize(("program", "status"), [("exit 7", 7), ('kill -TERM "$PPID"; exec sleep 60', 143)])
def test_container_of_the_service_ends_with_its_server(program: str, status: int, tmp_path: Path) -> None:
    container = rendered(worker("vllm", nodes=1, experimental=SERVICE)).templates[0][2]["spec"]["containers"][0]
    server = tmp_path / "python3"
    server.write_text(f'#!/bin/sh\n[ "$*" = "-m gpu_memory_service.cli.server" ] || exit 9\n{program}\n')
    server.chmod(0o755)
    command = [*container["command"], *container["args"]]
    found = subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=False)
    assert found.returncode == status


@pytest.mark.parametrize(
    ("component", "framework", "message"),
    [
        (
            worker("sglang", experimental=SERVICE),
            "sglang",
            r"gpuMemoryService\.mode: InterPod requires vllm, not sglang",
        ),
        (worker("vllm", gpus=0, experimental=SERVICE), "vllm", "gpuMemoryService: requires a GPU limit"),
    ],
)
def test_component_that_cannot_share_is_refused(component: ComponentSpec, framework: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        rendered(component, framework)
