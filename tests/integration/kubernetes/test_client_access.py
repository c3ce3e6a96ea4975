"""Access of `KubeClient` to an API server: credential programs, certificates of another name, and proxies."""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
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
async def relay(upstream: int, heads: list[bytes], tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Yield the port of a proxy: of CONNECT requests, whose heads it records, or with `tls` of connections as they are."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if tls is None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        there, back = await asyncio.open_connection("127.0.0.1", upstream)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


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
