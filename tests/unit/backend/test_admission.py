"""Admission: counts running requests, queues some, and rejects the rest."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo.backend.admission import Admission, AdmittedRequest, TracedReply, request_facts
from dynamo.core.clock import ManualClock
from dynamo.core.codec import json_encode, msgpack_encode
from dynamo.core.errors import Cancelled, DynamoException, EngineShutdown, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply, Request


class ReceivedOutput:
    """Reply that records its messages."""

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.items: list[Any] = []
        self.ends = 0
        self.error: BaseException | None = None
        self.is_cancelled = False
        self._callback: Callable[[], None] = lambda: None

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def leave(self) -> None:
        self.is_cancelled = True
        self._callback()

    def token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def item(self, value: Any) -> None:
        self.items.append(value)

    def finish(self) -> None:
        self.ends += 1

    def fail(self, error: BaseException) -> None:
        self.ends += 1
        self.error = error


class Engine:
    """An engine that does nothing until triggered."""

    def __init__(self) -> None:
        self.running: list[Reply] = []
        self.cancelled: list[Reply] = []
        self.refuses: Exception | None = None

    def begin(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.running.append(reply)

    def cancel(self, reply: Reply) -> None:
        self.running.remove(reply)
        self.cancelled.append(reply)


REQUEST = PreprocessedRequest(model="m", token_ids=[1])


class RecordedCalls:
    """Watcher that records its calls."""

    def __init__(self) -> None:
        self.rejections = 0
        self.waits: list[float] = []
        self.first_responses: list[float] = []

    def rejected(self) -> None:
        self.rejections += 1

    def began(self, waited_s: float) -> None:
        self.waits.append(waited_s)

    def answered(self, after_s: float) -> None:
        self.first_responses.append(after_s)


def admission(slots: int | None = None, queue_max: int = 0) -> tuple[Admission, Engine]:
    engine = Engine()
    return Admission(engine.begin, engine.cancel, slots=slots, queue_max=queue_max), engine


def test_engine_output_reaches_the_caller() -> None:
    gate, engine = admission()
    received = ReceivedOutput()
    gate.enter(REQUEST, received)
    engine.running[0].token(5)
    engine.running[0].item("last")
    engine.running[0].finish()
    assert (received.tokens, received.items, received.ends, received.error) == ([5], ["last"], 1, None)
    assert gate.requests == 0


def test_request_waits_in_the_queue_until_a_slot_is_free() -> None:
    gate, engine = admission(slots=1, queue_max=1)
    first, second = ReceivedOutput("first"), ReceivedOutput("second")
    gate.enter(REQUEST, first)
    gate.enter(REQUEST, second)
    assert [reply.request_id for reply in engine.running] == ["first"]
    engine.running.pop().finish()
    assert [reply.request_id for reply in engine.running] == ["second"]


def test_request_with_full_slots_and_queue_is_refused_as_overloaded() -> None:
    gate, _ = admission(slots=1, queue_max=1)
    gate.enter(REQUEST, ReceivedOutput())
    gate.enter(REQUEST, ReceivedOutput())
    with pytest.raises(WorkerOverloaded, match="worker at capacity"):
        gate.enter(REQUEST, ReceivedOutput())


def test_caller_disconnect_cancels_the_request_and_frees_its_slot() -> None:
    gate, engine = admission(slots=1, queue_max=1)
    first, second = ReceivedOutput("first"), ReceivedOutput("second")
    gate.enter(REQUEST, first)
    gate.enter(REQUEST, second)
    first.leave()
    assert [reply.request_id for reply in engine.cancelled] == ["first"]
    assert [reply.request_id for reply in engine.running] == ["second"]
    assert (first.ends, first.items[-1].finish_reason) == (1, "cancelled")


def test_caller_disconnect_in_the_queue_removes_the_request() -> None:
    gate, engine = admission(slots=1, queue_max=2)
    replies = [ReceivedOutput("0"), ReceivedOutput("1"), ReceivedOutput("2")]
    for reply in replies:
        gate.enter(REQUEST, reply)
    replies[1].leave()
    engine.running.pop().finish()
    assert [reply.request_id for reply in engine.running] == ["2"]
    assert engine.cancelled == []


def test_caller_disconnect_after_the_end_has_no_effect() -> None:
    gate, engine = admission()
    received = ReceivedOutput()
    gate.enter(REQUEST, received)
    engine.running.pop().finish()
    received.leave()
    assert engine.cancelled == []
    assert received.ends == 1


def test_request_refused_by_the_engine_occupies_no_slot() -> None:
    gate, engine = admission(slots=1)
    engine.refuses = InvalidArgument("too long")
    with pytest.raises(InvalidArgument):
        gate.enter(REQUEST, ReceivedOutput())
    assert gate.requests == 0


@pytest.mark.parametrize("way", ["refused", "overloaded", "cancelled", "cut", "failed"])
def test_request_without_output_is_in_no_reference_cycle(way: str) -> None:
    gate, engine = admission(slots=0 if way == "overloaded" else 1)
    engine.refuses = InvalidArgument("too long") if way == "refused" else None
    received = ReceivedOutput()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, AdmittedRequest) for one in gc.get_objects())
        with contextlib.suppress(DynamoException):
            gate.enter(REQUEST, received)
        if way == "cancelled":
            received.leave()
        elif way == "cut":
            gate.cut(Unknown("broken"))
        elif way == "failed":
            engine.running.pop().fail(Unknown("broken"))
        engine.running.clear()
        engine.cancelled.clear()
        engine.refuses = None  # Its traceback has the frames.
        received._callback = lambda: None
        assert sum(isinstance(one, AdmittedRequest) for one in gc.get_objects()) == before
    finally:
        gc.enable()


def test_queued_request_refused_by_the_engine_receives_the_error() -> None:
    gate, engine = admission(slots=1, queue_max=2)
    replies = [ReceivedOutput("0"), ReceivedOutput("1"), ReceivedOutput("2")]
    for reply in replies:
        gate.enter(REQUEST, reply)
    engine.refuses = InvalidArgument("too long")
    engine.running.pop().finish()
    assert [type(reply.error) for reply in replies] == [type(None), InvalidArgument, InvalidArgument]
    assert gate.requests == 0


def test_admission_refuse_finishes_running_requests_and_refuses_new_ones() -> None:
    gate, engine = admission()
    received = ReceivedOutput()
    gate.enter(REQUEST, received)
    gate.refuse()
    with pytest.raises(EngineShutdown):
        gate.enter(REQUEST, ReceivedOutput())
    engine.running.pop().finish()
    assert (received.ends, received.error) == (1, None)


def test_admission_cut_fails_all_running_and_queued_requests_once() -> None:
    gate, engine = admission(slots=1, queue_max=1)
    replies = [ReceivedOutput("0"), ReceivedOutput("1")]
    for reply in replies:
        gate.enter(REQUEST, reply)
    ticket = engine.running[0]
    gate.cut(EngineShutdown("over"))
    ticket.finish()
    assert [(reply.ends, type(reply.error)) for reply in replies] == [(1, EngineShutdown)] * 2
    assert [reply.request_id for reply in engine.cancelled] == ["0"]
    assert gate.requests == 0


def test_admission_measures_waits_from_arrival() -> None:
    engine, reported, clock = Engine(), RecordedCalls(), ManualClock()
    gate = Admission(engine.begin, engine.cancel, slots=1, queue_max=1, watcher=reported, clock=clock)
    gate.enter(REQUEST, ReceivedOutput())
    gate.enter(REQUEST, ReceivedOutput())
    with pytest.raises(WorkerOverloaded):
        gate.enter(REQUEST, ReceivedOutput())
    clock.advance(2)
    engine.running[0].token(1)
    clock.advance(1)
    engine.running[0].token(2)
    engine.running.pop().finish()
    clock.advance(4)
    engine.running[0].item("all of it")
    assert reported.rejections == 1
    assert reported.waits == [0, 3]
    assert reported.first_responses == [2, 7]


class Life(RuleBasedStateMachine):
    """Each request ends at most once, and the slot counts are consistent, for any sequence of events."""

    @initialize(slots=st.integers(1, 3), queue_max=st.integers(0, 3))
    def begin(self, slots: int, queue_max: int) -> None:
        self.gate, self.engine = admission(slots, queue_max)
        self.inside: list[ReceivedOutput] = []
        self.all: list[ReceivedOutput] = []

    @rule()
    def enter(self) -> None:
        received = ReceivedOutput(str(len(self.all)))
        try:
            self.gate.enter(REQUEST, received)
        except WorkerOverloaded:
            assert len(self.inside) == self.gate.slots + self.gate.queue_max
        else:
            self.all.append(received)
            self.inside.append(received)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        received = data.draw(st.sampled_from(self.inside))
        self.inside.remove(received)
        received.leave()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.engine.running))
        self.engine.running.remove(ticket)
        self.inside.remove(next(received for received in self.inside if received.request_id == ticket.request_id))
        ticket.finish()

    @precondition(lambda self: self.inside)
    @rule()
    def cut(self) -> None:
        self.gate.cut(DynamoException("over"))
        self.gate.refusal = None
        self.inside.clear()

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.gate.requests == len(self.inside)
        assert len(self.engine.running) == len(self.gate.running) == min(len(self.inside), self.gate.slots)
        assert all(received.ends <= 1 for received in self.all)
        assert all(received.ends == 0 for received in self.inside)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class FakeSpan:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.ends: list[BaseException | None] = []

    def headers(self) -> dict[str, str]:
        return {}

    def set(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def event(self, name: str, facts: Any) -> None: ...

    def set_status(self, *, is_well: bool, why: str = "") -> None: ...

    def end(self, error: BaseException | None = None) -> None:
        self.ends.append(error)


class FakeReply:
    request_id = "r"

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.is_cancelled = False

    def on_cancel(self, callback: Any) -> None:
        self.outputs.append(callback)

    def token(self, token_id: int) -> None:
        self.outputs.append(token_id)

    def item(self, value: Any) -> None:
        self.outputs.append(value)

    def finish(self) -> None:
        self.outputs.append("end")

    def fail(self, error: BaseException) -> None:
        self.outputs.append(error)


def traced() -> tuple[TracedReply, FakeReply, FakeSpan]:
    reply, span = FakeReply(), FakeSpan()
    return TracedReply(reply, span), reply, span


def test_span_attributes_of_decoded_and_encoded_requests_are_the_same() -> None:
    expected = {"model": "m", "input_tokens": 3}
    assert request_facts(PreprocessedRequest(model="m", token_ids=[1, 2, 3])) == expected
    for codec, encoded in (("json", json_encode), ("msgpack", msgpack_encode)):
        body = encoded({"model": "m", "token_ids": [1, 2, 3], "other": {}})
        assert request_facts(Request("r", body, codec)) == expected
    assert request_facts(Request("r", b"no message", "json")) == {}
    assert request_facts({"model": "m"}) == {"model": "m"}


def test_traced_reply_forwards_output_and_records_usage_in_the_span() -> None:
    one, reply, span = traced()
    last = EngineOutput([2], 0, finish_reason="length", completion_usage=CompletionUsage(5, 2, 7))
    one.token(1)
    one.item({"anything": 1})
    one.item(last)
    one.finish()
    assert reply.outputs == [1, {"anything": 1}, last, "end"]
    assert span.facts == {"finish_reason": "length", "input_tokens": 5, "output_tokens": 2}
    assert span.ends == [None]


def test_traced_reply_uses_the_token_method_of_the_reply() -> None:
    one, reply, _ = traced()
    assert one.token == reply.token


def test_traced_reply_records_errors_and_cancellation_in_the_span() -> None:
    one, reply, span = traced()
    error = Unknown("broken")
    one.fail(error)
    assert (reply.outputs, span.ends) == ([error], [error])
    one, reply, span = traced()
    reply.is_cancelled = True
    assert one.is_cancelled
    one.finish()
    assert isinstance(span.ends[0], Cancelled)
