"""Worker side of batched frames: the bytes written in one tick of the loop."""

from typing import Any

import pytest

from dynamo.core.codec import msgpack_decode, msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.request_plane.tcp.batched_worker import BatchedSession
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics
from dynamo.runtime.request_plane.tcp.unfinished import UnfinishedFrames
from dynamo.runtime.server import Dispatcher

PATH = "1f/n/c/e"


class FakeTransport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None


class Talk:
    """Session whose caller is the test."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.dispatcher = Dispatcher()
        self.dispatcher.add(PATH, lambda _, reply: self.replies.append(reply))
        self.closed: list[Any] = []
        self.metrics = TcpMetrics(MetricsRegistry())
        self.unfinished = UnfinishedFrames(1 << 20, self.metrics)
        self.session = BatchedSession(self.dispatcher, TcpLimits(), self.metrics, self.unfinished, self.closed.append)
        self.transport = FakeTransport()
        self.session.connection_made(self.transport)  # type: ignore[arg-type]

    def request(self, stream: int, path: str = PATH, codec: str = "msgpack") -> None:
        head = frame.RequestHead(f"r{stream}", path, codec, {}, {})
        self.session.data_received(frame.request_frame(stream, msgpack_encode(head), b"\x80"))

    def tick(self) -> list[tuple[int, bytes]]:
        """Return the bytes of the tick, which must be one write."""
        self.session._flush()
        writes, self.transport.writes = self.transport.writes, []
        assert len(writes) <= 1
        return frame.FrameDecoder(1 << 20).feed(writes[0]) if writes else []


def kinds(frames: list[tuple[int, bytes]]) -> list[int]:
    return [kind for kind, _ in frames]


async def test_batched_worker_sends_all_tokens_of_a_tick_in_one_frame() -> None:
    talk = Talk()
    for stream in range(64):
        talk.request(stream)
    assert kinds(talk.tick()) == [frame.ACK]
    for reply in talk.replies:
        reply.token(7)
    [(kind, payload)] = talk.tick()
    assert (kind, len(payload)) == (frame.TOKENS, 64 * 8)
    assert frame.read_u32s(payload) == (*range(64), *[7] * 64)
    assert talk.tick() == []


async def test_batched_worker_keeps_tokens_together_when_other_streams_send_items() -> None:
    talk = Talk()
    for stream in range(4):
        talk.request(stream)
    talk.tick()
    for reply in talk.replies:
        reply.token(1)
        reply.item("x")
        reply.finish()
    frames = talk.tick()
    assert kinds(frames) == [frame.TOKENS, *[frame.ITEM] * 4, frame.END]
    assert frame.read_u32s(frames[-1][1]) == (0, 1, 2, 3)


async def test_batched_worker_sends_a_token_after_an_earlier_item_of_its_stream() -> None:
    talk = Talk()
    talk.request(0)
    talk.request(1)
    talk.tick()
    one, two = talk.replies
    one.item("x")
    one.token(1)
    two.token(2)
    frames = talk.tick()
    assert kinds(frames) == [frame.ITEM, frame.TOKENS]
    one.token(3)
    two.token(4)
    assert kinds(talk.tick()) == [frame.TOKENS]


async def test_batched_worker_sends_an_error_after_earlier_output() -> None:
    talk = Talk()
    talk.request(0)
    talk.replies[0].token(1)
    talk.replies[0].fail(InvalidArgument("no"))
    frames = talk.tick()
    assert kinds(frames) == [frame.ACK, frame.TOKENS, frame.ERROR]
    stream, data = frame.read_stream(frames[-1][1])
    assert (stream, msgpack_decode(data)["message"]) == (0, "no")


async def test_batched_worker_does_not_acknowledge_a_refused_request() -> None:
    talk = Talk()
    talk.request(0, path="unknown/endpoint")
    assert kinds(talk.tick()) == [frame.ERROR]


async def test_batched_worker_marks_json_items() -> None:
    talk = Talk()
    talk.request(0, codec="json")
    talk.tick()
    talk.replies[0].item({"a": 1})
    [(_, payload)] = talk.tick()
    assert frame.read_item(payload) == (0, frame.ITEM_JSON, b'{"a":1}')


async def test_batched_worker_rejects_a_token_that_is_not_u32_in_the_engine() -> None:
    talk = Talk()
    talk.request(0)
    talk.tick()
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            talk.replies[0].token(wrong)
    talk.replies[0].token(9)
    [(_, payload)] = talk.tick()
    assert frame.read_u32s(payload) == (0, 9)


async def test_batched_worker_closes_the_connection_on_a_reused_stream_number() -> None:
    talk = Talk()
    talk.request(0)
    talk.request(0)
    assert talk.transport.is_closed
    assert talk.metrics.errors.value == 1


async def test_batched_worker_ignores_messages_of_finished_streams() -> None:
    talk = Talk()
    for kind in (frame.STOP, frame.KILL):
        talk.session.data_received(frame.stream_frame(kind, 5))
    assert not talk.transport.is_closed


async def test_batched_worker_flushes_before_close() -> None:
    talk = Talk()
    talk.request(0)
    talk.replies[0].finish()
    talk.session.close()
    assert kinds(frame.FrameDecoder(1 << 20).feed(talk.transport.writes[0])) == [frame.ACK, frame.END]
    assert talk.transport.is_closed


async def test_batched_worker_cancels_requests_of_a_disconnected_caller() -> None:
    talk = Talk()
    talk.request(0)
    talk.tick()
    talk.session.connection_lost(None)
    [reply] = talk.replies
    assert reply.is_cancelled
    reply.token(1)
    reply.finish()
    assert talk.tick() == []
    assert talk.closed == [talk.session]


async def test_batched_worker_hands_over_the_whole_request() -> None:
    talk = Talk()
    got: list[Request] = []
    talk.dispatcher.add(PATH, lambda request, _: got.append(request))
    head = frame.RequestHead("id", PATH, "json", {"h": "1"}, {"m": "2"})
    talk.session.data_received(frame.request_frame(3, msgpack_encode(head), b"{}"))
    assert got == [Request("id", b"{}", "json", {"h": "1"}, {"m": "2"})]


async def test_batched_worker_answers_a_probe_in_the_same_tick() -> None:
    talk = Talk()
    talk.session.data_received(frame.frame(frame.PROBE, b""))
    assert talk.tick() == [(frame.ALIVE, b"")]


async def test_batched_worker_reports_its_unfinished_frame_until_it_is_complete_or_lost() -> None:
    talk = Talk()
    head = frame.RequestHead("r1", PATH, "msgpack", {}, {})
    whole = frame.request_frame(1, msgpack_encode(head), b"\x80" * 100)
    talk.session.data_received(whole[:50])
    assert talk.unfinished.size == 50
    talk.session.data_received(whole[50:])
    assert talk.unfinished.size == 0
    assert len(talk.replies) == 1
    talk.session.data_received(whole[:50])
    talk.session.connection_lost(None)
    assert (talk.unfinished.size, len(talk.unfinished)) == (0, 0)
    talk.unfinished.close()
