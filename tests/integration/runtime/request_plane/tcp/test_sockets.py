"""TLS connections that must be refused or not trusted: each fails quickly on both sides."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.certificates import Certificates
from tests.settle import until

from dynamo.core.errors import CannotConnect, Disconnected, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.config import tcp_options
from dynamo.runtime.request_plane.base import Item, Reply, Request, Target
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane
from dynamo.runtime.request_plane.tcp.tls import TcpTls
from dynamo.runtime.server import Dispatcher, ServeOptions

PATH = "1f/ns/comp/generate"
QUICK_S = 8.0  # A handshake may take three seconds, an acknowledgement ten.
FRAMINGS = pytest.mark.parametrize("batched", [True, False], ids=["batched", "upstream"])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_of(certificates: Certificates, **changes: str | None) -> TcpTls:
    """Return complete TLS options with these changes."""
    variables = certificates.variables()
    for name, value in changes.items():
        variables[f"DYN_TCP_TLS_{name}"] = value or ""
    return tcp_options({name: value for name, value in variables.items() if value}).tls


class ReceivedOutput:
    def __init__(self) -> None:
        self.end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int) -> None: ...

    def on_item(self, item: Item) -> None: ...

    def on_end(self) -> None:
        self.end.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.end.set_result(error)


class Pair:
    """Worker and caller, each with settings of its own."""

    def __init__(self, worker: TcpTls, caller: TcpTls, *, batched: bool = True) -> None:
        self.registry = MetricsRegistry()
        self.batched = batched
        options = TcpOptions(host="127.0.0.1", speaks_batched=batched)
        dispatcher = Dispatcher()
        self.worker = TcpPlane(dispatcher, replace(options, tls=worker), self.registry)
        self.caller = TcpPlane(Dispatcher(), replace(options, tls=caller), MetricsRegistry())
        dispatcher.add(PATH, self._handle, ServeOptions())

    @staticmethod
    def _handle(request: Request, reply: Reply) -> None:
        reply.token(7)
        reply.finish()

    async def send_request(self) -> Exception | None:
        """Return the error with which a request ends, within a short time."""
        await self.worker.listen()
        address = self.worker.address(PATH).tcp
        assert address is not None
        target = Target(0x1F, address.partition("/")[0], PATH, "msgpack", self.batched)
        received = ReceivedOutput()
        async with asyncio.timeout(QUICK_S):
            try:
                await self.caller.connect(target)
                call = self.caller.send(target, Request("r", b"\x80"), received, lambda *_: None)
            except WorkerUnavailable as error:
                return error
            if call is None:
                return Disconnected("it broke at once")
            return await received.end

    async def close(self) -> None:
        await self.caller.close()
        await self.worker.close()


@pytest.fixture
async def pairs() -> AsyncIterator[Any]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        await pair.close()


@FRAMINGS
async def test_tcp_tls_both_sides_present_and_verify_certificates(
    pairs: Any, certificates: Certificates, batched: bool
) -> None:
    tls = tls_of(certificates)
    assert await pairs(tls, tls, batched=batched).send_request() is None


async def test_tcp_tls_needs_only_server_certificate_and_client_authority_between_our_processes(
    pairs: Any, certificates: Certificates
) -> None:
    worker = TcpTls(server=tls_of(certificates, CLIENT_CA_CERT_PATH=None).server)
    caller = TcpTls(client=tls_of(certificates).client)
    assert await pairs(worker, caller).send_request() is None


@FRAMINGS
async def test_tcp_tls_worker_closes_a_plain_connection_at_once(
    pairs: Any, certificates: Certificates, batched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pairs(tls_of(certificates), TcpTls(), batched=batched)
    with caplog.at_level(logging.WARNING):
        error = await pair.send_request()
    assert isinstance(error, Disconnected) and error.retry_elsewhere
    assert "DYN_TCP_TLS" in str(error), "it is not said what might be wrong"
    assert "TLS handshake failed" in caplog.text and "127.0.0.1:" in caplog.text
    assert "dynamo_transport_tcp_errors_total 1" in pair.registry.render()


@FRAMINGS
async def test_tcp_tls_caller_cannot_connect_to_a_plain_worker(
    pairs: Any, certificates: Certificates, batched: bool
) -> None:
    error = await pairs(TcpTls(), tls_of(certificates), batched=batched).send_request()
    assert isinstance(error, CannotConnect) and error.retry_elsewhere


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"CA_CERT_PATH": "other_ca"}, "certificate verify failed"),
        ({"SERVER_NAME": "elsewhere.test"}, "Hostname mismatch"),
    ],
)
async def test_tcp_tls_caller_refuses_a_worker_with_another_name(
    pairs: Any, certificates: Certificates, changes: dict[str, str], complaint: str
) -> None:
    changes = {name: getattr(certificates, value, value) for name, value in changes.items()}
    error = await pairs(tls_of(certificates), tls_of(certificates, **changes)).send_request()
    assert isinstance(error, CannotConnect)
    assert complaint in str(error)


async def test_tcp_tls_insecure_caller_accepts_any_certificate(pairs: Any, certificates: Certificates) -> None:
    caller = tls_of(certificates, CA_CERT_PATH=certificates.other_ca, SERVER_NAME="elsewhere.test", INSECURE="1")
    assert await pairs(tls_of(certificates), caller).send_request() is None


async def test_tcp_tls_server_name_overrides_the_host(pairs: Any, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, "worker.test")
    worker = tls_of(certificates)
    assert isinstance(await pairs(worker, tls_of(certificates)).send_request(), CannotConnect)
    assert await pairs(worker, tls_of(certificates, SERVER_NAME="worker.test")).send_request() is None


@FRAMINGS
@pytest.mark.parametrize("shown", ["nothing", "a stranger's"])
async def test_tcp_tls_worker_refuses_a_caller_without_trusted_certificate(
    pairs: Any, certificates: Certificates, batched: bool, shown: str
) -> None:
    worker = tls_of(certificates)
    if shown == "nothing":
        caller = tls_of(certificates, CLIENT_CERT_PATH=None, CLIENT_KEY_PATH=None)
    else:
        caller = tls_of(certificates, CLIENT_CERT_PATH=certificates.other_cert, CLIENT_KEY_PATH=certificates.other_key)
    error = await pairs(worker, caller, batched=batched).send_request()
    assert isinstance(error, Disconnected | CannotConnect) and error.retry_elsewhere


async def test_tcp_tls_upstream_framing_needs_both_roles(pairs: Any, certificates: Certificates) -> None:
    full = tls_of(certificates)
    error = await pairs(full, TcpTls(client=full.client), batched=False).send_request()
    assert isinstance(error, CannotConnect)
    assert "--tcp-tls-cert-path" in str(error)
    error = await pairs(TcpTls(server=full.server), full, batched=False).send_request()
    assert isinstance(error, WorkerUnavailable)
    assert "--tcp-tls-ca-cert-path" in str(error)


async def test_tcp_tls_worker_closes_a_connection_without_handshake(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    options = TcpOptions(host="127.0.0.1", tls=replace(tls_of(certificates), handshake_timeout_s=0.05))
    plane = TcpPlane(Dispatcher(), options)
    await plane.listen()
    host, _, port = (plane.address("p").tcp or "").partition("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(QUICK_S):
        assert await reader.read() == b""
    writer.close()
    await plane.close()
    assert "TLS handshake failed" in caplog.text


async def test_tcp_tls_caller_gives_up_on_an_unanswered_handshake(certificates: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tls = replace(tls_of(certificates), handshake_timeout_s=0.05)
        plane = TcpPlane(Dispatcher(), TcpOptions(host="127.0.0.1", tls=tls, limits=TcpLimits()))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(CannotConnect):
            await plane.connect(Target(0x1F, address, PATH, "msgpack", True))
        assert time.monotonic() - begun < QUICK_S
        await plane.close()


async def test_tcp_tls_closed_plane_accepts_no_handshake(certificates: Certificates) -> None:
    plane = TcpPlane(Dispatcher(), TcpOptions(host="127.0.0.1", tls=tls_of(certificates)))
    await plane.listen()
    host, _, port = (plane.address("p").tcp or "").partition("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(QUICK_S):
        await until(lambda: len(plane._sockets._tasks) >= 2)
        await plane.close()
        assert await reader.read() == b""
    writer.close()
    assert len(plane._sockets._tasks) == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
