"""Caller side of upstream's framing: bytes captured from a released 1.6.1 caller."""

import struct
from typing import Any

import pytest
from tests.unit.runtime.request_plane.tcp.upstream_transport import UpstreamTransport

from dynamo.core.codec import json_decode, json_encode, msgpack_encode
from dynamo.core.errors import DynamoException, InvalidArgument, StreamIncomplete, WorkerOverloaded, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Item, Request, Target
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics
from dynamo.runtime.request_plane.tcp.upstream_caller import (
    HANDSHAKE_BYTES_MAX,
    ResponseListener,
    UpstreamLink,
    refusal,
)
from dynamo.runtime.request_plane.tcp.upstream_wire import leading_tokens
from dynamo.runtime.request_plane.tcp.upstream_worker import read_request, read_stream_address

METRICS = TcpMetrics(MetricsRegistry())
LIMITS = TcpLimits()
TARGET = Target(1, "127.0.0.1:1", "1/n/c/e", "msgpack", False)

# Bodies as a released worker sent them.
ITEM = b"\x82\xa4data\x81\xa4data\x82\xa9token_ids\x91\x00\xa5index\x00\xaecomplete_final\xc2"
RUST_ITEM = (
    b"\x82\xa4data\x81\xa4data\x89\xa9token_ids\x91\x00\xa6tokens\xc0\xa4text\xc0\xaboutput_type\xa4text\xadcum_log_probs\xc0"
    b"\xa9log_probs\xc0\xactop_logprobs\xc0\xadfinish_reason\xc0\xa5index\xc0\xaecomplete_final\xc2"
)
FINAL = b"\x81\xaecomplete_final\xc3"


class ReceivedOutput:
    def __init__(self) -> None:
        self.reported: list[Any] = []

    def on_token(self, token_id: int) -> None:
        self.reported.append(token_id)

    def on_item(self, item: Item) -> None:
        self.reported.append((item.data, item.codec, item.id, item.event, item.comment))

    def on_end(self) -> None:
        self.reported.append("end")

    def on_error(self, error: Exception) -> None:
        self.reported.append(error)


def caller_end() -> tuple[UpstreamLink, ResponseListener, UpstreamTransport]:
    desk = ResponseListener(LIMITS, METRICS, lambda: None)
    link = UpstreamLink("127.0.0.1:1", desk, "127.0.0.1:2", lambda _: None)
    transport = UpstreamTransport()
    link.connection_made(transport)  # type: ignore[arg-type]
    return link, desk, transport


class Conversation:
    """Call of ours, and the worker's connection that answers it."""

    def __init__(self) -> None:
        self.link, self.desk, self.requests = caller_end()
        self.received = ReceivedOutput()
        self.done: list[Exception | None] = []
        request = Request("r", b"\x80", "msgpack", {"traceparent": "t"}, {"tenant": "x"})
        self.call = self.link.send(TARGET, request, self.received, lambda _, error: self.done.append(error))
        self.answer = self.desk.connection()
        self.transport = UpstreamTransport()
        self.answer.connection_made(self.transport)  # type: ignore[arg-type]

    def send_event(self, header: bytes, body: bytes = b"") -> None:
        self.answer.data_received(frame.two_part(header, body))

    def open(self) -> None:
        self.send_event(json_encode({"subject": self.call.subject, "stream_type": "response"}))
        self.send_event(b'{"error":null}')


async def test_upstream_caller_writes_a_request_as_released_dynamo() -> None:
    talk = Conversation()
    [sent] = frame.UpstreamRequestDecoder(1 << 20).feed(talk.requests.data)
    header, body = frame.split_two_part(sent.message)
    assert sent.path == "1/n/c/e"
    assert set(json_decode(sent.headers)) == {"request-id", "x-frontend-send-ts-ns", "x-endpoint-path", "traceparent"}
    control = json_decode(header)
    info = json_decode(control["connection_info"].pop("info"))
    assert control == {
        "id": "r", "request_type": "single_in", "response_type": "many_out", "payload_codec": "msgpack",
        "connection_info": {"transport": "tcp_server"}, "metadata": {"tenant": "x"},
    }  # fmt: skip
    assert info == {
        "address": "127.0.0.1:2", "subject": talk.call.subject, "context": "r", "stream_type": "response",
    }  # fmt: skip
    assert body == b"\x80"
    request, address = read_request(sent)
    assert (request.id, request.metadata, address.subject) == ("r", {"tenant": "x"}, talk.call.subject)


