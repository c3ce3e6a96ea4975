"""`dynamo deploy logs` with the responses of a kubelet, which the API server of the tests does not have."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.cluster.kubernetes.kubeconfig import write_kubeconfig

from dynamo.cli.deploy import deploy
from dynamo.cli.graph_status import COMPONENT_LABEL

pytestmark = pytest.mark.integration


def pod(name: str, component: str) -> dict[str, object]:
    containers = [{"name": "main"}, {"name": "sidecar"}]
    return {"metadata": {"name": name, "labels": {COMPONENT_LABEL: component}}, "spec": {"containers": containers}}


class LogHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        status, body = 200, b""
        if not url.path.endswith("/log"):
            items = [pod("front", "frontend"), pod("work", "decode")]
            body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()
        elif query["container"] == ["main"]:
            body = f"started\nlast of {query['tailLines'][0]}\n".encode()
        else:
            status, body = 400, json.dumps({"reason": "BadRequest", "message": "waiting to start"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(autouse=True)
def log_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LogHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.server_port}", "token")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    yield
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_lines_name_pod_and_container(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(["logs", "g", "--component", "Decode", "--tail", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["work/main: started", "work/main: last of 2"]
    assert shown.err == "work/sidecar: 400 BadRequest: waiting to start\n"


def test_component_without_pods_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(["logs", "g", "--component", "prefill"]) == 1
    assert "g: no pod of component prefill in namespace default" in capsys.readouterr().err
