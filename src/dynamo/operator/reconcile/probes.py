"""Probes of a component's main container, by its type and the version of its runtime."""

import copy
from collections.abc import Mapping
from typing import Any

from dynamo.operator.reconcile.names import GRPC_HEALTH_PORT, HTTP_PORT, SYSTEM_PORT
from dynamo.operator.reconcile.runtime_version import FRONTEND_STARTS_SLOWLY, TOLERANT_LIVENESS, has_reached
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

FRONTEND_LIVE = {"initialDelaySeconds": 15, "periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
FRONTEND_READY = {"initialDelaySeconds": 10, "periodSeconds": 10, "timeoutSeconds": 3, "failureThreshold": 3}
FRONTEND_STARTUP = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 30}
"""Five minutes, in which a frontend connects to NATS and etcd."""
SERVED = frozenset({"planner", "worker", "prefill", "decode"})
"""Component types with a system server."""
STARTUP = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 720}
"""Two hours: a model is downloaded and loaded meanwhile, and a planner waits for its workers."""
EPP_SERVICE = "inference-extension"


def probes(component: ComponentSpec) -> dict[str, KubeObject]:
    """Return the probes of the main container."""
    if component.type == "frontend":
        return frontend_probes(component)
    if component.type == "epp":
        return _epp()
    if component.type not in SERVED:
        return {}
    live, health = _get("/live", SYSTEM_PORT), _get("/health", SYSTEM_PORT)
    failures = 3 if has_reached(component, TOLERANT_LIVENESS) else 1
    return {
        "livenessProbe": {**live, "periodSeconds": 5, "timeoutSeconds": 4, "failureThreshold": failures},
        "readinessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 4, "failureThreshold": 3},
        "startupProbe": {**live, **STARTUP},
    }


def add_probes(container: KubeObject, wanted: Mapping[str, KubeObject]) -> None:
    """Give a container the probes that it has not, to its ports by name."""
    names = {one["containerPort"]: one["name"] for one in container.get("ports") or () if one.get("name")}
    for name, probe in wanted.items():
        if name not in container:
            made = copy.deepcopy(probe)
            if "httpGet" in made:
                made["httpGet"]["port"] = names.get(made["httpGet"]["port"], made["httpGet"]["port"])
            container[name] = made


def frontend_probes(component: ComponentSpec) -> dict[str, KubeObject]:
    """Return the probes of a frontend, in a pod of its own or in that of a worker."""
    found = {
        "livenessProbe": {**_get("/live", HTTP_PORT), **FRONTEND_LIVE},
        "readinessProbe": {**_get("/health", HTTP_PORT), **FRONTEND_READY},
    }
    if has_reached(component, FRONTEND_STARTS_SLOWLY):
        found["startupProbe"] = {**_get("/live", HTTP_PORT), **FRONTEND_STARTUP}
    return found


def _epp() -> dict[str, KubeObject]:
    grpc: dict[str, Any] = {"grpc": {"port": GRPC_HEALTH_PORT, "service": EPP_SERVICE}, "periodSeconds": 10}
    return {
        "livenessProbe": {**grpc, "initialDelaySeconds": 5},
        "readinessProbe": {**grpc, "initialDelaySeconds": 5},
        "startupProbe": {**grpc, "failureThreshold": 180},
    }


def _get(path: str, port: int) -> KubeObject:
    return {"httpGet": {"path": path, "port": port}}