async def test_upstream_caller_reads_a_response_to_its_end() -> None:
    talk = Conversation()
    talk.open()
    talk.send_event(b"", ITEM)
    talk.send_event(b"", b'{"data":{"data":"x","id":"i","event":"e","comment":["c"]},"complete_final":false}')
    talk.send_event(b"", FINAL)
    talk.send_event(b'"sentinel"')
    assert talk.received.reported == [0, (b'"x"', "json", "i", "e", ["c"]), "end"]
    assert talk.done == [None]
    assert talk.transport.is_closed


async def test_upstream_caller_accepts_a_value_without_envelope() -> None:
    talk = Conversation()
    talk.open()
    talk.send_event(b"", b'{"data":{"Events":{"last_event_id":2}},"complete_final":false}')
    talk.send_event(b"", msgpack_encode({"data": {"TooNew": 1}, "complete_final": False}))
    talk.send_event(b"", b'{"data":{"comment":["c"]},"complete_final":false}')
    talk.send_event(b"", FINAL)
    assert talk.received.reported == [
        (b'{"Events":{"last_event_id":2}}', "json", None, None, None),
        (msgpack_encode({"TooNew": 1}), "msgpack", None, None, None),
        (None, "json", None, None, ["c"]),
        "end",
    ]


@pytest.mark.parametrize("closing", ["sentinel", "connection"])
async def test_upstream_caller_reports_a_response_without_final_marker_as_incomplete(closing: str) -> None:
    talk = Conversation()
    talk.open()
    talk.send_event(b"", ITEM)
    if closing == "sentinel":
        talk.send_event(b'"sentinel"')
    else:
        talk.answer.connection_lost(None)
    assert talk.received.reported[0] == 0
    assert isinstance(talk.received.reported[1], StreamIncomplete)


async def test_upstream_caller_accepts_a_stopped_response_without_final_marker() -> None:
    talk = Conversation()
    talk.call.stop()
    talk.open()
    assert talk.transport.take() == [(b'"stop"', b"")]
    talk.answer.connection_lost(None)
    assert talk.received.reported == ["end"]


async def test_upstream_caller_raises_on_a_refusing_prologue() -> None:
    talk = Conversation()
    talk.send_event(json_encode({"subject": talk.call.subject, "stream_type": "response"}))
    talk.send_event(b'{"error":"engine is gone"}')
    [error] = talk.received.reported
    assert isinstance(error, WorkerUnavailable)
    assert str(error) == "engine is gone"


