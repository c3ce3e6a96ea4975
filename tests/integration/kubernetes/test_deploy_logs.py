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
from dynamo.core.errors import ConfigError

pytestmark = pytest.mark.integration


def pod(name: str, component: str) -> dict[str, object]:
    containers = [{"name": "main"}, {"name": "sidecar"}]
    metadata = {"name": name, "namespace": "default", "uid": name, "labels": {COMPONENT_LABEL: component}}
    statuses = [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]
    status = {"phase": "Succeeded", "containerStatuses": statuses}
    return {"metadata": metadata, "spec": {"containers": containers}, "status": status}


class LogHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        status, body = 200, b""
        if query.get("watch"):
            pass  # It ends at once, without a change.
        elif query.get("follow"):
            assert query["timestamps"] == ["true"]
            for line in ("2026-01-01T00:00:00.000000001Z started", "2026-01-01T00:00:00.000000002Z ended"):
                body += line.encode() + b"\n"
        elif not url.path.endswith("/log"):
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


def test_log_of_a_job_is_followed_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(["logs", "dgdr/r", "--follow"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["front/main: ended", "front/main: started", "work/main: ended", "work/main: started"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dm/m"], "DynamoModel/m: a model has no pods of its own"),
        (["dgdr/r", "--component", "decode"], "--component decode: only a graph has components"),
    ],
)
def test_object_without_logs_is_named_in_the_error(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(["logs", *argv])


def test_component_without_pods_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(["logs", "g", "--component", "prefill"]) == 1
    assert "g: no pod of component prefill in namespace default" in capsys.readouterr().err
