"""Access of `KubeClient` to an API server: credential programs, certificates of another name, and proxies."""

import asyncio
import base64
import json
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from cryptography import x509
from tests.certificates import Certificates
from tests.cluster.kubernetes.kubeconfig import ADMIN_TOKEN
from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import CONFIG_MAPS

PROGRAM = """import json, os, pathlib
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
runs = pathlib.Path(os.environ["RUNS"])
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
token = os.environ["TOKEN"] if len(runs.read_text()) >= int(os.environ["VALID_FROM"]) else "expired"
print(json.dumps({"apiVersion": info["apiVersion"], "kind": info["kind"], "status": {"token": token}}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path_factory.mktemp("kubernetes"), controllers=False) as started:
        yield started


def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], user: dict[str, Any]
) -> KubeClient:
    """Return a client of a kubeconfig with one cluster and one user."""
    file = tmp_path / "kubeconfig"
    file.write_text(
        yaml.safe_dump({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}], "users": [{"name": "u", "user": user}],
        })
    )  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(file))
    return KubeClient()


def exec_user(tmp_path: Path, version: str = "v1", valid_from: int = 1) -> dict[str, Any]:
    variables = {"RUNS": str(tmp_path / "runs"), "TOKEN": ADMIN_TOKEN, "VALID_FROM": str(valid_from)}
    return {
        "exec": {
            "apiVersion": f"client.authentication.k8s.io/{version}", "command": sys.executable, "args": ["-c", PROGRAM],
            "env": [{"name": name, "value": value} for name, value in variables.items()], "interactiveMode": "Never",
        }
    }  # fmt: skip


async def listed(api: KubeClient) -> int:
    try:
        return len((await api.list(CONFIG_MAPS, "default")).items)
    finally:
        await api.close()


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_token_of_a_program_is_reused_and_renewed_when_it_is_refused(
    version: str, server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = client(tmp_path, monkeypatch, {"server": server.url}, exec_user(tmp_path, version, valid_from=2))
    await api.list(CONFIG_MAPS, "default")
    await listed(api)
    assert (tmp_path / "runs").read_text() == "xx", "the first token was refused, the second serves both requests"


class CertificateProgram:
    """A program that prints the next of several certificates at each run, the last one again and again."""

    def __init__(self, folder: Path, authority: trustme.CA, lives_s: tuple[float, ...]) -> None:
        """Each certificate lives as long as `lives_s` has it, by the time stamp that the program prints."""
        self._folder = folder
        self.serials: list[int] = []
        for number, life_s in enumerate(lives_s):
            leaf = authority.issue_cert("client.test", organization_name="system:masters", common_name="admin")
            pem = leaf.cert_chain_pems[0].bytes()
            self.serials.append(x509.load_pem_x509_certificate(pem).serial_number)
            key = leaf.private_key_pem.bytes().decode()
            self.write(number, {"clientCertificateData": pem.decode(), "clientKeyData": key, **expiry(life_s)})

    def write(self, number: int, status: dict[str, Any]) -> None:
        (self._folder / f"{number}.json").write_text(json.dumps(status))

    @property
    def user(self) -> dict[str, Any]:
        program = """import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
runs = folder / "runs"
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
files = sorted(folder.glob("*.json"))
status = json.loads(files[min(number, len(files) - 1)].read_text())
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""
        version = "client.authentication.k8s.io/v1"
        args = ["-c", program, str(self._folder)]
        return {"exec": {"apiVersion": version, "command": sys.executable, "args": args, "interactiveMode": "Never"}}

    @property
    def runs(self) -> int:
        return len((self._folder / "runs").read_text())


def expiry(life_s: float) -> dict[str, str]:
    until = datetime.now(UTC) + timedelta(seconds=life_s)
    return {"expirationTimestamp": until.strftime("%Y-%m-%dT%H:%M:%SZ")}