@pytest.mark.parametrize("at_once", [False, True])
async def test_upstream_caller_refuses_the_response_connection_of_a_killed_call(
    caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    talk = Conversation()
    errors = METRICS.errors.value
    talk.call.kill()
    if at_once:  # A fast released worker connects and begins to answer in one segment.
        hello = frame.two_part(json_encode({"subject": talk.call.subject, "stream_type": "response"}), b"")
        talk.answer.data_received(hello + frame.two_part(b'{"error":null}', b"") + frame.two_part(b"", ITEM))
    else:
        talk.open()
    assert talk.transport.take() == [(b'"kill"', b"")]
    assert (talk.received.reported, talk.done, talk.transport.is_closed) == ([], [None], True)
    assert (caplog.messages, METRICS.errors.value) == ([], errors)


@pytest.mark.parametrize("garbage", [b"{", b'{"subject":5}'])
async def test_upstream_caller_closes_an_unreadable_response(garbage: bytes) -> None:
    talk = Conversation()
    talk.send_event(garbage)
    assert talk.transport.is_closed


async def test_upstream_caller_ends_the_call_on_a_malformed_item() -> None:
    talk = Conversation()
    talk.open()
    talk.send_event(b"", b"\x82\xa4data")
    assert isinstance(talk.received.reported[0], StreamIncomplete)


async def test_upstream_caller_fails_unanswered_calls_of_a_lost_connection() -> None:
    waiting, answered = Conversation(), Conversation()
    answered.open()
    for talk in (waiting, answered):
        talk.link.connection_lost(None)
    assert isinstance(waiting.received.reported[0], WorkerUnavailable)
    assert answered.received.reported == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Server unavailable: unknown endpoint abc/ns/x/y", WorkerUnavailable),
        ("Server overloaded: worker at capacity", WorkerOverloaded),
        ("Invalid request: no", InvalidArgument),
        ("something else", WorkerUnavailable),
    ],
)
async def test_upstream_caller_raises_a_typed_error_on_a_refusing_acknowledgement(
    text: str, kind: type[DynamoException]
) -> None:
    assert type(refusal(text)) is kind
    talk = Conversation()
    talk.link.data_received(frame.ack(text.encode()))
    assert type(talk.received.reported[0]) is kind


class Framed(Conversation):
    """Call whose request continues in frames, and the worker's connection that receives them."""

    def __init__(self) -> None:
        self.link, self.desk, self.requests = caller_end()
        self.received = ReceivedOutput()
        self.done: list[Exception | None] = []
        self.frames = RequestFrames()
        request = Request("r", b"", "msgpack", frames=self.frames)
        self.call = self.link.send(TARGET, request, self.received, lambda _, error: self.done.append(error))
        self.answer = self.desk.connection()
        self.transport = UpstreamTransport()
        self.answer.connection_made(self.transport)  # type: ignore[arg-type]

    def dial_in(self) -> None:
        self.send_event(json_encode({"subject": self.call.frames_subject, "stream_type": "request"}))

    async def written(self) -> None:
        assert await self.desk.tasks.wait(30)


async def test_upstream_caller_sends_the_address_of_its_request_frames() -> None:
    talk = Framed()
    [sent] = frame.UpstreamRequestDecoder(1 << 20).feed(talk.requests.data)
    address = read_stream_address(sent.message)
    assert address is not None
    assert (address.address, address.subject, address.stream_type) == (
        "127.0.0.1:2",
        talk.call.frames_subject,
        "request",
    )
    control = json_decode(frame.split_two_part(sent.message)[0])
    assert control["request_type"] == "many_in"


async def test_upstream_caller_sends_request_frames_in_order_with_a_final_marker() -> None:
    talk = Framed()
    talk.frames.add(b"one")
    talk.dial_in()
    talk.frames.add(b"two")
    talk.frames.end()
    await talk.written()
    assert talk.transport.take() == [(b"", b"one"), (b"", b"two"), (b'"sentinel"', b"")]
    assert talk.transport.is_closed
    assert talk.received.reported == []


async def test_upstream_caller_waits_for_a_slow_reader_of_request_frames() -> None:
    talk = Framed()
    talk.answer.pause_writing()
    talk.frames.add(b"one")
    talk.frames.end()
    talk.dial_in()
    assert not await talk.desk.tasks.wait(0.01)
    assert talk.transport.data == b""
    talk.answer.resume_writing()
    await talk.written()
    assert talk.transport.take()[0] == (b"", b"one")


async def test_upstream_caller_refuses_a_connection_for_withdrawn_request_frames() -> None:
    talk = Framed()
    subject = talk.call.frames_subject
    talk.call.kill()
    talk.send_event(json_encode({"subject": subject, "stream_type": "request"}))
    assert talk.transport.take() == [(b'"kill"', b"")]


async def test_upstream_caller_stops_sending_frames_when_the_worker_disconnects() -> None:
    talk = Framed()
    talk.dial_in()
    talk.answer.connection_lost(None)
    talk.frames.add(b"late")
    await talk.written()
    assert talk.transport.data == b""
    assert talk.done == []


