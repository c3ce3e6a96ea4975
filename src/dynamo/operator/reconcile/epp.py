"""Endpoint picker (EPP) of the Gateway API Inference Extension: its container, configuration and InferencePool."""

from collections.abc import Iterator

import yaml

from dynamo.operator.reconcile.names import (
    COMPONENT,
    COMPONENT_CLASS,
    COMPONENT_TYPE,
    GRAPH,
    GRPC_HEALTH_PORT,
    GRPC_PORT,
    HTTP_PORT,
    NAMESPACE,
    SYSTEM_PORT,
    GraphContext,
    dns_label,
    service_name,
)
from dynamo.operator.reconcile.plan import EventNote
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

EPP_ACCOUNT = "epp-serviceaccount"
EPP_GRACE_S = 130
POOL_GROUP = "inference.networking.k8s.io"
CONFIG_VERSION = "inference.networking.x-k8s.io/v1alpha1"
CONFIG_KEY = "epp-config-dynamo.yaml"
CONFIG_FOLDER = "/etc/epp"
CONFIG_VOLUME, MODEL_CACHE = "epp-config", "hf-cache"
MODEL_CACHE_PATH = "/home/nonroot/.cache"


def pool_name(graph: str) -> str:
    """Return the name of a graph's InferencePool."""
    return f"{graph}-pool"


def epp_ports() -> dict[str, int]:
    """Return the ports of the endpoint picker by name."""
    return {"grpc": GRPC_PORT, "grpc-health": GRPC_HEALTH_PORT, "metrics": SYSTEM_PORT}


def add_epp(component: ComponentSpec, graph: str, namespace: str, spec: KubeObject, main: KubeObject) -> None:
    """Complete the pod of an endpoint picker: a cache of model files, and the former picker's configuration and flags.

    A picker with `eppConfig` is that of runtimes before 1.5, which reads a file; later ones read variables only.
    """
    mounts: list[KubeObject] = main.setdefault("volumeMounts", [])
    volumes: list[KubeObject] = spec.setdefault("volumes", [])
    config = component.epp_config
    if config is not None:
        reference = config.config_map_ref or {}
        name = reference.get("name") or f"{graph}-{CONFIG_VOLUME}"
        items = [{"key": reference.get("key") or CONFIG_KEY, "path": CONFIG_KEY}]
        _add(volumes, {"name": CONFIG_VOLUME, "configMap": {"name": name, "items": items}})
        _add(mounts, {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True})
        main.setdefault("args", _flags(graph, namespace))
    _add(volumes, {"name": MODEL_CACHE, "emptyDir": {}})
    _add(mounts, {"name": MODEL_CACHE, "mountPath": MODEL_CACHE_PATH})


def epp_objects(
    component: ComponentSpec, context: GraphContext, facts: ClusterFacts
) -> Iterator[KubeObject | EventNote]:
    """Yield the ConfigMap and the InferencePool of an endpoint picker, or an event where the cluster has no pools."""
    labels = {GRAPH: context.name, COMPONENT: component.name, COMPONENT_TYPE: "epp"}
    config = component.epp_config
    if config is not None and config.config is not None:
        value = {**config.config, "apiVersion": CONFIG_VERSION, "kind": "EndpointPickerConfig"}
        metadata = {"name": f"{context.name}-{CONFIG_VOLUME}", "namespace": context.namespace, "labels": labels}
        data = {CONFIG_KEY: yaml.safe_dump(value)}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    if not facts.has_inference_pools:
        text = f"component {component.name}: an endpoint picker requires InferencePool, which is not installed"
        yield EventNote("Warning", "NotSupported", text)
        return
    yield {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": {"name": pool_name(context.name), "namespace": context.namespace, "labels": labels},
        "spec": {
            "targetPorts": [{"number": HTTP_PORT}],
            "selector": {"matchLabels": {COMPONENT_CLASS: "worker", NAMESPACE: context.dynamo_namespace(component)}},
            "endpointPickerRef": {
                "kind": "Service",
                "name": dns_label(service_name(context.name, component.name)),
                "port": {"number": GRPC_PORT},
            },
        },
    }


def _flags(graph: str, namespace: str) -> list[str]:
    values = {
        "--pool-name": pool_name(graph),
        "--pool-namespace": namespace,
        "--pool-group": POOL_GROUP,
        "-v": "4",
        "--zap-encoder": "json",
        "--grpc-port": str(GRPC_PORT),
        "--grpc-health-port": str(GRPC_HEALTH_PORT),
        "--config-file": f"{CONFIG_FOLDER}/{CONFIG_KEY}",
    }
    return [word for pair in values.items() for word in pair]


def _add(items: list[KubeObject], wanted: KubeObject) -> None:
    if all(one.get("name") != wanted["name"] for one in items):
        items.append(wanted)
