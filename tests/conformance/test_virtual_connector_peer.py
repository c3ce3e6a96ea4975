"""Virtual connector in etcd: both implementations write the same keys at each step, and each reads the other's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stacks import stack_environment
from tests.cluster.etcd import EtcdCluster
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[1] / "src")
STEPS = [
    "init", "get", "wait",
    "decide - 2", "get", "wait",
    "decide - 3", "complete", "wait",
    "decide - 2", "decide 1 2", "complete",
    "decide 3 -", "decide - -", "complete", "get",
]  # fmt: skip


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    require_peer()
    (tmp_path / "etcd").mkdir()
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster.wait()


class Process:
    """The driven coordinator of one implementation."""

    def __init__(self, folder: Path, etcd: EtcdCluster, python: str, namespace: str) -> None:
        variables = stack_environment(str(folder), dict(os.environ))
        variables |= {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.endpoints, "DYN_LOG": "error"}
        if python == sys.executable:
            variables["PYTHONPATH"] = SOURCE
        self.process = subprocess.Popen(
            [python, str(HERE / "peer_virtual_connector.py"), namespace],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def do(self, step: str) -> Any:
        """Return the state after a step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(step + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("state "):
                return json.loads(line.removeprefix("state "))
        raise AssertionError("the process ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()  # It closes the pipes.


@pytest.fixture
def pair(tmp_path: Path, etcd: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[tuple[Process, Process]]:
    """Yield the released process and ours, in namespaces of their own or in one."""
    names = getattr(request, "param", ("theirs", "ours"))
    made = tuple(
        Process(tmp_path, etcd, python, name)
        for python, name in zip((require_peer(), sys.executable), names, strict=True)
    )
    try:
        yield made[0], made[1]
    finally:
        for one in made:
            one.close()


def keys(etcd: EtcdCluster, namespace: str) -> dict[str, str]:
    words = etcd.control("get", "--prefix", f"v1/{namespace}/planner/").split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_both_connectors_write_the_same_state_and_keys(etcd: EtcdCluster, pair: tuple[Process, Process]) -> None:
    theirs, ours = pair
    for number, step in enumerate(STEPS):
        assert ours.do(step) == theirs.do(step), f"step {number}: {step}"
        found = {
            name: {key.rpartition("/")[2]: value for key, value in keys(etcd, name).items()}
            for name in ("theirs", "ours")
        }
        assert found["ours"] == found["theirs"], f"step {number}: {step}"


@pytest.mark.parametrize("pair", [("one", "one")], indirect=True)
@pytest.mark.parametrize("is_ours_planner", [True, False])
def test_decisions_of_each_connector_are_executed_by_the_other(
    pair: tuple[Process, Process], is_ours_planner: bool
) -> None:
    theirs, ours = pair
    planner, environment = (ours, theirs) if is_ours_planner else (theirs, ours)
    planner.do("init")
    assert planner.do("decide - 2")[1] is False
    assert environment.do("get")[2] == [-1, 2, 0]
    environment.do("complete")
    planner.do("settle")
    assert planner.do("decide 4 -") == [[4, 2, 1], False, None]
    assert environment.do("wait")[2] == "decision"
    environment.do("complete")
    assert planner.do("settle")[:2] == [[4, 2, 1], True]
