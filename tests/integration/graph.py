"""Graph: one real frontend and the real workers behind it, for tests that start processes."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from benchmarks.ports import free_port
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 60.0  # For anything that takes a second on an idle machine.


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Graph:
    """One frontend and its workers."""

    def __init__(self, folder: Path, *frontend: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.frontend = self.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port), *frontend)

    def run(self, module: str, *argv: str, **variables: str) -> "subprocess.Popen[bytes]":
        loopback = {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}
        with open(self.folder / f"{module}{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"dynamo.{module}", *argv],
                stdout=log, stderr=log, env={**os.environ, **loopback, "DYN_FILE_KV": str(self.folder / "kv"), **variables},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def worker(self, module: str, *argv: str) -> "subprocess.Popen[bytes]":
        before = self.workers()
        process = self.run(module, "--model-name", "m", *argv)
        wait_for(lambda: self.workers() > before, "the worker never appeared")
        return process

    def mocker(self, *argv: str) -> "subprocess.Popen[bytes]":
        return self.worker("mocker", *argv)

    def workers(self) -> int:
        try:
            return len(self.http.get("/health").json()["instances"])
        except httpx.TransportError:
            return 0

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def connect(self, body: bytes) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        return client

    def stop(self) -> None:
        self.http.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_live(graph: Graph) -> bool:
    try:
        return graph.http.get("/live").status_code == 200
    except httpx.TransportError:
        return False
