"""Prefill and decode workers of the embedded engine behind the released frontend return the same as one worker."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from benchmarks.stacks import HOST, free_port
from tests.cluster.peers import PeerCluster, require_peer

pytestmark = pytest.mark.conformance

CHAT = "/v1/chat/completions"
QUESTION = "What is a KV cache, what is a router, and why do the workers tell what they hold? "
MESSAGES = [{"role": "user", "content": QUESTION * 4}]
FRONTENDS = ("theirs", "ours")
PAIRS = ("parts", "meeting")
"""Prefill and decode in sequence, and at the same time."""
REQUESTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "seeded": {"temperature": 0.9, "seed": 12, "max_tokens": 40},
    "choices": {"temperature": 1.0, "seed": 4, "n": 3, "max_tokens": 12},
    "penalties": {"temperature": 0, "frequency_penalty": 0.6, "max_tokens": 30},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 6},
    "one token": {"temperature": 0, "max_tokens": 1},
    "a stop": {"temperature": 0, "stop": ["cache"], "max_tokens": 40},
}


class CpuPeers(PeerCluster):
    """Both frontends, an aggregated worker that serves `whole`, and a prefill and decode pair that serves `parts`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metrics_ports = {model: free_port() for model in PAIRS}
        cpu = [sys.executable, "-m", "dynamo.cpu", "--threads", "1"]
        self.run([*cpu, "--model-name", "whole", "--endpoint", "dyn://dynamo.whole.generate"])
        self.run([*cpu, "--model-name", "parts", "--disaggregation-mode", "prefill"])
        self.run(
            [*cpu, "--model-name", "parts", "--disaggregation-mode", "decode"],
            DYN_SYSTEM_PORT=str(self.metrics_ports["parts"]),
        )
        small = ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--disaggregation-bootstrap-port", "0"]
        meeting = [*cpu, "--model-name", "meeting", "--disaggregation-mode"]
        self.run([*meeting, "prefill", *small, "--endpoint", "dyn://meeting.prefill.generate"])
        self.run(
            [*meeting, "decode", "--endpoint", "dyn://meeting.backend.generate"],
            DYN_SYSTEM_PORT=str(self.metrics_ports["meeting"]),
        )
        for model in ("whole", *PAIRS):
            self.wait_answered(CHAT, {"model": model, "messages": MESSAGES, "max_tokens": 2})

    def answered(self, name: str, model: str, body: dict[str, Any]) -> Any:
        """Return the part of a response that does not depend on the worker."""
        response = self.request(self.ports[name], "POST", CHAT, {"model": model, "messages": MESSAGES, **body})
        assert response.status == 200, response.body
        answer = response.json
        choices = [
            (one["index"], one["message"]["content"], one["finish_reason"], _rounded(one.get("logprobs")))
            for one in sorted(answer["choices"], key=lambda one: one["index"])
        ]
        return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]

    def fetched(self, model: str) -> float:
        """Return the number of prompt tokens that the decode worker did not compute."""
        text = urlopen(f"http://{HOST}:{self.metrics_ports[model]}/metrics", timeout=30).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("dynamo_component_kv_fetches_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="ok"' in line)


def _rounded(logprobs: Any) -> Any:
    if not logprobs or not logprobs.get("content"):
        return None
    return [(one["token"], round(one["logprob"], 3), len(one["top_logprobs"])) for one in logprobs["content"]]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuPeers]:
    require_peer()
    with CpuPeers(tmp_path_factory.mktemp("cpu-disagg")) as peers:
        yield peers


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", REQUESTED)
@pytest.mark.parametrize("model", PAIRS)
def test_disaggregated_response_equals_that_of_one_worker(
    peers: CpuPeers, frontend: str, kind: str, model: str
) -> None:
    want = peers.answered("ours", "whole", REQUESTED[kind])
    before = peers.fetched(model)
    assert peers.answered(frontend, model, REQUESTED[kind]) == want
    deadline = time.monotonic() + 20
    while peers.fetched(model) == before and REQUESTED[kind]["max_tokens"] > 1:
        assert time.monotonic() < deadline, "the decode worker computed the prompt itself"
        time.sleep(0.05)
