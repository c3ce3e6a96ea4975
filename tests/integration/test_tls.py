"""Frontend and workers that use TLS, configured by flags; and the errors of wrong configurations."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, serving

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def flags(certificates: Certificates) -> list[str]:
    """Every process presents a certificate and requires one."""
    return [
        f"--tcp-tls-cert-path={certificates.cert}",
        f"--tcp-tls-key-path={certificates.key}",
        f"--tcp-tls-ca-cert-path={certificates.ca}",
        f"--tcp-tls-client-cert-path={certificates.client_cert}",
        f"--tcp-tls-client-key-path={certificates.client_key}",
        f"--tcp-tls-client-ca-cert-path={certificates.ca}",
    ]


def test_requests_and_responses_use_tls(tmp_path: Path, certificates: Certificates) -> None:
    with serving(tmp_path, *flags(certificates)) as cluster:
        worker = WorkerProcess(cluster, *flags(certificates))
        answers = [cluster.post({**CHAT, "stream": stream}) for stream in (False, True)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1].text.endswith("data: [DONE]\n\n")

        with socket.create_connection(worker.address, timeout=DEADLINE_S) as plain:
            plain.sendall(b"\x00\x00dynamo.frames\x01")
            assert plain.recv(100) == b"", "the worker talks to whoever does not speak TLS"


def test_frontend_without_tls_fails_at_once_with_the_setting(tmp_path: Path, certificates: Certificates) -> None:
    with serving(tmp_path) as cluster:
        WorkerProcess(cluster, *flags(certificates))
        answer = cluster.post(CHAT)
        assert answer.status_code == 503
        assert answer.elapsed.total_seconds() < 8  # The handshakes' timeout is three seconds, requests' ten.


@pytest.mark.parametrize("module", ["frontend", "mocker"])
@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--tcp-tls-cert-path=cert.pem"], "--tcp-tls-cert-path cert.pem: requires --tcp-tls-key-path"),
        (["--tcp-tls-ca-cert-path=nowhere.pem"], "--tcp-tls-ca-cert-path nowhere.pem: No such file"),
    ],
)
def test_invalid_tls_settings_end_a_process_with_one_line(
    tmp_path: Path, module: str, argv: list[str], complaint: str
) -> None:
    port = ["--http-port", "0"] if module == "frontend" else []
    ended = subprocess.run(
        [sys.executable, "-m", f"dynamo.{module}", "--discovery-backend", "mem", *port, *argv],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    (reported,) = [line for line in ended.stderr.splitlines() if "INFO" not in line]
    assert reported.startswith("error: ")
    assert complaint in reported
