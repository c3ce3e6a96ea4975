"""Probes by component type and runtime version."""

from typing import Any

import pytest

from dynamo.operator.reconcile.probes import add_probes, probes
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec


def found(kind: Any, image: str = "r:1.6.1") -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return probes(ComponentSpec(name="a", type=kind, pod_template=template))


@pytest.mark.parametrize("kind", ["worker", "prefill", "decode", "planner"])
def test_components_with_a_system_server_have_all_probes(kind: str) -> None:
    made = found(kind)
    assert made["livenessProbe"] == {
        "httpGet": {"path": "/live", "port": 9090},
        "periodSeconds": 5,
        "timeoutSeconds": 4,
        "failureThreshold": 3,
    }
    assert made["readinessProbe"]["httpGet"]["path"] == "/health"
    assert made["startupProbe"]["failureThreshold"] == 720


@pytest.mark.parametrize(("image", "failures"), [("r:1.4.0", 1), ("r:latest", 1), ("r:1.5.0", 3), ("r:2.0.0", 3)])
def test_workers_of_later_runtimes_tolerate_failed_liveness_probes(image: str, failures: int) -> None:
    assert found("worker", image)["livenessProbe"]["failureThreshold"] == failures


def test_frontend_is_live_and_ready_by_http() -> None:
    made = found("frontend", "r:1.5.0")
    live = {"initialDelaySeconds": 15, "periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
    ready = {"initialDelaySeconds": 10, "periodSeconds": 10, "timeoutSeconds": 3, "failureThreshold": 3}
    assert made == {
        "livenessProbe": {"httpGet": {"path": "/live", "port": 8000}, **live},
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, **ready},
    }


def test_frontend_of_a_later_runtime_has_a_startup_probe() -> None:
    startup = found("frontend", "r:1.6.0")["startupProbe"]
    assert startup["httpGet"] == {"path": "/live", "port": 8000}
    assert startup["periodSeconds"] * startup["failureThreshold"] == 300


def test_endpoint_picker_is_probed_over_grpc() -> None:
    made = found("epp")
    assert {one["grpc"]["port"] for one in made.values()} == {9003}
    assert made["startupProbe"]["failureThreshold"] == 180


def test_component_without_a_type_has_no_probes() -> None:
    assert found(None) == {}


def test_probes_name_the_port_of_the_container_and_leave_its_own() -> None:
    own = {"httpGet": {"path": "/mine", "port": 1}}
    container: KubeObject = {"readinessProbe": own, "ports": [{"name": "api", "containerPort": 9090}]}
    add_probes(container, probes(ComponentSpec(name="d", type="decode")))
    assert container["readinessProbe"] == {"httpGet": {"path": "/mine", "port": 1}}
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "api"}
    nameless: KubeObject = {"ports": [{"containerPort": 9090}]}
    add_probes(nameless, probes(ComponentSpec(name="d", type="decode")))
    assert nameless["livenessProbe"]["httpGet"]["port"] == 9090
