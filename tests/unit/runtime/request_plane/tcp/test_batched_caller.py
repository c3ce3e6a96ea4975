"""Caller side of batched frames: handling of valid and invalid messages of a worker."""

from array import array
from typing import Any

import msgspec
import pytest
from tests.settle import until

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import Disconnected, DynamoException, InvalidArgument, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Item, Request, Target
from dynamo.runtime.request_plane.tcp.batched_caller import SILENT_S, STREAMS_MAX, BatchedCall, BatchedLink
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics
from dynamo.runtime.request_plane.tcp.liveness_probe import LOOKS
from dynamo.runtime.request_plane.wire_errors import to_wire

TARGET = Target(0x1F, "host:1", "1f/n/c/e", "msgpack", True)


class FakeTransport:
    def __init__(self) -> None:
        self.data = b""
        self.unsent = 0
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.data += data

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None


class ReceivedOutput:
    def __init__(self) -> None:
        self.reported: list[Any] = []

    def on_token(self, token_id: int) -> None:
        self.reported.append(token_id)

    def on_item(self, item: Item) -> None:
        self.reported.append(item)

    def on_end(self) -> None:
        self.reported.append("end")

    def on_error(self, error: Exception) -> None:
        self.reported.append(error)


class Talk:
    """Link whose worker is the test."""

    def __init__(self, limits: TcpLimits | None = None, *, has_pulse: bool = False) -> None:
        self.metrics = TcpMetrics(MetricsRegistry())
        self.closed: list[BatchedLink] = []
        self.link = BatchedLink("host:1", limits or TcpLimits(), self.metrics, self.closed.append, has_pulse=has_pulse)
        self.transport = FakeTransport()
        self.link.connection_made(self.transport)  # type: ignore[arg-type]
        self.done: list[Exception | None] = []

    def call(self, received: ReceivedOutput | None = None) -> tuple[BatchedCall, ReceivedOutput]:
        received = received or ReceivedOutput()
        request = Request("r", b"body", headers={"h": "1"}, metadata={"m": "2"})
        return self.link.send(TARGET, request, received, lambda _, error: self.done.append(error)), received

    def tokens(self, *pairs: tuple[int, int]) -> None:
        streams, tokens = array("I", [s for s, _ in pairs]), array("I", [t for _, t in pairs])
        self.link.data_received(frame.tokens_frame(streams, tokens))

    def sent(self) -> list[tuple[int, bytes]]:
        self.link._flush()
        data = self.transport.data.removeprefix(frame.HELLO)
        return frame.FrameDecoder(1 << 20).feed(data)


async def test_batched_caller_sends_greeting_and_all_requests_of_a_tick_in_one_write() -> None:
    talk = Talk()
    assert talk.transport.data == frame.HELLO
    calls = [talk.call()[0] for _ in range(3)]
    assert talk.transport.data == frame.HELLO, "nothing is sent before the tick ends"
    sent = [frame.read_request(payload) for kind, payload in talk.sent() if kind == frame.REQUEST]
    assert [stream for stream, _, _ in sent] == [call.stream for call in calls]
    assert {body for _, _, body in sent} == {b"body"}


async def test_batched_caller_delivers_items_and_ignores_unknown_streams() -> None:
    talk = Talk()
    (one, first), (two, second) = talk.call(), talk.call()
    talk.tokens((one.stream, 5), (two.stream, 6), (999, 7), (one.stream, 8))
    talk.link.data_received(frame.item_frame(two.stream, frame.ITEM_JSON, b'"x"') + frame.item_frame(999, 0, b""))
    ends = array("I", [one.stream, 999])
    talk.link.data_received(frame.streams_frame(frame.ACK, ends) + frame.streams_frame(frame.END, ends))
    error = msgpack_encode(to_wire(InvalidArgument("no")))
    talk.link.data_received(frame.stream_frame(frame.ERROR, two.stream, error))
    assert first.reported == [5, 8, "end"]
    assert second.reported[:2] == [6, Item(b'"x"', "json")]
    assert isinstance(second.reported[2], InvalidArgument)
    assert [type(error) for error in talk.done] == [type(None), InvalidArgument]


async def test_batched_caller_delivers_no_item_after_a_receiver_kills_its_call_within_a_frame() -> None:
    talk = Talk()
    call, received = talk.call()
    received.on_token = lambda token_id: (received.reported.append(token_id), call.kill())  # type: ignore[method-assign, assignment, func-returns-value]
    talk.tokens((call.stream, 1), (call.stream, 2))
    assert received.reported == [1]
    assert talk.done == [None]
    assert talk.sent()[-1] == (frame.KILL, frame._STREAM.pack(call.stream))


async def test_batched_caller_sends_no_request_for_a_killed_call() -> None:
    talk = Talk()
    call, _ = talk.call()
    call.kill()
    call.kill()
    call.stop()
    assert [kind for kind, _ in talk.sent()] == [frame.REQUEST, frame.KILL]