async def test_upstream_caller_bounds_and_watches_a_response_connection_without_handshake() -> None:
    _, desk, _ = caller_end()
    answer, transport = desk.connection(), UpstreamTransport()
    answer.connection_made(transport)  # type: ignore[arg-type]
    assert len(desk.silent) == 1
    answer.data_received(struct.pack(">QQQ", 0, 1 << 20, 0) + bytes(HANDSHAKE_BYTES_MAX))
    assert transport.is_closed
    answer.connection_lost(None)
    assert len(desk.silent) == 0
    desk.close()


async def test_upstream_caller_accepts_large_items_after_the_handshake() -> None:
    talk = Conversation()
    assert len(talk.desk.silent) == 1
    handshake = frame.two_part(json_encode({"subject": talk.call.subject, "stream_type": "response"}), b"")
    item = frame.two_part(b"", b"\x82" + bytes(4 * HANDSHAKE_BYTES_MAX))
    talk.answer.data_received(handshake + frame.two_part(b'{"error":null}', b"") + item[:-1])
    assert len(talk.desk.silent) == 0
    assert not talk.transport.is_closed
    talk.desk.close()


def one_token(token: int, item: bytes = ITEM) -> bytes:
    """A released worker's message of one token."""
    return frame.two_part(b"", item.replace(b"\x91\x00", b"\x91" + msgpack_encode(token)))


TOKENS = [0, 127, 128, 255, 256, 65535, 65536, 151_643]


@pytest.mark.parametrize("item", [ITEM, RUST_ITEM])
async def test_upstream_caller_reads_tokens_that_arrive_together_and_in_pieces(item: bytes) -> None:
    talk = Conversation()
    talk.open()
    stream = b"".join(one_token(token, item) for token in TOKENS) + frame.two_part(b"", FINAL)
    talk.answer.data_received(stream)
    assert talk.received.reported == [*TOKENS, "end"]
    for size in (1, 7, 50, 101):
        talk = Conversation()
        talk.open()
        for start in range(0, len(stream), size):
            talk.answer.data_received(stream[start : start + size])
        assert talk.received.reported == [*TOKENS, "end"]


async def test_upstream_caller_delivers_no_token_after_the_receiver_killed_the_call() -> None:
    talk = Conversation()
    talk.open()
    talk.received.on_token = lambda token_id: talk.received.reported.append(token_id) or talk.call.kill()  # type: ignore[method-assign]
    talk.answer.data_received(one_token(5))
    talk.answer.data_received(one_token(6) + one_token(7))
    assert talk.received.reported == [5]


async def test_upstream_caller_ends_the_call_of_a_receiver_that_fails_at_a_later_token() -> None:
    talk = Conversation()
    talk.open()
    talk.answer.data_received(one_token(5))

    def fail(token_id: int) -> None:
        raise ZeroDivisionError(token_id)

    talk.received.on_token = fail  # type: ignore[method-assign]
    talk.answer.data_received(one_token(6) + one_token(7))
    assert [str(error) for error in talk.done] == ["receiver failed: 6"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        one_token(5)[:-1],
        frame.two_part(b"x", ITEM),
        frame.two_part(b"", ITEM.replace(b"\x91\x00", b"\x92\x00\x01")),
        frame.two_part(b"", ITEM.replace(b"\x91\x00", b"\x91\xcd\x00")),
        frame.two_part(b"", ITEM.replace(b"\x91\x00", b"\x91\xff")),
        frame.two_part(b"", FINAL),
        frame.two_part(b"", RUST_ITEM.replace(b"\x91\x00", b"\x92\x00\x01")),
        frame.two_part(b"", RUST_ITEM.replace(b"cum_log_probs\xc0", b"cum_log_probs\x00")),
        frame.two_part(b"", bytes(200)),
        frame.two_part(b"", b""),
    ],
)
def test_other_messages_are_left_to_the_decoder(data: bytes) -> None:
    assert leading_tokens(data) == ([], 0)
    first = one_token(300)
    assert leading_tokens(first + data) == ([300], len(first))
