"""Request plane over NATS: the messages to the server, and the handling of those from the server."""

from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.settle import turns

from dynamo.core.errors import CannotConnect, Disconnected, InvalidArgument, WorkerOverloaded, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import Instance, TransportAddress
from dynamo.runtime.request_plane import frame, nats
from dynamo.runtime.request_plane.base import Request, Target
from dynamo.runtime.request_plane.nats import NatsPlane, subject_of
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.server import Dispatcher, ServeOptions
from dynamo.runtime.transports.nats.options import NatsOptions

PATH = "1f/ns/comp/generate"
SUBJECT = "ns_comp.generate-1f"


class FakeNats:
    """Connection that records its messages."""

    def __init__(self, options: NatsOptions, purpose: str, registry: MetricsRegistry, on_down: Any) -> None:
        self.options = options
        self.on_down = on_down
        self.is_up = True
        self.is_full = False
        self.payload_bytes_max = 100_000
        self.sent: list[tuple[str, bytes, str, Mapping[str, str] | None]] = []
        self.subscribed: dict[str, Any] = {}

    async def start(self) -> None:
        self.is_up = True

    async def wait_up(self) -> None:
        if not self.is_up:
            raise CannotConnect("away")

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bool:
        if not self.is_full:
            self.sent.append((subject, data, reply, headers))
        return not self.is_full

    async def subscribe(self, subject: str, deliver: Any, queue: str = "") -> Any:
        self.subscribed[subject] = deliver
        return SimpleNamespace(subject=subject, queue=queue)

    async def unsubscribe(self, subscription: Any) -> None:
        del self.subscribed[subscription.subject]

    async def close(self) -> None:
        self.is_up = False


class ReceivedOutput:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.done: list[Exception | None] = []

    def on_token(self, token_id: int) -> None: ...

    def on_item(self, item: Any) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None:
        self.error = error

    def on_done(self, instance_id: int, error: Exception | None) -> None:
        self.done.append(error)


class NatsPlaneHarness:
    """Request plane over a fake connection."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.registry = MetricsRegistry()
        self.plane = NatsPlane(self.dispatcher, NatsOptions(), TcpOptions(host="127.0.0.1"), self.registry)
        assert isinstance(self.plane._nats, FakeNats)
        self.nats: FakeNats = self.plane._nats
        self.target = Target(0x1F, SUBJECT, PATH, "msgpack", False)

    async def call(self, request: Request | None = None) -> ReceivedOutput:
        received = ReceivedOutput()
        await self.plane.connect(self.target)
        assert self.plane.send(self.target, request or Request("r1", b"\x80"), received, received.on_done) is not None
        return received

    def acknowledge(self, data: bytes = b"", **headers: str) -> None:
        """Acknowledge the newest request."""
        reply = self.nats.sent[-1][2]
        deliver = self.nats.subscribed[reply.rpartition(".")[0] + ".*"]
        deliver(SimpleNamespace(subject=reply, data=data, headers=headers or None))

    def arrive(self, data: bytes, reply: str = "_INBOX.x.y", **headers: str) -> None:
        """Deliver a request to the handler's subject."""
        self.nats.subscribed[SUBJECT](SimpleNamespace(subject=SUBJECT, data=data, reply=reply, headers=headers))


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsPlaneHarness]:
    monkeypatch.setattr(nats, "NatsConnection", FakeNats)
    made = NatsPlaneHarness()
    yield made
    await made.plane.close()


# Addresses -------------------------------------------------------------------------------------------------------


def test_nats_request_plane_writes_subjects_as_released_dynamo() -> None:
    assert subject_of("4b65a24a0bab3ddc/Ns-a/back_end/gene-rate_X") == "Ns-a_back_end.gene-rate_X-4b65a24a0bab3ddc"


@pytest.mark.parametrize("path", ["1/ns/comp/*", "1/>/comp/ep"])
def test_nats_request_plane_refuses_wildcard_names(path: str) -> None:
    with pytest.raises(InvalidArgument, match=r"must not contain \* or >"):
        subject_of(path)


def test_nats_request_plane_reads_the_target_from_a_released_record() -> None:
    record = Instance("comp", "generate", "ns", 0x1F, TransportAddress(nats_tcp=SUBJECT), request_plane_codec="msgpack")
    assert Target.of(record) == Target(0x1F, SUBJECT, PATH, "msgpack", False)


async def test_nats_request_plane_cannot_call_a_tcp_worker(harness: NatsPlaneHarness) -> None:
    target = Target(1, "10.0.0.1:4000", PATH, "msgpack", False)
    await harness.plane.connect(harness.target)
    assert harness.plane.send(target, Request("r", b""), ReceivedOutput(), lambda _, __: None) is None
    with pytest.raises(CannotConnect, match="set the same --request-plane"):
        await harness.plane.connect(target)


# Calls -----------------------------------------------------------------------------------------------------------


