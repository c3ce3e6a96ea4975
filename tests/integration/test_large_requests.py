"""One client's large request does not delay another client's tokens, and is refused by name where it is too large."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

GAP_S = 0.05
WATCHER = Path(__file__).parent / "token_gaps.py"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
MB = 1_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("large"), "--enable-anthropic-api") as cluster:
        cluster.mocker("--max-model-len", "8192")
        yield cluster


class Watcher:
    """Client whose token times are recorded while another client sends large requests."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WATCHER), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def gaps_s(self) -> list[float]:
        """Return the token gaps since the previous call, sorted."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return sorted(json.loads(self._process.stdout.readline()))

    def p99_s(self) -> float:
        """Return the 99th percentile of the token gaps since the previous call."""
        gaps = self.gaps_s()
        assert len(gaps) > 50
        return gaps[int(len(gaps) * 0.99)]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


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
    "many objects": ("/v1/chat/completions", lambda: chat(metadata=[{}] * 1_000_000), "more than 131072 objects and lists"),
    "many items": ("/v1/responses", lambda: json.dumps({"model": "m", "input": [EMPTY] * 300_000}).encode(), "input"),
    "many Anthropic messages": ("/v1/messages", lambda: chat(messages=[EMPTY] * 300_000), "messages"),
    "many counted messages": ("/v1/messages/count_tokens", lambda: json.dumps({"model": "m", "messages": [EMPTY] * 300_000}).encode(), "messages"),
    "many counted items": ("/v1/responses/input_tokens", lambda: json.dumps({"model": "m", "input": [EMPTY] * 300_000}).encode(), "input"),
    "many embeddings": ("/v1/embeddings", lambda: json.dumps({"model": "m", "input": ["a"] * 1_000_000}).encode(), "input"),
}  # fmt: skip


def test_large_request_is_refused_and_does_not_delay_tokens(cluster: Cluster) -> None:
    """The same tokens through a frontend without large requests show the delay of the machine itself."""
    quiet_port = free_port()
    cluster.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(quiet_port))
    wait_until(lambda: has_model(quiet_port), "the second frontend never had the model")
    watcher, quiet = Watcher(cluster.port), Watcher(quiet_port)
    seen: dict[str, tuple[float, float]] = {}
    try:
        cluster.post(chat())
        time.sleep(2.0)
        for name, (path, make, expected) in LARGE.items():
            body = make()
            for one in (watcher, quiet):
                one.gaps_s()  # Tokens that arrived while the body was built are not counted.
            refused = cluster.post(body, path)
            assert refused.status_code == 400, (name, refused.status_code, refused.text[:300])
            assert expected in refused.text, (name, refused.text[:300])
            time.sleep(2.0)
            seen[name] = watcher.p99_s(), quiet.p99_s()
    finally:
        watcher.close()
        quiet.close()
    slow = [name for name, (gap_s, machine_s) in seen.items() if gap_s > GAP_S + machine_s]
    assert not slow, f"{slow}: 99th percentiles with and without large requests: {seen}"


def has_model(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"])
    except httpx.TransportError:
        return False
