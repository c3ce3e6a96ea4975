"""The init container that waits for the leader, and its script."""

import json
import urllib.error
from typing import Any

import pytest
from tests.kubelet import programs
from tests.unit.operator.reconcile.worlds import CONTEXT

from dynamo.operator.reconcile.multinode.nodes import grove_nodes, leader_worker_set_nodes
from dynamo.operator.reconcile.multinode.wait_for_leader import SCRIPT, add_init_container, config_map

RUNNING = {"metadata": {"name": "p"}, "status": {"phase": "Running"}}
DELETED = {"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"}}


class Connected:
    def close(self) -> None: ...


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("LEADER_HOST", "leader")
    monkeypatch.setenv("LEADER_PORT", "29500")
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(SCRIPT, "wait-for-leader.py", "exec"), names)
    monkeypatch.setattr(names["socket"], "gethostbyname", lambda host: "10.0.0.1")
    monkeypatch.setattr(names["socket"], "create_connection", lambda address, timeout: Connected())
    return names


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([RUNNING], None),
        ([DELETED, RUNNING], None),
        ([DELETED], "no running pod has the address 10.0.0.1"),
        ([], "no running pod has the address 10.0.0.1"),
        ([{"metadata": {}, "status": {"phase": "Pending"}}], "no running pod has the address 10.0.0.1"),
    ],
)
def test_worker_starts_when_a_running_pod_accepts_connections(script, pods, reason) -> None:
    script["pods_at"] = lambda address: pods
    assert script["reason_to_wait"]() == reason


def test_port_decides_without_permission_to_read_pods(script, capsys) -> None:
    def refused(address: str) -> list[object]:
        raise urllib.error.HTTPError("url", 403, "Forbidden", None, None)  # type: ignore[arg-type]

    script["pods_at"] = refused
    assert script["reason_to_wait"]() is None
    assert "Forbidden" in capsys.readouterr().out


def test_unresolved_name_and_closed_port_are_reasons_to_wait(script, monkeypatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise ConnectionRefusedError("refused")

    script["pods_at"] = lambda address: [RUNNING]
    monkeypatch.setattr(script["socket"], "create_connection", failing)
    assert script["reason_to_wait"]() == "cannot connect to 10.0.0.1: refused"
    monkeypatch.setattr(script["socket"], "gethostbyname", failing)
    assert script["reason_to_wait"]() == "cannot resolve the name: refused"


def test_script_ends_when_the_leader_accepts_connections(script, capsys) -> None:
    script["pods_at"] = lambda address: [RUNNING]
    script["main"]()
    assert "the leader accepts connections" in capsys.readouterr().out


def test_config_map_has_the_script() -> None:
    found = config_map(CONTEXT)
    assert found["metadata"]["name"] == "g-wait-leader-script"
    assert found["data"] == {"wait-for-leader.py": SCRIPT}
    json.dumps(found)


@pytest.mark.parametrize(
    ("group", "variables", "host"),
    [
        (leader_worker_set_nodes(2), {"LWS_LEADER_ADDRESS": "l.s.n"}, "l.s.n"),
        (
            grove_nodes("D", 2),
            {"GROVE_PCSG_NAME": "g", "GROVE_PCSG_INDEX": "0", "GROVE_HEADLESS_SERVICE": "s"},
            "g-0-d-ldr-0.s",
        ),
    ],
)
def test_shell_resolves_the_address(group, variables, host, tmp_path) -> None:
    spec: dict[str, Any] = {}
    add_init_container(spec, {"image": "i", "imagePullPolicy": "Never"}, CONTEXT, group, 29500)
    [container] = spec["initContainers"]
    assert (container["image"], container["imagePullPolicy"]) == ("i", "Never")
    assert spec["volumes"] == [{"name": "wait-leader-script", "configMap": {"name": "g-wait-leader-script"}}]
    container["command"][-1] = container["command"][-1].replace(
        "exec python3", 'show "$LEADER_HOST" $LEADER_PORT; true'
    )
    assert programs(container, tmp_path, variables=variables, names=("show",)) == [["show", host, "29500"]]
