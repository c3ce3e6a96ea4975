"""One client's large request does not delay another client's tokens, and is refused by name where it is too large."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.integration

HELD_S = 0.05  # Processor time for which a large request may hold the event loop, and delay the tokens of others.
WATCHED = Path(__file__).parent / "watched_frontend.py"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
MB = 1_000_000


class WatchedCluster(Cluster):
    """Cluster whose frontend records the computations that hold its event loop."""

    def run(self, module: str, *argv: str, **variables: str) -> "subprocess.Popen[bytes]":
        if module != "frontend":
            return super().run(module, *argv, **variables)
        return self.start("frontend", [sys.executable, str(WATCHED), str(self.folder / "held"), *argv], variables)

    def held_s(self) -> list[float]:
        """Return the processor time of each computation so far."""
        return [float(line) for line in (self.folder / "held").read_text().split()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCluster]:
    with WatchedCluster(tmp_path_factory.mktemp("large"), "--enable-anthropic-api") as cluster:
        cluster.mocker("--max-model-len", "8192")
        yield cluster


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], "max_tokens": 1, **fields}).encode()


def message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


EMPTY = {"role": "user", "content": ""}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * (100 * MB)}}
LARGE: dict[str, tuple[str, Any, str]] = {
    "100,000 messages": ("/v1/chat/completions", lambda: chat(messages=[EMPTY] * 100_000), "messages has 100000 entries; at most 16384"),
    "1,000,000 messages": ("/v1/chat/completions", lambda: chat(messages=[EMPTY] * 1_000_000), "messages has 1000000 entries; at most 16384"),
    "32 long stops": ("/v1/chat/completions", lambda: chat(stop=["x" * MB] * 32), "stop[0] has 1000000 characters; at most 4096"),
    "10,000,000 ids": ("/v1/completions", lambda: json.dumps({"model": "m", "prompt": [5] * (10 * MB)}).encode(), "prompt has 10000000 entries; at most 1048576"),
    "long tool": ("/v1/chat/completions", lambda: chat(tools=[TOOL]), "tools[0].function.description has 100000000 characters; at most 1048576"),
    "long data URL": ("/v1/chat/completions", lambda: chat(messages=message([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (100 * MB)}}])), "at most"),
    "long text": ("/v1/chat/completions", lambda: chat(messages=message("x" * (100 * MB))), "messages has 100000000 characters of text; at most 16777216"),
    "long prompt": ("/v1/completions", lambda: json.dumps({"model": "m", "prompt": "a, " * (5 * MB)}).encode(), "maximum context length"),
    "many objects": ("/v1/chat/completions", lambda: chat(metadata=[{}] * 1_000_000), "more than 65536 objects and lists"),
    "many items": ("/v1/responses", lambda: json.dumps({"model": "m", "input": [EMPTY] * 300_000}).encode(), "input"),
    "many Anthropic messages": ("/v1/messages", lambda: chat(messages=[EMPTY] * 300_000), "messages"),
    "many counted messages": ("/v1/messages/count_tokens", lambda: json.dumps({"model": "m", "messages": [EMPTY] * 300_000}).encode(), "messages"),
    "many counted items": ("/v1/responses/input_tokens", lambda: json.dumps({"model": "m", "input": [EMPTY] * 300_000}).encode(), "input"),
    "many embeddings": ("/v1/embeddings", lambda: json.dumps({"model": "m", "input": ["a"] * 1_000_000}).encode(), "input"),
}  # fmt: skip


def test_large_request_is_refused_and_does_not_delay_tokens(cluster: WatchedCluster) -> None:
    cluster.post(chat())
    held: dict[str, list[float]] = {}
    for name, (path, make, expected) in LARGE.items():
        body, before = make(), len(cluster.held_s())
        refused = cluster.post(body, path)
        assert refused.status_code == 400, (name, refused.status_code, refused.text[:300])
        assert expected in refused.text, (name, refused.text[:300])
        held[name] = cluster.held_s()[before:]
    print({name: max(found, default=0.0) for name, found in held.items()})
    slow = {name: max(found) for name, found in held.items() if found and max(found) > HELD_S}
    assert not slow, f"seconds of the longest computation: {slow}"