@pytest.mark.parametrize(
    "garbage",
    [
        frame.frame(99, b"1234"),
        frame.frame(frame.TOKENS, b"123"),
        frame.frame(frame.TOKENS, b"1234"),
        frame.frame(frame.ITEM, b"12"),
        frame.frame(frame.ERROR, b"\0\0\0\0\xc1"),
        b"\xff\xff\xff\xff\x01",
    ],
)
async def test_batched_caller_disconnects_from_a_worker_without_batched_frames(garbage: bytes) -> None:
    talk = Talk()
    talk.call()
    talk.link.data_received(garbage)
    assert talk.transport.is_aborted
    assert talk.metrics.errors.value == 1


async def test_batched_caller_fails_every_call_of_a_broken_connection() -> None:
    talk = Talk()
    everyone = [talk.call()[1] for _ in range(3)]
    talk.link.connection_lost(OSError("reset by peer"))
    assert [[type(reported) for reported in received.reported] for received in everyone] == [[Disconnected]] * 3
    assert "reset by peer" in str(everyone[0].reported[0])
    assert talk.closed == [talk.link]
    assert not talk.link.is_open


async def test_batched_caller_disconnects_from_a_worker_that_does_not_read() -> None:
    talk = Talk()
    talk.link.pause_writing()
    assert talk.transport.is_aborted
    assert talk.metrics.slow_readers.value == 1


