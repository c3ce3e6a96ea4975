"""LoRA adapters across implementations: the released frontend serves ours, and ours serves a released worker's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer import peer_python
from benchmarks.stacks import free_port
from tests.cluster.peers import PeerCluster, require_peer

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.integration import adapters

from dynamo.cpu.config import DEMO_MODEL

pytestmark = [pytest.mark.conformance, pytest.mark.reference, pytest.mark.filterwarnings("default")]

FRONTENDS = ("theirs", "ours")
TARGETS = ("q_proj", "v_proj", "down_proj")


class LoraPeers(PeerCluster):
    """Both frontends, two workers of ours, and a released one with an adapter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--router-mode", "kv")
        self.systems = [free_port(), free_port()]
        for system in self.systems:
            self.run(
                [sys.executable, "-m", "dynamo.cpu", "--model-name", "m", "--enable-lora", "--threads", "1"],
                DYN_SYSTEM_PORT=str(system),
            )
        script = Path(__file__).with_name("peer_lora_worker.py")
        self.run([peer_python(), str(script), DEMO_MODEL, "released", "released-tuned"])
        for name in self.ports:
            self.wait_until(lambda name=name: {"m", "released"} <= self.models(name), f"{name}: a worker is missing")  # type: ignore[misc]

    def send(self, port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        response = self.request(port, method, path, body)
        return response.status, response.json if response.body else None

    def complete(self, name: str, model: str, prompt: list[int], count: int = 12) -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.send(self.ports[name], "POST", "/v1/completions", body)

    def load(self, number: int, name: str, path: Path) -> dict[str, Any]:
        body = {"lora_name": name, "source": {"uri": f"file://{path}"}}
        found: dict[str, Any] = self.send(self.systems[number], "POST", "/v1/loras", body)[1]
        return found

    def card(self, name: str) -> dict[str, Any]:
        """The discovery record of the model with that name."""
        for path in (self.folder / "discovery").rglob("*"):
            if path.is_file() and (found := _record(path)).get("card_json", {}).get("display_name") == name:
                return found
        return {}


def _record(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraPeers]:
    require_peer()
    with LoraPeers(tmp_path_factory.mktemp("lora")) as peers:
        yield peers


def test_our_adapter_is_a_model_of_both_frontends_and_answers_as_its_merged_weights(peers: LoraPeers) -> None:
    path = adapters.write(peers.folder / "tuned", 1, TARGETS)
    # The other worker does not have it, and gets no request for it.
    assert peers.load(0, "tuned", path)["status"] == "success"
    text = "A worker tells the router which blocks it holds, and the router sends a prompt to who holds its beginning. "
    prompt = adapters.tokenizer().encode(text * 3)
    want = {
        "tuned": adapters.greedily(adapters.merged(1, TARGETS), prompt, 12),
        "m": adapters.greedily(adapters.merged(None), prompt, 12),
    }
    for name in FRONTENDS:
        peers.wait_until(lambda name=name: "tuned" in peers.models(name), f"{name} does not list it")  # type: ignore[misc]
        # The frontend lists an adapter before its router discovers the workers, and returns 503 until then.
        if name == "theirs":
            peers.wait_until(lambda: peers.complete("theirs", "tuned", prompt, 1)[0] == 200, "theirs does not serve it")
        for _ in range(4):
            for model in ("tuned", "m"):
                status, answer = peers.complete(name, model, prompt)
                assert status == 200, (name, model, answer)
                assert answer["choices"][0]["text"] == want[model], f"{name}, {model}"

    def is_cached(name: str) -> bool:
        status, answer = peers.complete(name, "tuned", prompt, 1)
        assert status == 200, answer
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for name in FRONTENDS:
        peers.wait_until(lambda name=name: is_cached(name), f"{name}: its blocks are not found again")  # type: ignore[misc]
    assert peers.send(peers.systems[0], "DELETE", "/v1/loras/tuned")[1]["status"] == "success"
    for name in FRONTENDS:
        peers.wait_until(lambda name=name: "tuned" not in peers.models(name), f"{name} lists it still")  # type: ignore[misc]
        assert peers.complete(name, "tuned", prompt)[0] == 404
        assert peers.complete(name, "m", prompt)[0] == 200


def test_both_frontends_serve_the_adapter_of_a_released_worker(peers: LoraPeers) -> None:
    for name in FRONTENDS:
        peers.wait_until(lambda name=name: "released-tuned" in peers.models(name), f"{name} does not list it")  # type: ignore[misc]
        texts = [
            peers.complete(name, model, [5, 6, 7], 1)[1]["choices"][0]["text"]
            for model in ("released", "released-tuned")
        ]
        assert texts == [adapters.tokenizer().decode([65]), adapters.tokenizer().decode([66])], name


def test_both_implementations_write_the_same_adapter_card_fields(peers: LoraPeers) -> None:
    path = adapters.write(peers.folder / "card", 2, TARGETS)
    assert peers.load(1, "ours-tuned", path)["status"] == "success"
    ours, theirs = peers.card("ours-tuned"), peers.card("released-tuned")
    assert ours["card_json"]["lora"].keys() == theirs["card_json"]["lora"].keys()
    assert ours["card_json"]["lora"]["name"] == "ours-tuned"
    assert theirs["card_json"]["lora"]["name"] == "released-tuned"
    assert ours.keys() == theirs.keys()
