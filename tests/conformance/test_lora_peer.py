"""LoRA adapters across houses: the released frontend serves ours, and ours serves a released worker's."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, free_port, stack_environment

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.integration import adapters

from dynamo.cpu.config import DEMO_MODEL

pytestmark = [pytest.mark.conformance, pytest.mark.reference, pytest.mark.filterwarnings("default")]

READY_S = 60.0
HOUSES = ("theirs", "ours")
TARGETS = ("q_proj", "v_proj", "down_proj")


class Stand:
    """Both frontends, two workers of ours, and a released one with an adapter."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "discovery").mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ports = {house: free_port() for house in HOUSES}
        self.systems = [free_port(), free_port()]
        for house, port in self.ports.items():
            python = sys.executable if house == "ours" else peer_python()
            flags = ["--http-host", HOST, "--http-port", str(port), "--router-mode", "kv"]
            self.start([python, "-m", "dynamo.frontend", *flags])
        for system in self.systems:
            self.start(
                [sys.executable, "-m", "dynamo.cpu", "--model-name", "m", "--enable-lora", "--threads", "1"],
                DYN_SYSTEM_PORT=str(system),
            )
        script = Path(__file__).with_name("peer_lora_worker.py")
        self.start([peer_python(), str(script), DEMO_MODEL, "released", "released-tuned"])

    def start(self, command: list[str], **variables: str) -> None:
        env = stack_environment(str(self.home), dict(os.environ)) | variables
        with open(self.home / f"{len(self.processes)}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def ask(self, port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")

    def models(self, house: str) -> set[str]:
        try:
            status, answer = self.ask(self.ports[house], "GET", "/v1/models")
        except (OSError, http.client.HTTPException, ValueError):
            return set()
        return {one["id"] for one in answer["data"]} if status == 200 else set()

    def complete(self, house: str, model: str, prompt: list[int], count: int = 12) -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.ask(self.ports[house], "POST", "/v1/completions", body)

    def load(self, number: int, name: str, path: Path) -> dict[str, Any]:
        body = {"lora_name": name, "source": {"uri": f"file://{path}"}}
        found: dict[str, Any] = self.ask(self.systems[number], "POST", "/v1/loras", body)[1]
        return found

    def card(self, name: str) -> dict[str, Any]:
        """What stands in discovery of a model of that name."""
        for path in (self.home / "discovery").rglob("*"):
            if path.is_file() and (found := _record(path)).get("card_json", {}).get("display_name") == name:
                return found
        return {}

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _record(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    stand = Stand(tmp_path_factory.mktemp("lora"))
    try:
        for house in HOUSES:
            wait_for(lambda house=house: {"m", "released"} <= stand.models(house), f"{house}: a worker is missing")  # type: ignore[misc]
        yield stand
    finally:
        stand.stop()


def test_our_adapter_is_a_model_of_both_frontends_and_answers_as_its_merged_weights(stand: Stand) -> None:
    path = adapters.write(stand.home / "tuned", 1, TARGETS)
    assert stand.load(0, "tuned", path)["status"] == "success"  # The other worker has it not, and is not asked for it.
    text = "A worker tells the router which blocks it holds, and the router sends a prompt to who holds its beginning. "
    prompt = adapters.tokenizer().encode(text * 3)
    want = {
        "tuned": adapters.greedily(adapters.merged(1, TARGETS), prompt, 12),
        "m": adapters.greedily(adapters.merged(None), prompt, 12),
    }
    for house in HOUSES:
        wait_for(lambda house=house: "tuned" in stand.models(house), f"{house} does not list it")  # type: ignore[misc]
        if house == "theirs":  # It lists an adapter before its router knows the workers, and says 503 until then.
            wait_for(lambda: stand.complete("theirs", "tuned", prompt, 1)[0] == 200, "theirs does not serve it")
        for _ in range(4):
            for model in ("tuned", "m"):
                status, answer = stand.complete(house, model, prompt)
                assert status == 200, (house, model, answer)
                assert answer["choices"][0]["text"] == want[model], f"{house}, {model}"

    def is_cached(house: str) -> bool:
        status, answer = stand.complete(house, "tuned", prompt, 1)
        assert status == 200, answer
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for house in HOUSES:
        wait_for(lambda house=house: is_cached(house), f"{house}: its blocks are not found again")  # type: ignore[misc]
    assert stand.ask(stand.systems[0], "DELETE", "/v1/loras/tuned")[1]["status"] == "success"
    for house in HOUSES:
        wait_for(lambda house=house: "tuned" not in stand.models(house), f"{house} lists it still")  # type: ignore[misc]
        assert stand.complete(house, "tuned", prompt)[0] == 404
        assert stand.complete(house, "m", prompt)[0] == 200


def test_a_released_workers_adapter_is_served_by_both(stand: Stand) -> None:
    for house in HOUSES:
        wait_for(lambda house=house: "released-tuned" in stand.models(house), f"{house} does not list it")  # type: ignore[misc]
        texts = [
            stand.complete(house, model, [5, 6, 7], 1)[1]["choices"][0]["text"]
            for model in ("released", "released-tuned")
        ]
        assert texts == [adapters.tokenizer().decode([65]), adapters.tokenizer().decode([66])], house


def test_cards_of_adapters_say_the_same_in_both_houses(stand: Stand) -> None:
    path = adapters.write(stand.home / "card", 2, TARGETS)
    assert stand.load(1, "ours-tuned", path)["status"] == "success"
    ours, theirs = stand.card("ours-tuned"), stand.card("released-tuned")
    assert ours["card_json"]["lora"].keys() == theirs["card_json"]["lora"].keys()
    assert ours["card_json"]["lora"]["name"] == "ours-tuned"
    assert theirs["card_json"]["lora"]["name"] == "released-tuned"
    assert ours.keys() == theirs.keys()
