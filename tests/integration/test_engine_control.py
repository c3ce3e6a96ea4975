"""Controls of a running worker: it sleeps and wakes, writes a profile, and takes new weights, and nobody else notices."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.integration.graph import DEADLINE_S, Graph, free_port, is_live, wait_for
from tests.unit.cpu.conftest import random_tensors

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

LARGE = {"hidden_size": 256, "intermediate_size": 3072, "num_hidden_layers": 8}
"""A model whose weights are seen among everything else that a process holds: about 90 MB."""
WEIGHTS_MB = 70


class Stand(Graph):
    """Two workers of one model, the first of which is told what to do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--migration-limit", "3")
        self.model = make_model(folder / "model", LARGE)
        self.processes_of: list[int] = []
        self.systems: list[httpx.Client] = []
        for _ in range(2):
            port = free_port()
            process = self.run(
                "cpu", "--model-name", "m", "--model-path", str(self.model), "--enable-rl", "--threads", "1",
                "--profile-dir", str(folder / "profiles"), DYN_SYSTEM_PORT=str(port),
            )  # fmt: skip
            self.processes_of.append(process.pid)
            self.systems.append(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S))
        wait_for(lambda: is_live(self) and self.workers() == 2, "a worker is missing")

    def stop(self) -> None:
        for system in self.systems:
            system.close()
        super().stop()

    def press(self, name: str, number: int = 0, **body: Any) -> dict[str, Any]:
        answer = self.systems[number].post(f"/engine/{name}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ask(self, seed: int = 0, count: int = 12) -> str:
        prompt = [3 + (seed * 7 + at) % 500 for at in range(40)]
        body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = self.post(body, "/v1/completions")
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    def memory_mb(self, number: int = 0) -> float:
        """What the process holds in memory."""
        lines = Path(f"/proc/{self.processes_of[number]}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def make_model(path: Path, changes: dict[str, Any]) -> Path:
    """The demo model's files around random weights."""
    shutil.copytree(DEMO_MODEL, path)
    config = json.loads((path / "config.json").read_text()) | changes | {"torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    found = Stand(tmp_path_factory.mktemp("control"))
    try:
        yield found
    finally:
        found.stop()


def test_a_sleeper_gives_its_memory_back_and_others_answer_meanwhile(stand: Stand) -> None:
    want = [stand.ask(seed) for seed in range(8)]
    awake = stand.memory_mb()
    assert stand.press("control/sleep", level=1) == {"status": "ok", "message": "Engine slept (level=1)"}
    wait_for(lambda: stand.memory_mb() < awake - WEIGHTS_MB, "the memory was not given back")
    wait_for(lambda: stand.workers() == 1, "the sleeper is still found")
    assert [stand.ask(seed) for seed in range(8)] == want
    assert stand.press("control/wake_up", tags=["weights"])["message"] == "Engine partly awake"
    assert stand.workers() == 1
    assert stand.press("control/wake_up")["message"] == "Engine woke"
    wait_for(lambda: stand.workers() == 2, "the one that woke is not found")
    assert stand.press("control/sleep", 1)["status"] == "ok"
    wait_for(lambda: stand.workers() == 1, "the other one is still found")
    assert [stand.ask(seed) for seed in range(8)] == want
    assert stand.press("control/wake_up", 1)["status"] == "ok"
    wait_for(lambda: stand.workers() == 2, "the other one is not found")


def test_a_sleeper_that_is_put_into_service_sends_its_requests_on(stand: Stand) -> None:
    want = stand.ask(1)
    stand.press("control/sleep")
    assert stand.press("resume")["state"] == "serving"
    wait_for(lambda: stand.workers() == 2, "it is not found")
    assert {stand.ask(1) for _ in range(6)} == {want}
    stand.press("control/wake_up")


def test_a_profile_is_a_trace_of_the_steps(stand: Stand) -> None:
    for number in range(2):
        assert stand.press("control/start_profile", number, profile_prefix="mine")["status"] == "ok"
    assert stand.press("control/start_profile")["status"] == "error"
    for seed in range(4):
        stand.ask(100 + seed, 10)
    steps: list[dict[str, Any]] = []
    for number in range(2):
        told = stand.press("control/stop_profile", number)
        path = Path(told["path"])
        assert path.parent == stand.folder / "profiles"
        assert path.name.startswith("mine")
        events = json.loads(path.read_text())["traceEvents"]
        steps += [event for event in events if event["name"] == "step"]
    assert sum(step["args"]["prefill_tokens"] for step in steps) == 4 * 40
    assert sum(step["args"]["decode_requests"] for step in steps) == 4 * 9
    assert all(step["dur"] > 0 for step in steps)
    assert stand.press("control/stop_profile")["status"] == "error"


def test_new_weights_come_between_requests_and_none_is_lost(stand: Stand, tmp_path: Path) -> None:
    before = stand.ask(5)
    changed = tmp_path / "changed"
    shutil.copytree(stand.model, changed)
    tensors = load_file(changed / "model.safetensors")
    rng = np.random.default_rng(1)
    name = "model.layers.3.mlp.down_proj.weight"
    tensors[name] = (tensors[name] + rng.standard_normal(tensors[name].shape)).astype(np.float32)
    save_file(tensors, changed / "model.safetensors")
    for number in range(2):
        told = stand.press("update_weights_from_disk", number, model_path=str(changed), weight_version="2")
        assert told == {"status": "ok", "message": "Weights updated", "model_path": str(changed)}
        assert stand.press("get_weight_version", number)["version"] == "2"
        assert stand.ask(5), "somebody answers all the time"
    wait_for(lambda: stand.workers() == 2, "a worker did not come back")
    after = {stand.ask(5) for _ in range(4)}
    assert len(after) == 1
    assert after != {before}, "the cache of the old weights is forgotten"
    shutil.rmtree(changed)
    assert stand.press("update_weights_from_disk", model_path=str(changed))["status"] == "error"
    assert stand.press("update_weights_from_disk", model_path=str(DEMO_MODEL))["status"] == "error"
    assert {stand.ask(5) for _ in range(4)} == after
    for number in range(2):
        stand.press("update_weights_from_disk", number, model_path=str(stand.model))
    wait_for(lambda: stand.workers() == 2, "a worker did not come back")
    assert stand.ask(5) == before


def test_what_this_engine_cannot_do_is_no_route(stand: Stand) -> None:
    for name in ("control/scale_elastic_ep", "pause_generation", "init_weights_update_group"):
        assert stand.systems[0].post(f"/engine/{name}", json={}).status_code == 404
    assert stand.press("liveness_probe") == {"status": "ok", "alive": True}
    assert stand.press("flush_cache")["status"] == "ok"