async def test_batched_caller_ends_the_stream_of_a_receiver_that_raises_on_an_item(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk = Talk()
    (bad, broken), (good, sound) = talk.call(), talk.call()
    broken.on_item = lambda item: int("no")  # type: ignore[method-assign, assignment, return-value]
    talk.link.data_received(frame.item_frame(bad.stream, 0, b"\xc0") + frame.item_frame(good.stream, 0, b"\xc0"))
    assert isinstance(broken.reported[0], DynamoException)
    assert sound.reported == [Item(b"\xc0", "msgpack")]
    assert talk.sent()[-1][0] == frame.KILL
    assert "Traceback" in caplog.text


async def test_batched_caller_continues_after_a_receiver_raises_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk()
    (bad, broken), (good, sound) = talk.call(), talk.call()
    broken.on_end = lambda: int("no")  # type: ignore[method-assign, assignment, return-value]
    talk.link.data_received(frame.streams_frame(frame.END, array("I", [bad.stream, good.stream])))
    assert sound.reported == ["end"]
    assert talk.done == [None, None]
    assert "failed at its end" in caplog.text


async def test_batched_caller_reuses_stream_numbers_and_skips_those_in_use() -> None:
    talk = Talk()
    first, _ = talk.call()
    talk.link._next_stream = STREAMS_MAX - 1
    assert [talk.call()[0].stream for _ in range(2)] == [STREAMS_MAX - 1, first.stream + 1]


class Clock:
    """A loop's time, and no timers."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: object) -> None:
        pass


async def test_batched_caller_considers_a_worker_without_acknowledgement_unresponsive() -> None:
    clock = Clock()
    talk = Talk()
    talk.link._unacknowledged._loop = clock  # type: ignore[assignment]
    call, _ = talk.call()
    clock.now = SILENT_S
    seen = [talk.link.is_silent]
    clock.now += 0.1
    seen.append(talk.link.is_silent)
    talk.link.data_received(frame.streams_frame(frame.ACK, array("I", [call.stream])))
    assert [*seen, talk.link.is_silent] == [False, True, False]


async def test_batched_caller_probes_a_worker_missing_from_discovery_during_calls() -> None:
    talk = Talk()
    talk.link.suspect(TARGET.instance_id)
    assert talk.sent() == [], "no request waits for it"
    call, received = talk.call()
    talk.link.suspect(0x20)
    talk.link.suspect(TARGET.instance_id)
    (_, mine), (kind, question) = talk.sent()
    assert kind == frame.REQUEST
    stream, head, body = frame.read_request(question)
    assert stream != frame.read_request(mine)[0] == call.stream
    assert (msgspec.msgpack.decode(head, type=frame.RequestHead).path, body) == ("", b"")
    refusal = msgpack_encode(to_wire(WorkerUnavailable("unknown endpoint ")))
    talk.link.data_received(frame.stream_frame(frame.ERROR, stream, refusal))
    assert not talk.transport.is_aborted
    assert received.reported == []
    talk.link.connection_lost(None)
    assert isinstance(received.reported[0], Disconnected)


async def test_batched_caller_fails_calls_of_a_worker_that_does_not_answer_probes() -> None:
    talk = Talk(TcpLimits(request_timeout_s=0.0))
    call, received = talk.call()
    talk.link.data_received(frame.streams_frame(frame.ACK, array("I", [call.stream])))
    talk.link.suspect(TARGET.instance_id)
    await until(lambda: talk.transport.is_aborted)
    talk.link.connection_lost(None)
    assert [type(reported) for reported in received.reported] == [Disconnected]


class CancellingReceiver(ReceivedOutput):
    """Receiver that kills another call when its own fails, as a response of several prompts does."""

    other: BatchedCall | None = None

    def on_error(self, error: Exception) -> None:
        super().on_error(error)
        if self.other is not None:
            self.other.kill()


async def test_batched_caller_ends_a_call_once_when_cancelled_during_a_disconnect() -> None:
    talk = Talk()
    received = CancellingReceiver()
    talk.link.send(TARGET, Request("r", b"body"), received, lambda _, error: talk.done.append(error))
    received.other, other = talk.call()
    talk.link.connection_lost(None)
    assert [type(one) for one in talk.done] == [Disconnected, type(None)]
    assert [type(one) for one in received.reported] == [Disconnected]
    assert other.reported == []


# Liveness of the worker ---------------------------------------------------------------------------------------------


class MigratableReceiver(ReceivedOutput):
    """Receiver that can migrate while `has_alternative`."""

    def __init__(self) -> None:
        super().__init__()
        self.has_alternative = True

    def leaves_silent_worker(self) -> bool:
        return self.has_alternative


ALIVE = frame.frame(frame.ALIVE, b"")


def kinds(talk: Talk) -> list[int]:
    return [kind for kind, _ in talk.sent()]


async def test_batched_caller_probes_only_workers_with_open_calls() -> None:
    talk = Talk(has_pulse=True)
    assert talk.link._look_timer is None
    call, _ = talk.call()
    assert talk.link._look_timer is not None
    talk.link._look()
    assert kinds(talk) == [frame.REQUEST, frame.PROBE]
    call.kill()
    talk.link._look()
    assert talk.link._look_timer is None, "no request waits for it"


async def test_batched_caller_does_not_probe_a_worker_without_probe_support() -> None:
    talk = Talk()
    talk.call()
    assert talk.link._look_timer is None
    talk = Talk(TcpLimits(silence_s=0.0), has_pulse=True)
    talk.call()
    assert talk.link._look_timer is None


async def test_batched_caller_moves_migratable_calls_off_an_unresponsive_worker() -> None:
    talk = Talk(has_pulse=True)
    (leaving, migratable), (_, patient) = talk.call(MigratableReceiver()), talk.call()
    for _ in range(LOOKS):
        talk.link._look()
    assert [type(reported) for reported in migratable.reported] == [Disconnected]
    assert "unresponsive" in str(migratable.reported[0])
    assert patient.reported == []
    assert talk.link.is_silent
    assert talk.link.is_open, "it may come back"
    assert (frame.KILL, frame._STREAM.pack(leaving.stream)) in talk.sent(), "should it come back, it need not go on"


async def test_batched_caller_moves_a_call_once_another_worker_appears() -> None:
    talk = Talk(has_pulse=True)
    receiver = MigratableReceiver()
    receiver.has_alternative = False
    talk.call(receiver)
    for _ in range(LOOKS + 2):
        talk.link._look()
    assert receiver.reported == []
    receiver.has_alternative = True
    talk.link._look()
    assert len(receiver.reported) == 1


async def test_batched_caller_keeps_calls_of_a_busy_worker_that_answers_probes() -> None:
    talk = Talk(has_pulse=True)
    _, receiver = talk.call(MigratableReceiver())
    for _ in range(5 * LOOKS):
        talk.link._look()
        if kinds(talk)[-1] == frame.PROBE:
            talk.link.data_received(ALIVE)
    assert receiver.reported == []
    assert not talk.link.is_silent


async def test_batched_caller_counts_progress_of_a_large_request_as_activity() -> None:
    talk = Talk(has_pulse=True)
    _, receiver = talk.call(MigratableReceiver())
    for unsent in range(5 * LOOKS, 0, -1):
        talk.transport.unsent = unsent
        talk.link._look()
    assert receiver.reported == []
    for _ in range(LOOKS):
        talk.link._look()
    assert len(receiver.reported) == 1
    assert talk.metrics.left_silent.value == 1


async def test_batched_caller_considers_a_worker_responsive_again_after_an_answer() -> None:
    talk = Talk(has_pulse=True)
    talk.call()
    for _ in range(LOOKS):
        talk.link._look()
    assert talk.link.is_silent
    talk.link.data_received(ALIVE)
    assert not talk.link.is_silent


async def test_batched_caller_stops_watching_a_broken_connection() -> None:
    talk = Talk(has_pulse=True)
    talk.call()
    timer = talk.link._look_timer
    talk.link.connection_lost(None)
    assert timer is not None and timer.cancelled()