async def test_nats_request_plane_writes_requests_as_released_dynamo(harness: NatsPlaneHarness) -> None:
    headers = {"traceparent": "00-a-b-01", "not a name": "x"}
    await harness.call(Request("r1", b"\x81\xa1n\x01", headers=headers, metadata={"tenant": "t"}))
    [(subject, message, reply, sent)] = harness.nats.sent
    assert subject == SUBJECT
    assert sent is not None
    assert sent["request-id"] == "r1"
    assert sent["x-frontend-send-ts-ns"].isdigit()
    assert sent["traceparent"] == "00-a-b-01"
    assert "not a name" not in sent
    header, body = frame.split_two_part(message)
    assert body == b"\x81\xa1n\x01"
    control = msgspec.json.decode(header)
    info = msgspec.json.decode(control["connection_info"].pop("info"))
    assert control == {
        "id": "r1",
        "request_type": "single_in",
        "response_type": "many_out",
        "connection_info": {"transport": "tcp_server"},
        "payload_codec": "msgpack",
        "metadata": {"tenant": "t"},
    }
    assert info["address"].startswith("127.0.0.1:")
    assert reply.endswith("." + info["subject"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"Server overloaded: worker at capacity", WorkerOverloaded),
        (b"Server unavailable: draining", WorkerUnavailable),
        (b"Invalid request: what", InvalidArgument),
    ],
)
async def test_nats_request_plane_raises_typed_errors(
    harness: NatsPlaneHarness, text: bytes, kind: type[Exception]
) -> None:
    received = await harness.call()
    harness.acknowledge(text)
    assert type(received.error) is kind
    assert received.done == [received.error]
    harness.acknowledge(text)
    assert len(received.done) == 1


async def test_nats_request_plane_fails_at_once_without_subscribers(harness: NatsPlaneHarness) -> None:
    received = await harness.call()
    harness.acknowledge(Status="503")
    assert isinstance(received.error, CannotConnect)
    assert SUBJECT in str(received.error)


async def test_nats_request_plane_fails_undelivered_requests_when_the_server_is_lost(harness: NatsPlaneHarness) -> None:
    delivered = await harness.call()
    harness.acknowledge()
    lost = await harness.call()
    harness.nats.on_down()
    assert isinstance(lost.error, Disconnected)
    assert delivered.error is None
    assert "dynamo_transport_nats_errors_total 1" in harness.registry.render()


@pytest.mark.parametrize(
    ("limit", "name"), [(500, "max_payload"), (100 << 20, "DYN_TCP_MAX_MESSAGE_SIZE|NATS request")]
)
async def test_nats_request_plane_error_names_the_payload_limit(
    harness: NatsPlaneHarness, limit: int, name: str
) -> None:
    harness.nats.payload_bytes_max = limit
    await harness.plane.connect(harness.target)
    with pytest.raises(InvalidArgument, match=f"exceeds the limit of .*{name}"):
        harness.plane.send(
            harness.target, Request("r", bytes(min(limit, 17 << 20))), ReceivedOutput(), lambda _, __: None
        )
    assert harness.nats.sent == []


async def test_nats_request_plane_sends_nothing_when_full_or_disconnected(harness: NatsPlaneHarness) -> None:
    await harness.plane.connect(harness.target)
    harness.nats.is_full = True
    received = ReceivedOutput()
    assert harness.plane.send(harness.target, Request("r", b""), received, received.on_done) is None
    harness.nats.is_up = False
    assert harness.plane.send(harness.target, Request("r", b""), received, received.on_done) is None
    with pytest.raises(CannotConnect):
        await harness.plane.connect(harness.target)
    assert received.done == []


async def test_nats_request_plane_close_ends_active_requests(harness: NatsPlaneHarness) -> None:
    received = await harness.call()
    await harness.plane.close()
    assert isinstance(received.error, Disconnected)
    await harness.plane.close()
    with pytest.raises(Disconnected):
        await harness.plane.connect(harness.target)


# Handlers --------------------------------------------------------------------------------------------------------


async def test_nats_request_plane_handler_subscribes_until_close(harness: NatsPlaneHarness) -> None:
    await harness.plane.listen()
    await harness.plane.open(PATH)
    await harness.plane.open(PATH)
    assert harness.plane.address(PATH) == TransportAddress(nats_tcp=SUBJECT)
    assert set(harness.nats.subscribed) == {SUBJECT}
    await harness.plane.close()
    assert harness.nats.subscribed == {}


async def test_nats_request_plane_refuses_unreadable_requests_with_a_message(
    harness: NatsPlaneHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.plane.open(PATH)
    harness.arrive(b"")
    served = harness.dispatcher.add(PATH, lambda _, __: None, ServeOptions(inflight_max=0))
    harness.arrive(b"")
    served.is_draining = True
    harness.arrive(b"")
    harness.dispatcher.add(PATH, lambda _, __: None)
    for garbage in (b"no two-part message", frame.two_part(b"{}", b""), frame.two_part(b"\xff", b"")):
        harness.arrive(garbage)
    harness.arrive(b"garbage without a waiting request", reply="")
    texts = [data.decode().split(":")[0] for _, data, _, _ in harness.nats.sent]
    assert texts == ["Server unavailable", "Server overloaded", "Server unavailable", *["Invalid request"] * 3]
    assert all(subject == "_INBOX.x.y" for subject, *_ in harness.nats.sent)
    assert "dynamo_transport_nats_errors_total 4" in harness.registry.render()
    assert caplog.text.count("malformed requests, the last on ns_comp.generate-1f") == 3


async def test_nats_request_plane_survives_an_unreachable_caller(
    harness: NatsPlaneHarness, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Request] = []
    harness.dispatcher.add(PATH, lambda request, _: taken.append(request))
    await harness.plane.open(PATH)
    info = msgspec.json.encode({"address": "nowhere", "subject": "s"}).decode()
    control = {
        "id": "r", "request_type": "single_in", "response_type": "many_out",
        "connection_info": {"transport": "tcp_server", "info": info},
    }  # fmt: skip
    harness.arrive(frame.two_part(msgspec.json.encode(control), b"{}"))
    assert harness.nats.sent == [("_INBOX.x.y", b"", "", None)]
    assert await harness.plane._worker.tasks.wait(5.0)
    assert "failed to connect to nowhere" in caplog.text
    assert taken == []
    await turns()
