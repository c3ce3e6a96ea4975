"""Failover within a pod: two engines in place of the main container."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.worlds import CONTEXT, worker

from dynamo.operator.reconcile.failover import add_engines, with_master_port
from dynamo.operator.reconcile.multinode import single_node_template
from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentExperimental, ComponentSpec, Failover, GpuMemoryService

SHARED = ComponentExperimental(gpu_memory_service=GpuMemoryService(), failover=Failover())


def rendered(component: ComponentSpec, framework: str = "vllm") -> list[KubeObject]:
    template = single_node_template(pod_template(component, CONTEXT, []), framework)
    add_engines(component, template, framework)
    containers: list[KubeObject] = template["spec"]["containers"]
    return containers


def env_of(container: KubeObject) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in container["env"]}


def test_engines_have_ports_probes_and_variables_of_their_own() -> None:
    first, second = rendered(worker("vllm", nodes=1, experimental=SHARED))
    for index, engine in enumerate((first, second)):
        env = env_of(engine)
        assert engine["name"] == env["CONTAINER_NAME"] == f"engine-{index}"
        assert engine["ports"] == [{"name": f"system-{index}", "containerPort": 9090 + index, "protocol": "TCP"}]
        assert {engine[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe", "startupProbe")} == {
            f"system-{index}"
        }
        assert env["ENGINE_ID"] == str(index)
        assert env["FAILOVER_LOCK_PATH"] == "/gms-intrapod-control/failover.lock"
        assert env["DYN_SYSTEM_STARTING_HEALTH_STATUS"] == "notready"
        assert env["DYN_SYSTEM_PORT"] == str(9090 + index)
        assert env["DYN_FORWARDPASS_METRIC_PORT"] == str(20380 + index)
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(5600 + index)
        assert env["DYN_VLLM_GMS_SHADOW_MODE"] == "true"
        assert not env.keys() & {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "DYN_HEALTH_CHECK_ENABLED", "NNODES"}
        assert len(engine["env"]) == len(env)
        assert engine["resources"]["claims"] == [{"name": "intrapod-shared-gpu"}]
    assert "--master-port" not in first["args"]
    assert second["args"][-2:] == ["--master-port", "29600"]


def test_other_containers_and_components_without_failover_remain() -> None:
    component = worker("vllm", nodes=1, experimental=SHARED)
    assert component.pod_template is not None
    component.pod_template["spec"]["containers"].append({"name": "helper", "image": "h"})
    assert [one["name"] for one in rendered(component)] == ["engine-0", "engine-1", "helper"]
    assert [one["name"] for one in rendered(worker("vllm", nodes=1))] == ["main"]


def test_other_framework_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"components\[Decode\]\.experimental\.failover: requires vllm, not sglang"):
        rendered(worker("sglang", nodes=1, experimental=SHARED), "sglang")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python3", "-m", "dynamo.vllm", "--master-port", "30000"], ["--master-port", "30100"]),
        (["python3", "-m", "dynamo.vllm", "--master-port=30000"], ["--master-port=30100"]),
        (["sh", "-c", "python3 -m dynamo.vllm --master-port 30000 --x 1"], "--master-port 30100 --x 1"),
        (["sh", "-c", "python3 -m dynamo.vllm --x 1"], "dynamo.vllm --master-port 29600 --x 1"),
    ],
)
def test_master_port_of_the_second_engine_differs(words: list[str], expected: Any) -> None:
    found = with_master_port(CommandLine.of({"command": words}), 100).words
    assert expected in found[-1] if isinstance(expected, str) else list(found[-len(expected) :]) == expected
