"""Prefill and decode workers of the embedded engine behind the released frontend: what one worker says alone."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, free_port, stack_environment

pytestmark = pytest.mark.conformance

READY_S = 90.0
QUESTION = "What is a KV cache, what is a router, and why do the workers tell what they hold? "
HOUSES = ("theirs", "ours")
PAIRS = ("parts", "meeting")
"""Prefill and decode one after the other, and at once."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "seeded": {"temperature": 0.9, "seed": 12, "max_tokens": 40},
    "choices": {"temperature": 1.0, "seed": 4, "n": 3, "max_tokens": 12},
    "penalties": {"temperature": 0, "frequency_penalty": 0.6, "max_tokens": 30},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 6},
    "one token": {"temperature": 0, "max_tokens": 1},
    "a stop": {"temperature": 0, "stop": ["cache"], "max_tokens": 40},
}


class Stand:
    """Both frontends, a worker that serves `whole` alone, and a pair that serves `parts`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "discovery").mkdir()
        self.ports = {house: free_port() for house in HOUSES}
        self.metrics_ports = {model: free_port() for model in PAIRS}
        self.processes: list[subprocess.Popen[bytes]] = []
        for house, port in self.ports.items():
            python = sys.executable if house == "ours" else peer_python()
            self.start([python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)])
        cpu = [sys.executable, "-m", "dynamo.cpu", "--threads", "1"]
        self.start([*cpu, "--model-name", "whole", "--endpoint", "dyn://dynamo.whole.generate"])
        self.start([*cpu, "--model-name", "parts", "--disaggregation-mode", "prefill"])
        self.start(
            [*cpu, "--model-name", "parts", "--disaggregation-mode", "decode"],
            DYN_SYSTEM_PORT=str(self.metrics_ports["parts"]),
        )
        small = ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--disaggregation-bootstrap-port", "0"]
        meeting = [*cpu, "--model-name", "meeting", "--disaggregation-mode"]
        self.start([*meeting, "prefill", *small, "--endpoint", "dyn://meeting.prefill.generate"])
        self.start(
            [*meeting, "decode", "--endpoint", "dyn://meeting.backend.generate"],
            DYN_SYSTEM_PORT=str(self.metrics_ports["meeting"]),
        )

    def start(self, command: list[str], **variables: str) -> None:
        env = stack_environment(str(self.home), dict(os.environ)) | variables
        with open(self.home / f"{len(self.processes)}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def wait(self, house: str, model: str) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                status, answer = self.ask(house, model, {"max_tokens": 2})
            except (OSError, ValueError, http.client.HTTPException) as error:
                status, answer = 0, error
            if status == 200:
                return
            assert time.monotonic() < deadline, f"{house} did not serve {model} in {READY_S:g} s: {answer}"
            time.sleep(0.2)

    def ask(self, house: str, model: str, body: dict[str, Any]) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection(HOST, self.ports[house], timeout=60)) as connection:
            data = {"model": model, "messages": [{"role": "user", "content": QUESTION * 4}], **body}
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(data).encode(), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def said(self, house: str, model: str, body: dict[str, Any]) -> Any:
        """What is the same whoever answers."""
        status, answer = self.ask(house, model, body)
        assert status == 200, answer
        choices = [
            (one["index"], one["message"]["content"], one["finish_reason"], _rounded(one.get("logprobs")))
            for one in sorted(answer["choices"], key=lambda one: one["index"])
        ]
        return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]

    def fetched(self, model: str) -> float:
        """Prompts that the model's decode worker did not compute."""
        text = urlopen(f"http://{HOST}:{self.metrics_ports[model]}/metrics", timeout=30).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("dynamo_component_kv_fetches_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="ok"' in line)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _rounded(logprobs: Any) -> Any:
    if not logprobs or not logprobs.get("content"):
        return None
    return [(one["token"], round(one["logprob"], 3), len(one["top_logprobs"])) for one in logprobs["content"]]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    stand = Stand(tmp_path_factory.mktemp("cpu-disagg"))
    try:
        for house in HOUSES:
            for model in ("whole", *PAIRS):
                stand.wait(house, model)
        yield stand
    finally:
        stand.stop()


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("model", PAIRS)
def test_two_workers_say_what_one_says(stand: Stand, house: str, kind: str, model: str) -> None:
    want = stand.said("ours", "whole", ASKED[kind])
    before = stand.fetched(model)
    assert stand.said(house, model, ASKED[kind]) == want
    deadline = time.monotonic() + 20
    while stand.fetched(model) == before and ASKED[kind]["max_tokens"] > 1:
        assert time.monotonic() < deadline, "the decode worker computed the prompt itself"
        time.sleep(0.05)
