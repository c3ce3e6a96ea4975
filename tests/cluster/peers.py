"""Frontends of this tree and of the released system over one discovery directory, and the workers behind them."""

import http.client
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.ports import free_port
from benchmarks.stacks import HOST, stack_environment
from tests.cluster.processes import ProcessGroup

READY_S = 120.0
ANSWER_S = 60.0
OURS, THEIRS = "ours", "theirs"
JSON_BODY = {"content-type": "application/json"}


def require_peer() -> str:
    """Return the interpreter of the released system; skip the test where it is not installed."""
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    return peer_python()


class HttpResponse(NamedTuple):
    """Status, content type and body of a response."""

    status: int
    content_type: str
    body: bytes

    @property
    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


class RecordedRequests:
    """The file to which a recording worker appends each request as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def count(self) -> int:
        """Return the number of requests so far."""
        return len(self.path.read_text(encoding="utf-8").splitlines())

    def since(self, count: int) -> list[dict[str, Any]]:
        """Return the requests after the first `count`."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()[count:]]


class PeerCluster(ProcessGroup):
    """Frontends by name (`ours`, `theirs`), started at once with the same flags; workers are added with `start`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        frontends: Sequence[str] = (OURS, THEIRS),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        (folder / "discovery").mkdir()
        self.variables = dict(variables or {})
        self.ports = {name: self.start_frontend(name, *flags) for name in frontends}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """Return the caller's environment with planes and discovery of this cluster only."""
        return stack_environment(str(self.folder), dict(os.environ)) | self.variables

    def start_frontend(self, name: str, *flags: str) -> int:
        """Start a frontend of this tree (`ours`) or of the released system and return its port."""
        port = free_port()
        python = sys.executable if name == OURS else peer_python()
        listen = ["--http-host", HOST, "--http-port", str(port)]
        self.run([python, "-m", "dynamo.frontend", *listen, *flags])
        return port

    def run(self, command: list[str], **variables: str) -> None:
        """Start a process; its log is named by its number and its working directory is the cluster's folder."""
        self.start(str(len(self.processes)), command, variables, cwd=self.folder)

    def request(
        self, port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a request with a JSON body on a connection of its own."""
        with closing(http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {**JSON_BODY, **(headers or {})})
            response = connection.getresponse()
            return HttpResponse(response.status, response.getheader("content-type") or "", response.read())

    def models(self, name: str) -> set[str]:
        """Return the models that a frontend lists; none while it does not answer."""
        try:
            response = self.request(self.ports[name], "GET", "/v1/models")
            return {one["id"] for one in response.json["data"]} if response.status == 200 else set()
        except (OSError, http.client.HTTPException, ValueError):
            return set()

    def wait_listed(self, models: set[str]) -> Self:
        """Return when every frontend lists these models and no others."""
        for name in self.ports:
            self.wait_until(lambda name=name: self.models(name) == models, f"{name}: models are missing", READY_S)  # type: ignore[misc]
        return self

    def is_answered(self, port: int, path: str, body: Any) -> bool:
        """Return whether a request is answered with status 200."""
        try:
            return self.request(port, "POST", path, body).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def wait_answered(self, path: str, body: Any) -> Self:
        """Return when every frontend answers the request with status 200."""
        for name, port in self.ports.items():
            self.wait_until(lambda port=port: self.is_answered(port, path, body), f"{name} was not ready", READY_S)  # type: ignore[misc]
        return self
