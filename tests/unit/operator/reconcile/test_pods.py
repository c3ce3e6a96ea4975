"""Pod templates: environment, probes, ports, shared memory and what the user's template overrides."""

from typing import Any

import pytest

from dynamo.operator.reconcile.names import METRICS_ENABLED, GraphContext, OperatorSettings
from dynamo.operator.reconcile.pods import IMAGE_HOME, pod_template, ports
from dynamo.protocols.kubernetes.v1beta1 import CompilationCache, ComponentSpec


def template_of(
    kind: str, template: dict[str, Any] | None = None, settings: OperatorSettings | None = None, **more: Any
) -> dict[str, Any]:
    component = ComponentSpec(name="One", type=kind, pod_template=template, **more)  # type: ignore[arg-type]
    context = GraphContext(
        name="chat", namespace="space", settings=settings or OperatorSettings(), worker_hash="0123abcd"
    )
    return pod_template(component, context, [])


def main_of(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["spec"]["containers"][0]
    return found


def values(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in main_of(template)["env"]}


def with_main(**main: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", **main}]}}


def test_worker_environment_names_its_graph_generation_and_pod() -> None:
    found = values(template_of("decode"))
    assert found["DYN_NAMESPACE"] == "space-chat"
    assert found["DYN_NAMESPACE_WORKER_SUFFIX"] == "0123abcd"
    assert (found["DYN_PARENT_DGD_K8S_NAME"], found["DYN_PARENT_DGD_K8S_NAMESPACE"]) == ("chat", "space")
    assert (found["DYN_SYSTEM_PORT"], found["DYN_FORWARDPASS_METRIC_PORT"]) == ("9090", "20380")
    assert found["DYN_DISCOVERY_BACKEND"] == "kubernetes"
    assert found["POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert "NATS_SERVER" not in found


def test_configured_cluster_services_are_passed_to_pods() -> None:
    settings = OperatorSettings(discovery_backend="etcd", nats_address="nats://n:4222", etcd_endpoints="http://e:2379")
    found = values(template_of("frontend", settings=settings))
    assert (found["NATS_SERVER"], found["ETCD_ENDPOINTS"]) == ("nats://n:4222", "http://e:2379")
    assert found["DYN_NAMESPACE_PREFIX"] == "space-chat"


def test_global_namespace_components_use_the_global_namespace() -> None:
    assert values(template_of("frontend", global_dynamo_namespace=True))["DYN_NAMESPACE"] == "dynamo"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("frontend", {"http": 8000}),
        ("worker", {"system": 9090, "nixl": 19090}),
        ("planner", {"metrics": 9085, "system": 9090}),
        (None, {}),
    ],
)
def test_each_component_type_has_its_ports(kind: Any, expected: dict[str, int]) -> None:
    assert ports(ComponentSpec(name="a", type=kind)) == expected


def test_worker_startup_probe_allows_two_hours() -> None:
    main = main_of(template_of("prefill"))
    startup = main["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 7200
    assert main["readinessProbe"]["httpGet"] == {"path": "/health", "port": "system"}
    assert main["livenessProbe"]["httpGet"]["path"] == "/live"


@pytest.mark.parametrize(
    ("kind", "own", "command", "args"),
    [
        ("frontend", {}, ["python3"], ["-m", "dynamo.frontend"]),
        ("frontend", {"args": ["x"]}, ["python3"], ["x"]),
        ("frontend", {"command": ["run"]}, ["run"], None),
        ("worker", {"args": ["python3 -m dynamo.vllm"]}, ["/bin/sh", "-c"], ["python3 -m dynamo.vllm"]),
        ("worker", {}, None, None),
        ("epp", {"args": ["x"]}, None, ["x"]),
    ],
)
def test_container_without_a_command_uses_that_of_its_type(
    kind: Any, own: dict[str, Any], command: list[str] | None, args: list[str] | None
) -> None:
    main = main_of(template_of(kind, with_main(**own)))
    assert (main.get("command"), main.get("args")) == (command, args)


def test_probes_ports_and_variables_of_the_template_take_precedence() -> None:
    own = with_main(
        livenessProbe={"tcpSocket": {"port": 1}},
        ports=[{"name": "mine", "containerPort": 9090}],
        env=[{"name": "DYN_SYSTEM_PORT", "value": "7"}],
    )
    found = template_of("worker", own)
    main = main_of(found)
    assert main["livenessProbe"] == {"tcpSocket": {"port": 1}}
    assert [(one["name"], one["containerPort"]) for one in main["ports"]] == [("mine", 9090), ("nixl", 19090)]
    assert values(found)["DYN_SYSTEM_PORT"] == "7"


def test_shared_memory_is_mounted_with_the_size_of_the_component() -> None:
    found = template_of("worker", shared_memory_size="20Gi")
    assert found["spec"]["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}}
    ]
    assert main_of(found)["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def test_shared_memory_is_not_mounted_with_size_zero_or_over_a_mount_of_the_template() -> None:
    assert "volumes" not in template_of("worker", shared_memory_size="0")["spec"]
    mounted = with_main(volumeMounts=[{"name": "own", "mountPath": "/dev/shm"}])
    assert [one["name"] for one in template_of("worker", mounted)["spec"]["volumes"]] == ["own"]


def test_pods_are_scraped_unless_an_annotation_opts_out() -> None:
    assert template_of("worker")["metadata"]["labels"][METRICS_ENABLED] == "true"
    own = {"metadata": {"annotations": {"nvidia.com/enable-metrics": "false"}}}
    assert METRICS_ENABLED not in template_of("worker", own)["metadata"]["labels"]


def test_other_containers_are_kept_unchanged() -> None:
    own = {"spec": {"containers": [{"name": "sidecar", "image": "s"}, {"name": "main", "image": "m"}]}}
    containers = template_of("worker", own)["spec"]["containers"]
    assert containers[0] == {"name": "sidecar", "image": "s"}
    assert containers[1]["image"] == "m"


def test_component_template_is_not_modified() -> None:
    own = with_main(image="m")
    template_of("worker", own)
    assert own == with_main(image="m")


def test_compilation_cache_is_mounted_and_configured_for_the_engine() -> None:
    cache = CompilationCache("claim", "/cc")
    found = template_of("worker", compilation_cache=cache)
    assert {"name": "claim", "mountPath": "/cc"} in main_of(found)["volumeMounts"]
    assert {"name": "claim", "persistentVolumeClaim": {"claimName": "claim"}} in found["spec"]["volumes"]
    assert values(found)["VLLM_CACHE_ROOT"] == "/cc"
    assert (
        values(template_of("worker", compilation_cache=CompilationCache("claim")))["VLLM_CACHE_ROOT"]
        == f"{IMAGE_HOME}/.cache/vllm"
    )
