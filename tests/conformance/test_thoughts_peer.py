"""Reasoning and content of a text, as our frontend, our parsers and released 1.6.1 read them.

The model behind both frontends returns the contents of a file: its prompt does not mention reasoning.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from tests.cluster.peers import PeerCluster, require_peer
from tests.unit.parsers.reading import read

from dynamo.parsers.registry import reasoning_family

pytestmark = pytest.mark.conformance

THINKS = ["<think>two and two</think>\n\nFour.", "two and two</think>\n\nFour.", "no thoughts", "a < b <thin> c"]
OUTSIDE = [THINKS[0], "no thoughts", "a < b <thin> c", "<think>a</think>b<think>c</think>d", "<think>never closed"]
TEXTS = {
    **dict.fromkeys(("basic", "qwen3", "qwen3_coder", "glm45", "glm47", "nemotron_deci"), OUTSIDE),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41", "kimi_k2"), OUTSIDE),
    **dict.fromkeys(("deepseek_r1", "deepseek_v3_2", "nemotron3", "nemotron_v3", "nemotron_nano", "step3"), THINKS),
    "kimi": ["◁think▷a◁/think▷b", "b", "◁think▷a"],
    "kimi_k25": [*THINKS, "a<|tool_calls_section_begin|>x"],
    "minimax_m2": [*THINKS, 'a<invoke name="f">'],
    "minimax_m3": ["<mm:think>a</mm:think>b"],
    "minimax_append_think": ["a</think>b", "b"],
    "granite": ["Here is my thought process: a Here's my response: b", "b"],
    "inkling": ["<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>"],
    "kimi_k3": [
        "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>",
        "b",
    ],
    "muse": [
        " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>",
        " to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>c<|eom|>",
        "b",
    ],
}
REQUESTED = {
    "gemma4": ["<|channel>thought\na<channel|>b", "b"],
    "deepseek_v3": OUTSIDE[:1],
    "deepseek_v3_1": OUTSIDE[:1],
}
"""Texts that 1.6.1 parses only where reasoning is enabled."""


class ReasoningPeers(PeerCluster):
    """Both frontends with a released worker that returns the text of a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--router-mode", "round-robin")
        self._text, names = folder / "text.txt", [*TEXTS, *REQUESTED]
        worker = str(Path(__file__).parent / "peer_thoughts_worker.py")
        self.run([peer_python(), worker, bench_model(), str(self._text), *names])
        self.wait_listed(set(names))

    def chat(self, name: str, model: str, text: str, *, stream: bool) -> tuple[str, str]:
        """Return reasoning and content of a response with this text."""
        self._text.write_text(text, encoding="utf-8")
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Say it."}],
            "max_tokens": 400,
            "skip_special_tokens": False,
            "stream": stream,
            "chat_template_kwargs": {"thinking": True, "enable_thinking": True},
        }
        response = self.request(self.ports[name], "POST", "/v1/chat/completions", body)
        answer = response.body.decode()
        assert response.status == 200, answer
        if not stream:
            parts = [json.loads(answer)["choices"][0]["message"]]
        else:
            events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
            parts = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        return tuple("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReasoningPeers]:
    require_peer()
    with ReasoningPeers(tmp_path_factory.mktemp("thoughts")) as peers:
        yield peers


@pytest.mark.parametrize("name", [*TEXTS, *REQUESTED])
def test_both_frontends_parse_the_same_reasoning(peers: ReasoningPeers, name: str) -> None:
    for text in [*TEXTS.get(name, ()), *REQUESTED.get(name, ())]:
        family = reasoning_family(name)
        found = read(family.make(family.starts_inside), [text])
        expected = peers.chat("theirs", name, text, stream=True)
        assert (found.reasoning, found.content) == expected, text
        for stream in (True, False):
            assert peers.chat("ours", name, text, stream=stream) == expected, (text, stream)
