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


class Heard:
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


class Rig:
    """Request plane over a fake connection."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.registry = MetricsRegistry()
        self.plane = NatsPlane(self.dispatcher, NatsOptions(), TcpOptions(host="127.0.0.1"), self.registry)
        assert isinstance(self.plane._nats, FakeNats)
        self.nats: FakeNats = self.plane._nats
        self.target = Target(0x1F, SUBJECT, PATH, "msgpack", False)

    async def call(self, request: Request | None = None) -> Heard:
        heard = Heard()
        await self.plane.connect(self.target)
        assert self.plane.send(self.target, request or Request("r1", b"\x80"), heard, heard.on_done) is not None
        return heard

    def acknowledge(self, data: bytes = b"", **headers: str) -> None:
        """Acknowledge the newest request."""
        reply = self.nats.sent[-1][2]
        deliver = self.nats.subscribed[reply.rpartition(".")[0] + ".*"]
        deliver(SimpleNamespace(subject=reply, data=data, headers=headers or None))

    def arrive(self, data: bytes, reply: str = "_INBOX.x.y", **headers: str) -> None:
        """Deliver a request to the handler's subject."""
        self.nats.subscribed[SUBJECT](SimpleNamespace(subject=SUBJECT, data=data, reply=reply, headers=headers))


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(nats, "NatsConnection", FakeNats)
    made = Rig()
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


async def test_nats_request_plane_cannot_call_a_tcp_worker(rig: Rig) -> None:
    target = Target(1, "10.0.0.1:4000", PATH, "msgpack", False)
    await rig.plane.connect(rig.target)
    assert rig.plane.send(target, Request("r", b""), Heard(), lambda _, __: None) is None
    with pytest.raises(CannotConnect, match="set the same --request-plane"):
        await rig.plane.connect(target)


# Calls -----------------------------------------------------------------------------------------------------------


async def test_nats_request_plane_writes_requests_as_released_dynamo(rig: Rig) -> None:
    headers = {"traceparent": "00-a-b-01", "not a name": "x"}
    await rig.call(Request("r1", b"\x81\xa1n\x01", headers=headers, metadata={"tenant": "t"}))
    [(subject, message, reply, sent)] = rig.nats.sent
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
async def test_nats_request_plane_raises_typed_errors(rig: Rig, text: bytes, kind: type[Exception]) -> None:
    heard = await rig.call()
    rig.acknowledge(text)
    assert type(heard.error) is kind
    assert heard.done == [heard.error]
    rig.acknowledge(text)
    assert len(heard.done) == 1


async def test_nats_request_plane_fails_at_once_without_subscribers(rig: Rig) -> None:
    heard = await rig.call()
    rig.acknowledge(Status="503")
    assert isinstance(heard.error, CannotConnect)
    assert SUBJECT in str(heard.error)


async def test_nats_request_plane_fails_undelivered_requests_when_the_server_is_lost(rig: Rig) -> None:
    delivered = await rig.call()
    rig.acknowledge()
    lost = await rig.call()
    rig.nats.on_down()
    assert isinstance(lost.error, Disconnected)
    assert delivered.error is None
    assert "dynamo_transport_nats_errors_total 1" in rig.registry.render()


@pytest.mark.parametrize(
    ("limit", "name"), [(500, "max_payload"), (100 << 20, "DYN_TCP_MAX_MESSAGE_SIZE|NATS request")]
)
async def test_nats_request_plane_error_names_the_payload_limit(rig: Rig, limit: int, name: str) -> None:
    rig.nats.payload_bytes_max = limit
    await rig.plane.connect(rig.target)
    with pytest.raises(InvalidArgument, match=f"exceeds the limit of .*{name}"):
        rig.plane.send(rig.target, Request("r", bytes(min(limit, 17 << 20))), Heard(), lambda _, __: None)
    assert rig.nats.sent == []


async def test_nats_request_plane_sends_nothing_when_full_or_disconnected(rig: Rig) -> None:
    await rig.plane.connect(rig.target)
    rig.nats.is_full = True
    heard = Heard()
    assert rig.plane.send(rig.target, Request("r", b""), heard, heard.on_done) is None
    rig.nats.is_up = False
    assert rig.plane.send(rig.target, Request("r", b""), heard, heard.on_done) is None
    with pytest.raises(CannotConnect):
        await rig.plane.connect(rig.target)
    assert heard.done == []


async def test_nats_request_plane_close_ends_active_requests(rig: Rig) -> None:
    heard = await rig.call()
    await rig.plane.close()
    assert isinstance(heard.error, Disconnected)
    await rig.plane.close()
    with pytest.raises(Disconnected):
        await rig.plane.connect(rig.target)


# Handlers --------------------------------------------------------------------------------------------------------


async def test_nats_request_plane_handler_subscribes_until_close(rig: Rig) -> None:
    await rig.plane.listen()
    await rig.plane.open(PATH)
    await rig.plane.open(PATH)
    assert rig.plane.address(PATH) == TransportAddress(nats_tcp=SUBJECT)
    assert set(rig.nats.subscribed) == {SUBJECT}
    await rig.plane.close()
    assert rig.nats.subscribed == {}


async def test_nats_request_plane_refuses_unreadable_requests_with_a_message(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.plane.open(PATH)
    rig.arrive(b"")
    served = rig.dispatcher.add(PATH, lambda _, __: None, ServeOptions(inflight_max=0))
    rig.arrive(b"")
    served.is_draining = True
    rig.arrive(b"")
    rig.dispatcher.add(PATH, lambda _, __: None)
    for garbage in (b"no two-part message", frame.two_part(b"{}", b""), frame.two_part(b"\xff", b"")):
        rig.arrive(garbage)
    rig.arrive(b"garbage that nobody waits for", reply="")
    texts = [data.decode().split(":")[0] for _, data, _, _ in rig.nats.sent]
    assert texts == ["Server unavailable", "Server overloaded", "Server unavailable", *["Invalid request"] * 3]
    assert all(subject == "_INBOX.x.y" for subject, *_ in rig.nats.sent)
    assert "dynamo_transport_nats_errors_total 4" in rig.registry.render()
    assert caplog.text.count("malformed requests, the last on ns_comp.generate-1f") == 3


async def test_nats_request_plane_survives_an_unreachable_caller(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    taken: list[Request] = []
    rig.dispatcher.add(PATH, lambda request, _: taken.append(request))
    await rig.plane.open(PATH)
    info = msgspec.json.encode({"address": "nowhere", "subject": "s"}).decode()
    control = {
        "id": "r", "request_type": "single_in", "response_type": "many_out",
        "connection_info": {"transport": "tcp_server", "info": info},
    }  # fmt: skip
    rig.arrive(frame.two_part(msgspec.json.encode(control), b"{}"))
    assert rig.nats.sent == [("_INBOX.x.y", b"", "", None)]
    assert await rig.plane._worker.tasks.wait(5.0)
    assert "failed to connect to nowhere" in caplog.text
    assert taken == []
    await turns()
