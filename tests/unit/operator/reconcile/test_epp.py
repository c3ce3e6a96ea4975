"""Endpoint pickers: pods, services, configuration and InferencePools."""

from typing import Any

from tests.unit.operator.reconcile.pure_cluster import NAMESPACE, NO_GROVE, PureCluster
from tests.unit.operator.reconcile.test_graph import component

from dynamo.operator.reconcile.provider import ClusterFacts


def cluster_of(facts: ClusterFacts = NO_GROVE, sidecar: bool = True, **epp: Any) -> PureCluster:
    worker = component("decode", "decode", image="worker:1.6.1")
    if sidecar:
        worker["frontendSidecar"] = "side"
        worker["podTemplate"]["spec"]["containers"].append({"name": "side", "image": "front:1.6.1"})
        worker["podTemplate"]["spec"]["containers"][0]["volumeMounts"] = [{"name": "models", "mountPath": "/models"}]
    picker = component("Epp", "epp", image="epp:1.6.1", **epp)
    made = PureCluster({"spec": {"components": [picker, worker]}}, facts)
    made.settle()
    return made


def pod_of(cluster: PureCluster, name: str) -> dict[str, Any]:
    found = {one["metadata"]["labels"]["nvidia.com/dynamo-component"]: one for one in cluster.of_kind("Deployment")}
    pod: dict[str, Any] = found[name]["spec"]["template"]["spec"]
    return pod


def test_inference_pool_selects_the_workers_and_references_the_picker_service() -> None:
    cluster = cluster_of()
    [pool] = cluster.of_kind("InferencePool")
    assert pool["metadata"]["name"] == "chat-pool"
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    selector = pool["spec"]["selector"]["matchLabels"]
    assert selector == {
        "nvidia.com/dynamo-component-class": "worker",
        "nvidia.com/dynamo-namespace": f"{NAMESPACE}-chat",
    }
    [worker] = [one for one in cluster.of_kind("Deployment") if "decode" in one["metadata"]["name"]]
    assert selector.items() <= worker["spec"]["template"]["metadata"]["labels"].items()
    reference = pool["spec"]["endpointPickerRef"]
    assert reference == {"kind": "Service", "name": "chat-epp", "port": {"number": 9002}}
    [service] = [one for one in cluster.of_kind("Service") if one["metadata"]["name"] == "chat-epp"]
    assert (service["spec"]["ports"][0]["port"], service["spec"]["ports"][0]["appProtocol"]) == (9002, "http2")


def test_endpoint_picker_without_configuration_has_no_command() -> None:
    pod = pod_of(cluster_of(), "Epp")
    main = pod["containers"][0]
    assert "command" not in main and "args" not in main
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("epp-serviceaccount", 130)
    [made] = [one for one in cluster_of().of_kind("Deployment") if one["metadata"]["name"] == "chat-epp"]
    assert made["spec"]["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert {one["name"] for one in pod["volumes"]} == {"shared-memory", "hf-cache"}


def test_endpoint_picker_configuration_is_mounted_from_a_generated_config_map() -> None:
    cluster = cluster_of(eppConfig={"config": {"plugins": [{"type": "dyn-kv"}]}})
    [config] = cluster.of_kind("ConfigMap")
    assert config["metadata"]["name"] == "chat-epp-config"
    text = config["data"]["epp-config-dynamo.yaml"]
    assert "kind: EndpointPickerConfig" in text and "dyn-kv" in text
    main = pod_of(cluster, "Epp")["containers"][0]
    assert main["args"][main["args"].index("--config-file") + 1] == "/etc/epp/epp-config-dynamo.yaml"
    assert main["args"][main["args"].index("--pool-name") + 1] == "chat-pool"


def test_user_provided_picker_configuration_is_mounted() -> None:
    cluster = cluster_of(eppConfig={"configMapRef": {"name": "own", "key": "k"}})
    assert cluster.of_kind("ConfigMap") == []
    [volume] = [one for one in pod_of(cluster, "Epp")["volumes"] if one["name"] == "epp-config"]
    assert volume["configMap"] == {"name": "own", "items": [{"key": "k", "path": "epp-config-dynamo.yaml"}]}


def test_cluster_without_inference_pools_is_an_event() -> None:
    cluster = cluster_of(ClusterFacts())
    assert cluster.of_kind("InferencePool") == []
    assert "NotSupported" in cluster.events


def test_frontend_sidecar_is_completed_with_command_and_ports() -> None:
    main, side = pod_of(cluster_of(), "decode")["containers"]
    assert (side["command"], side["args"]) == (["python3"], ["-m", "dynamo.frontend"])
    assert side["ports"] == [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]
    assert side["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert side["volumeMounts"] == [{"name": "models", "mountPath": "/models"}]
    assert "command" not in main


def test_missing_frontend_sidecar_is_reported_in_a_condition() -> None:
    cluster = cluster_of(sidecar=False)
    spec = cluster.graph["spec"]
    spec["components"][1]["frontendSidecar"] = "absent"
    cluster.edit(spec)
    for _ in range(3):
        for _ in cluster.rounds():
            pass
    assert "'absent' is not a further container" in str(cluster.graph["status"]["conditions"])
