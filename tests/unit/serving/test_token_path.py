"""Token path, in Python and compiled: equal bytes, counts and observations."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.serving.choice import Choice, Frame
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.request_state import RequestState
from dynamo.serving.token_path import IS_COMPILED, on_token, python_on_token, python_write_waiting, write_waiting
from dynamo.text.detokenizer import TokenTable, text_json_of

RAW = [b"<e>", b"Hi", b" you", "é".encode()[:1], "é".encode()[1:], b'"', b"x" * 3000, b"stop"]
TABLE = TokenTable(RAW, text_json_of(RAW), skipped=frozenset({0}))
WAYS = [(python_on_token, python_write_waiting)] + ([(on_token, write_waiting)] if IS_COMPILED else [])
ways = pytest.mark.parametrize(("on_token", "write_waiting"), WAYS, ids=["python", "compiled"][: len(WAYS)])
OnToken = Callable[[Generation, int], None]
WriteWaiting = Callable[[Sequence[Choice], float], None]


class Exchange:
    """The parts of an exchange that the token path uses."""

    __slots__ = ("disconnected", "error", "fd", "is_direct", "response_complete", "sent")

    def __init__(self, fd: int = -1) -> None:
        self.disconnected = self.response_complete = False
        self.is_direct = fd >= 0
        self.fd = fd
        self.sent = b""
        self.error: Exception | None = None

    def write_framed(self, frame: Frame, text: bytes) -> None:
        if not self.disconnected and not self.response_complete:
            data = frame.head + text + frame.tail
            self.write_chunk(b"%x\r\n%b\r\n" % (len(data), data))

    def write_chunk(self, chunk: bytes) -> None:
        if self.error is not None:
            raise self.error
        if self.is_direct:
            with suppress(OSError):
                chunk = chunk[os.write(self.fd, chunk) :]
            if not chunk:
                return
        self.is_direct = False
        self.sent += chunk


class Response:
    """A streamed response whose choices have frames from the start."""

    def __init__(self, metrics: FrontendMetrics, exchange: Exchange, queue: list[Choice], **stop: Any) -> None:
        self.exchange = exchange
        self.state = RequestState(metrics, "chat_completions", "m", stream=True, started_s=0.0)
        self.state.tokens(1, 1.0)
        self.is_over = False
        self.queue = queue
        self.flushed: list[int] = []
        self.errors: list[Exception] = []
        n = stop.pop("n", None)
        request = PreprocessedRequest(
            "m", [1], stop_conditions=StopConditions(**stop), sampling_options=SamplingOptions(n=n)
        )
        self.generation = Generation(request, TABLE, self, 0)  # type: ignore[arg-type]
        for choice in self.generation.choices:
            choice.join(queue)
            choice.open(Frame(b"data: <%d>" % choice.index, b"</>\n\n", exchange, self.state))

    def touch(self, choice: Choice) -> None:
        self.queue.append(choice)

    def flush(self, choice: Choice, now_s: float) -> None:
        self.flushed.append(choice.index)
        choice.take_pieces()

    def fail(self, error: Exception) -> None:
        self.is_over = True
        self.errors.append(error)

    def ended(self, generation: Generation) -> None:
        self.exchange.response_complete = self.is_over = True


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        for end in ends:
            os.set_blocking(end, False)
        yield ends
    finally:
        for end in ends:
            os.close(end)


def chunks(data: bytes) -> list[bytes]:
    """Return the contents of HTTP chunks."""
    found = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :][:2] == b"\r\n"
        data = rest[int(size, 16) + 2 :]
    return found


def metrics_of() -> tuple[FrontendMetrics, MetricsRegistry]:
    registry = MetricsRegistry()
    return FrontendMetrics(registry), registry


steps = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(RAW))), max_size=6), max_size=8)
"""The tokens of each tick: number of the response, token id."""


@pytest.mark.skipif(not IS_COMPILED, reason="the compiled module is not built")
@settings(max_examples=150, deadline=None)
@given(ticks=steps, keeps=st.booleans(), leaves=st.integers(0, 20), stop=st.sampled_from([None, ["stop"], ["you"]]))
def test_compiled_token_path_writes_counts_and_observes_as_the_python_functions(
    ticks: list[list[tuple[int, int]]], keeps: bool, leaves: int, stop: list[str] | None
) -> None:
    results = []
    for push, write in WAYS:
        metrics, registry = metrics_of()
        queue: list[Choice] = []
        responses = [Response(metrics, Exchange(), queue, stop=stop if number else None) for number in range(3)]
        if keeps:
            responses[0].generation.keep_ids()
        for tick, tokens in enumerate(ticks):
            responses[2].exchange.disconnected = responses[2].is_over = tick >= leaves
            for number, token in tokens:
                push(responses[number].generation, token)
            waiting = queue.copy()
            queue.clear()
            write(waiting, 2.0 + tick / 8)
        results.append(
            [
                (one.exchange.sent, one.generation.tokens, one.generation.received_ids, one.state.last_s, one.flushed)
                for one in responses
            ]
        )
        results[-1].append([line for line in registry.render().splitlines() if "inter_token" in line])  # type: ignore[arg-type]
    assert results[0] == results[1]


@ways
def test_tokens_of_one_tick_are_one_chunk_and_one_observation_each(
    on_token: OnToken, write_waiting: WriteWaiting
) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    response = Response(metrics, Exchange(), queue)
    for token in (1, 5, 2):
        on_token(response.generation, token)
    assert queue == response.generation.choices, "the choice is in the queue once"
    write_waiting(queue, 4.0)
    assert chunks(response.exchange.sent) == [b'data: <0>Hi</>\n\ndata: <0>\\"</>\n\ndata: <0> you</>\n\n']
    itl = response.state.metrics.itl
    assert (itl.count, itl.sum) == (3, 3.0)
    assert response.state.last_s == 4.0 and response.generation.choices[0].pieces == []


@ways
def test_character_of_two_tokens_passes_through_the_detokenizer(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    response = Response(metrics, Exchange(), queue)
    for token in (3, 4, 99, 1):  # Id 99 is not in the table.
        on_token(response.generation, token)
    write_waiting(queue, 2.0)
    assert chunks(response.exchange.sent) == ["data: <0>é</>\n\ndata: <0>Hi</>\n\n".encode()]
    assert response.generation.tokens == 4


@ways
def test_bytes_that_a_full_socket_does_not_take_pass_to_the_exchange_in_order(
    on_token: OnToken, write_waiting: WriteWaiting
) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    with pipe() as (reader, writer):
        response = Response(metrics, Exchange(writer), queue)
        for tick in range(60):
            on_token(response.generation, 6)
            write_waiting(queue, float(tick))
            queue.clear()
        assert response.exchange.sent and not response.exchange.is_direct
        received = os.read(reader, 1 << 20)
    assert received and chunks(received + response.exchange.sent) == [b"data: <0>" + b"x" * 3000 + b"</>\n\n"] * 60


@ways
def test_error_of_the_socket_is_left_to_the_exchange(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    with pipe() as (reader, _writer):
        response = Response(metrics, Exchange(reader), queue)  # Writing to it fails.
        on_token(response.generation, 1)
        write_waiting(queue, 2.0)
    assert chunks(response.exchange.sent) == [b"data: <0>Hi</>\n\n"]


@ways
def test_failed_write_ends_its_response_only(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    first, second = Response(metrics, Exchange(), queue), Response(metrics, Exchange(), queue)
    first.exchange.error = RuntimeError("no transport")
    for one in (first, second):
        on_token(one.generation, 1)
    write_waiting(queue, 2.0)
    assert [str(error) for error in first.errors] == ["no transport"]
    assert chunks(second.exchange.sent) == [b"data: <0>Hi</>\n\n"] and not second.errors


@ways
def test_choice_without_a_frame_and_response_that_is_over_are_flushed_by_their_response(
    on_token: OnToken, write_waiting: WriteWaiting
) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    first, second = Response(metrics, Exchange(), queue), Response(metrics, Exchange(), queue)
    first.generation.choices[0].open(None)
    for one in (first, second):
        on_token(one.generation, 1)
    second.is_over = second.exchange.disconnected = True
    write_waiting(queue, 2.0)
    assert (first.flushed, second.flushed) == ([0], [0])
    assert not first.exchange.sent and not second.exchange.sent


@ways
def test_chunk_larger_than_the_compiled_buffer_is_whole(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    response = Response(metrics, Exchange(), queue)
    for _ in range(5):
        on_token(response.generation, 6)
    write_waiting(queue, 2.0)
    assert chunks(response.exchange.sent) == [(b"data: <0>" + b"x" * 3000 + b"</>\n\n") * 5]


@ways
def test_arguments_of_other_types_are_refused(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    response = Response(metrics, Exchange(), [])
    with pytest.raises(TypeError):
        on_token(response.generation, "1")  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        on_token(object(), 1)  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        write_waiting([object()], 1.0)  # type: ignore[list-item]


@ways
def test_token_path_keeps_no_reference_to_what_it_has_written(on_token: OnToken, write_waiting: WriteWaiting) -> None:
    metrics, _ = metrics_of()
    queue: list[Choice] = []
    response = Response(metrics, Exchange(), queue)
    choice, piece, now_s = response.generation.choices[0], TABLE.text_json[1], float("3.25")
    kept: list[Any] = [response, response.exchange, response.state, choice, choice.frame, choice.pieces, piece, now_s]
    gc.collect()

    def counts() -> list[int]:
        return [sys.getrefcount(one) for one in kept]

    on_token(response.generation, 1)
    write_waiting(queue, now_s)  # `last_s` now refers to it.
    queue.clear()
    before = counts()
    for _ in range(100):
        on_token(response.generation, 1)
        write_waiting(queue, now_s)
        queue.clear()
    assert counts() == before
