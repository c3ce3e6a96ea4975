"""KV tiers and the released router: one that joins late is told what our worker has below its cache."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, free_port, stack_environment

pytestmark = pytest.mark.conformance

READY_S = 120.0
PROMPTS = [" ".join(f"{at} follows {at * 97 + word * 13}" for word in range(14)) for at in range(8)]
CACHE_BLOCKS = 64


class Stand:
    """A worker with a small cache and a large host tier, and frontends of either house."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **variables: str) -> None:
        env = stack_environment(str(self.home), dict(os.environ)) | variables
        with open(self.home / f"{len(self.processes)}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def frontend(self, python: str) -> int:
        port = free_port()
        self.start(
            [python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port), "--router-mode", "kv"]
        )
        return port

    def ask(self, port: int, prompt: str) -> dict[str, Any]:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "temperature": 0,
            "nvext": {"extra_fields": ["timing", "worker_id"]},
        }
        request = Request(f"http://{HOST}:{port}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def wait(self, port: int, prompt: str) -> dict[str, Any]:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                return self.ask(port, prompt)
            except (URLError, OSError, ValueError):
                assert time.monotonic() < deadline, "a frontend did not serve"
                time.sleep(0.2)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    (tmp_path / "discovery").mkdir()
    stand = Stand(tmp_path)
    try:
        yield stand
    finally:
        stand.stop()


def test_a_released_router_that_joins_late_counts_what_is_in_the_host(stand: Stand) -> None:
    worker = ["-m", "dynamo.cpu", "--model-name", "m", "--threads", "1", "--kv-cache-blocks", str(CACHE_BLOCKS)]
    stand.start(
        [sys.executable, *worker],
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="512",
    )
    ours = stand.frontend(sys.executable)
    for prompt in PROMPTS:
        stand.wait(ours, prompt)
    theirs = stand.frontend(peer_python())
    stand.wait(theirs, "Nothing that anybody asked before.")
    rate = 0.0
    for prompt in PROMPTS[:3]:  # The first ones have left the cache; one of them may be asked before all is told.
        rate = stand.ask(theirs, prompt)["nvext"]["timing"]["kv_hit_rate"]
        if rate > 0.5:
            return
        time.sleep(2)
    pytest.fail(f"the released router knows of nothing in the host: hit rate {rate}")
