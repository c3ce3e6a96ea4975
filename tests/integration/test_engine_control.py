"""Controls of a running worker: sleep, wake, profile, and weight updates."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.cluster.worker import WorkerProcess
from tests.unit.cpu.conftest import random_tensors

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

LARGE = {"hidden_size": 256, "intermediate_size": 3072, "num_hidden_layers": 8}
"""Model whose weights, about 90 MB, are visible in the memory of a process."""
WEIGHTS_MB = 70
MIGRATIONS = "dynamo_frontend_model_migration_total"


class ControlledCluster(Cluster):
    """Two workers of one model, the first of which receives the controls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--migration-limit", "3")
        self.model = make_model(folder / "model", LARGE)
        flags = ("--model-path", str(self.model), "--enable-rl", "--threads", "1")
        profiles = ("--profile-dir", str(folder / "profiles"))
        self.controlled = [WorkerProcess(self, *flags, *profiles, module="cpu") for _ in range(2)]

    def press(self, name: str, number: int = 0, **body: Any) -> dict[str, Any]:
        answer = self.controlled[number].request("POST", f"/engine/{name}", body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def send_request(self, seed: int = 0, count: int = 12) -> str:
        prompt = [3 + (seed * 7 + at) % 500 for at in range(40)]
        body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = self.post(body, "/v1/completions")
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    def memory_mb(self, number: int = 0) -> float:
        """Return the resident memory of the process."""
        lines = Path(f"/proc/{self.controlled[number].process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def make_model(path: Path, changes: dict[str, Any]) -> Path:
    """Write the demo model's files with random weights."""
    shutil.copytree(DEMO_MODEL, path)
    config = json.loads((path / "config.json").read_text()) | changes | {"torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledCluster]:
    with ControlledCluster(tmp_path_factory.mktemp("control")) as found:
        yield found


def test_sleeping_worker_frees_its_memory_and_others_serve(cluster: ControlledCluster) -> None:
    want = [cluster.send_request(seed) for seed in range(8)]
    awake = cluster.memory_mb()
    assert cluster.press("control/sleep", level=1) == {"status": "ok", "message": "Engine slept (level=1)"}
    wait_until(lambda: cluster.memory_mb() < awake - WEIGHTS_MB, "the memory was not given back")
    wait_until(lambda: cluster.workers() == 1, "the sleeper is still found")
    assert [cluster.send_request(seed) for seed in range(8)] == want
    assert cluster.press("control/wake_up", tags=["weights"])["message"] == "Engine partly awake"
    assert cluster.workers() == 1
    assert cluster.press("control/wake_up")["message"] == "Engine woke"
    wait_until(lambda: cluster.workers() == 2, "the one that woke is not found")
    assert cluster.press("control/sleep", 1)["status"] == "ok"
    wait_until(lambda: cluster.workers() == 1, "the other one is still found")
    assert [cluster.send_request(seed) for seed in range(8)] == want
    assert cluster.press("control/wake_up", 1)["status"] == "ok"
    wait_until(lambda: cluster.workers() == 2, "the other one is not found")


def test_requests_reach_other_workers_while_a_woken_worker_is_loading(cluster: ControlledCluster) -> None:
    want = cluster.send_request(1)
    cluster.press("control/sleep")
    assert cluster.press("resume")["state"] == "serving"
    wait_until(lambda: cluster.workers() == 2, "it is not found")
    assert {cluster.send_request(1) for _ in range(6)} == {want}
    cluster.press("control/wake_up")


def test_profile_is_a_trace_of_the_steps(cluster: ControlledCluster) -> None:
    for number in range(2):
        assert cluster.press("control/start_profile", number, profile_prefix="mine")["status"] == "ok"
    assert cluster.press("control/start_profile")["status"] == "error"
    before = cluster.metric(MIGRATIONS)
    for seed in range(4):
        cluster.send_request(100 + seed, 10)
    has_moved = cluster.metric(MIGRATIONS) > before
    steps: list[dict[str, Any]] = []
    for number in range(2):
        reported = cluster.press("control/stop_profile", number)
        path = Path(reported["path"])
        assert path.parent == cluster.folder / "profiles"
        assert path.name.startswith("mine")
        events = json.loads(path.read_text())["traceEvents"]
        steps += [event for event in events if event["name"] == "step"]
    prefilled = sum(step["args"]["prefill_tokens"] for step in steps)
    decoded = sum(step["args"]["decode_requests"] for step in steps)
    if (
        has_moved
    ):  # A worker that the machine suspended lost its request to the other one, which computed the prompt again.
        assert prefilled > 4 * 40 and decoded >= 4 * 9 - 1
    else:
        assert (prefilled, decoded) == (4 * 40, 4 * 9)
    assert all(step["dur"] > 0 for step in steps)
    assert cluster.press("control/stop_profile")["status"] == "error"


def test_weight_update_between_requests_loses_none(cluster: ControlledCluster, tmp_path: Path) -> None:
    before = cluster.send_request(5)
    changed = tmp_path / "changed"
    shutil.copytree(cluster.model, changed)
    tensors = load_file(changed / "model.safetensors")
    rng = np.random.default_rng(1)
    name = "model.layers.3.mlp.down_proj.weight"
    tensors[name] = (tensors[name] + rng.standard_normal(tensors[name].shape)).astype(np.float32)
    save_file(tensors, changed / "model.safetensors")
    for number in range(2):
        reported = cluster.press("update_weights_from_disk", number, model_path=str(changed), weight_version="2")
        assert reported == {"status": "ok", "message": "Weights updated", "model_path": str(changed)}
        assert cluster.press("get_weight_version", number)["version"] == "2"
        assert cluster.send_request(5), "somebody answers all the time"
    wait_until(lambda: cluster.workers() == 2, "a worker did not come back")
    after = {cluster.send_request(5) for _ in range(4)}
    assert len(after) == 1
    assert after != {before}, "the cache of the old weights is forgotten"
    shutil.rmtree(changed)
    assert cluster.press("update_weights_from_disk", model_path=str(changed))["status"] == "error"
    assert cluster.press("update_weights_from_disk", model_path=str(DEMO_MODEL))["status"] == "error"
    assert {cluster.send_request(5) for _ in range(4)} == after
    for number in range(2):
        cluster.press("update_weights_from_disk", number, model_path=str(cluster.model))
    wait_until(lambda: cluster.workers() == 2, "a worker did not come back")
    assert cluster.send_request(5) == before


def test_unsupported_controls_have_no_route(cluster: ControlledCluster) -> None:
    for name in ("control/scale_elastic_ep", "pause_generation", "init_weights_update_group"):
        assert cluster.controlled[0].request("POST", f"/engine/{name}", {}).status_code == 404
    assert cluster.press("liveness_probe") == {"status": "ok", "alive": True}
    assert cluster.press("flush_cache")["status"] == "ok"
