"""One frontend and the workers behind it, as processes that find each other in a directory."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import anthropic
import httpx
import openai
from benchmarks.ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.processes import DEADLINE_S, ProcessGroup
from tests.scripted_engine.script import Script

from dynamo.cpu.config import DEMO_MODEL

ROOT = Path(__file__).parents[2]
MODEL = "m"
SCRIPTED_PARSERS = ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")


class Closeable(Protocol):
    """Client with connections."""

    def close(self) -> None:
        """Close the connections."""


Client = TypeVar("Client", bound=Closeable)


class Cluster(ProcessGroup):
    """A frontend on a loopback port, started at once, and workers that the test adds."""

    def __init__(self, folder: Path, *frontend: str) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._clients: list[Closeable] = []
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)
        self.frontend = self.run("frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port), *frontend)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def run(self, module: str, *argv: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start `python -m dynamo.MODULE`; its log is `MODULE` and the number of processes started before it."""
        name = f"{module}{len(self.processes)}"
        return self.start(name, [sys.executable, "-m", f"dynamo.{module}", *argv], variables)

    def worker(self, module: str, *argv: str) -> "subprocess.Popen[bytes]":
        """Start a worker of the model `m` and return when the frontend lists one more instance."""
        before = self.workers()
        process = self.run(module, "--model-name", MODEL, *argv)
        self.wait_until(lambda: self.workers() > before, "the worker never appeared")
        return process

    def mocker(self, *argv: str) -> "subprocess.Popen[bytes]":
        """Start a mocker of the model `m` and return when the frontend lists one more instance."""
        return self.worker("mocker", *argv)

    def scripted_worker(self, *flags: str) -> "subprocess.Popen[bytes]":
        """Start a worker of the model `m` that answers as `scripted()` in a request demands."""
        before = self.workers()
        argv = ["--model-path", DEMO_MODEL, "--model-name", MODEL, *flags, *SCRIPTED_PARSERS]
        process = self.start("scripted", [sys.executable, "-m", "tests.scripted_engine.engine", *argv], cwd=ROOT)
        self.wait_until(lambda: self.workers() > before, "the scripted worker never appeared")
        return process

    def tensor_worker(self) -> "subprocess.Popen[bytes]":
        """Start the worker of the KServe models `double` and `shout`."""
        before = self.workers()
        process = self.start("tensors", [sys.executable, "-m", "tests.integration.tensor_worker"], cwd=ROOT)
        self.wait_until(lambda: self.workers() > before, "the tensor worker never appeared")
        return process

    def workers(self) -> int:
        """Return the number of instances that the frontend lists; 0 while it does not listen or is not ready."""
        try:
            return len(self.http.get("/health").json().get("instances", ()))  # None while it is not ready.
        except httpx.TransportError:
            return 0

    def is_live(self) -> bool:
        """Return whether the frontend answers its liveness probe."""
        try:
            return self.http.get("/live").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        """Send a request; a body of bytes is sent as it is, any other as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content)

    def openai(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        """Return a client of the frontend that does not retry; it is closed with the cluster."""
        url = f"http://127.0.0.1:{self.port}/v1"
        return self._own(openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=DEADLINE_S, **options))

    def anthropic(self, api_key: str = "none", **options: Any) -> anthropic.Anthropic:
        """Return a client of the frontend that does not retry; it is closed with the cluster."""
        url = f"http://127.0.0.1:{self.port}"
        client = anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0, timeout=DEADLINE_S, **options)
        return self._own(client)

    def _own(self, client: Client) -> Client:
        """Close a client with the cluster. The garbage collector may find its sockets before the client, and warn of them."""
        self._clients.append(client)
        return client

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the frontend's series of that name that carry these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def connect(self, body: bytes) -> socket.socket:
        """Open a connection to the frontend and send a chat request on it; it is closed with the cluster at the latest."""
        client = self._own(socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        return client

    def stop(self) -> None:
        """Close the clients and end every process."""
        self.http.close()
        for client in self._clients:
            client.close()
        super().stop()


def scripted(text: str, **how: Any) -> dict[str, Any]:
    """Return the request fields that make a scripted worker answer with this text."""
    return {"nvext": {"annotations": [Script([text], **how).annotation()]}}