@asynccontextmanager
async def verifying_relay(server: KubernetesServer, authority: trustme.CA) -> AsyncIterator[tuple[int, list[int]]]:
    """Yield the port of a TLS server before the API server, and the certificates that clients have shown it."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    peers: list[int] = []
    async with relay(int(server.url.rpartition(":")[2]), [], tls, peers) as port:
        yield port, peers


def cluster_of(port: int, authority: trustme.CA) -> dict[str, Any]:
    data = base64.b64encode(authority.cert_pem.bytes()).decode()
    return {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": data}


async def test_certificate_of_a_program_is_reused_until_it_expires(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    program = CertificateProgram(tmp_path, authority, (5, 3600))  # The first is within the margin before its expiry.
    async with verifying_relay(server, authority) as (port, peers):
        api = client(tmp_path, monkeypatch, cluster_of(port, authority), program.user)
        for _ in range(3):
            with suppress(KubeRefused):  # The test server knows tokens only; the certificate is the relay's.
                await api.list(CONFIG_MAPS, "default")
        await api.close()
    assert peers[0] == program.serials[0]
    assert set(peers[1:]) == {program.serials[1]}
    assert program.runs >= 2


async def test_incomplete_or_invalid_certificate_of_a_program_is_one_line(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    program = CertificateProgram(tmp_path, authority, (3600,))
    async with verifying_relay(server, authority) as (port, _):
        cluster = cluster_of(port, authority)
        program.write(0, {"clientCertificateData": "x"})
        with pytest.raises(KubeUnavailable, match="clientCertificateData and clientKeyData are required together"):
            await listed(client(tmp_path, monkeypatch, cluster, program.user))
        program.write(0, {"clientCertificateData": "x", "clientKeyData": "y"})
        with pytest.raises(KubeUnavailable, match="client-certificate-data of"):
            await listed(client(tmp_path, monkeypatch, cluster, program.user))


async def test_program_that_fails_is_named(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = exec_user(tmp_path)
    user["exec"] |= {"args": ["-c", "raise SystemExit('sign in first')"]}
    with pytest.raises(KubeUnavailable, match="ended with status 1: sign in first"):
        await listed(client(tmp_path, monkeypatch, {"server": server.url}, user))
    user["exec"] |= {"command": "absent-plugin", "installHint": "install it"}
    with pytest.raises(KubeUnavailable, match="exec absent-plugin: No such file or directory; install it"):
        await listed(client(tmp_path, monkeypatch, {"server": server.url}, user))


async def test_wrong_token_is_refused_once(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KubeRefused, match="401"):
        await listed(client(tmp_path, monkeypatch, {"server": server.url}, {"token": "wrong"}))


@asynccontextmanager
async def relay(
    upstream: int, heads: list[bytes], tls: ssl.SSLContext | None = None, peers: list[int] | None = None
) -> AsyncIterator[int]:
    """Yield the port of a proxy: of CONNECT requests, whose heads it records, or with `tls` of connections as they are.

    `peers` gets the serial numbers of the certificates of clients.
    """

    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peers is not None:
            peers.append(int(writer.get_extra_info("peercert")["serialNumber"], 16))
        if tls is None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        there, back = await asyncio.open_connection("127.0.0.1", upstream)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        try:
            await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
        finally:
            for one in (back, writer):
                one.transport.abort()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_certificate_of_another_name_behind_a_proxy(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Certificates(tmp_path / "tls", "api.example.com")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.cert, made.key)
    heads: list[bytes] = []
    async with relay(int(server.url.rpartition(":")[2]), [], tls) as secure, relay(secure, heads) as proxy:
        cluster = {"server": f"https://127.0.0.1:{secure}", "certificate-authority": made.ca}
        user = {"token": ADMIN_TOKEN}
        with pytest.raises(KubeUnavailable, match=r"certificate is not valid for '127\.0\.0\.1'"):
            await listed(client(tmp_path, monkeypatch, cluster, user))
        cluster |= {"tls-server-name": "api.example.com"}
        await listed(client(tmp_path, monkeypatch, cluster, user))
        cluster |= {"proxy-url": f"http://127.0.0.1:{proxy}"}
        await listed(client(tmp_path, monkeypatch, cluster, user))
    assert heads == [f"CONNECT 127.0.0.1:{secure} HTTP/1.1\r\nhost: 127.0.0.1:{secure}\r\n\r\n".encode()]
