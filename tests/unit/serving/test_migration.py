"""A generation whose worker fails continues on another worker, with the same text."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tests.settle import turns, until

from dynamo.core.clock import ManualClock
from dynamo.core.codec import encode_client_json, msgpack_decoder
from dynamo.core.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    InvalidArgument,
    Unknown,
    WorkerOverloaded,
    WorkerUnavailable,
)
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    GuidedDecoding,
    OutputOptions,
    PreprocessedRequest,
    Resumed,
    Routing,
    SamplingOptions,
    StopConditions,
    resumed_of,
)
from dynamo.runtime.request_plane.base import Item
from dynamo.serving import migration
from dynamo.serving.attempts import (
    RETRY_MAX_S,
    SENDS_MAX,
)
from dynamo.serving.choice import Choice
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.text.detokenizer import TokenTable, text_json_of

RAW = [f"<{number}>".encode() for number in range(50)]
TABLE = TokenTable(RAW, text_json_of(RAW))
PROMPT = [3, 1, 4]
decode = msgpack_decoder(PreprocessedRequest).decode


def next_token(tokens: list[int]) -> int:
    """The tokens of every worker after these tokens: a model that is a pure function of its prompt."""
    return (7 * len(tokens) + sum(tokens[-2:])) % len(RAW)


class Worker:
    """Worker that answers a request and fails after a given number of tokens."""

    name = "m"
    resumes_sampling = False

    def __init__(self, breaks: list[int]) -> None:
        self.breaks = breaks
        """Number of tokens after which each send fails, in order."""
        self.requests: list[PreprocessedRequest] = []
        self.excluded: list[frozenset[int]] = []

    instance_id = 0

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    sessions = None
    routed = None

    @property
    def current(self) -> "Worker":
        return self

    def inflight(self, instance_id: int) -> int:
        return 3

    async def choose(self, *_: object) -> None:
        """No KV router here."""

    def bound(self, *_: object) -> None:
        """Return a request without session bindings."""

    async def send(self, body: bytes, receiver: Generation, *, exclude: frozenset[int], **_: Any) -> "Worker":
        request = decode(body)
        self.requests.append(request)
        self.excluded.append(exclude)
        self.instance_id = len(self.requests)
        self.pending: Callable[[], None] = lambda: self.answer(request, receiver)
        return self

    def answer(self, request: PreprocessedRequest, receiver: Generation) -> None:
        tokens = list(request.token_ids)
        limit = request.stop_conditions.max_tokens
        assert limit is not None
        breaks_at = self.breaks.pop(0) if self.breaks else limit + 1
        for count in range(limit):
            if count == breaks_at:
                receiver.on_error(Disconnected("killed"))
                return
            token = next_token(tokens)
            tokens.append(token)
            if count == limit - 1:
                usage = CompletionUsage(len(request.token_ids), limit, len(request.token_ids) + limit)
                receiver.on_item(
                    Item(encode_client_json(EngineOutput([token], 0, finish_reason="length", completion_usage=usage)))
                )
            else:
                receiver.on_token(token)
        if breaks_at == limit:
            receiver.on_error(Disconnected("killed"))
        else:
            receiver.on_end()


class Scene:
    """Request with its workers."""

    def __init__(
        self,
        breaks: list[int],
        limit: int = 10,
        tokens_max: int | None = None,
        *,
        is_whole: bool = False,
        **request: Any,
    ) -> None:
        self.is_whole = is_whole
        self.worker = request.pop("worker", None) or Worker(breaks)
        self.clock = ManualClock()
        self.registry = MetricsRegistry()
        self.ends: list[Exception | None] = []
        self.repeats: list[Exception] = []
        request_echo = request.pop("echo", "")
        stop = StopConditions(max_tokens=request.pop("max_tokens", 12), min_tokens=request.pop("min_tokens", None))
        self.request = PreprocessedRequest("m", list(PROMPT), stop_conditions=stop, **request)
        self.generation = Generation(self.request, TABLE, self, 0, echo=request_echo)
        self.generation.begin()
        self.dispatch = Dispatch(
            self.worker,  # type: ignore[arg-type]
            self.generation,
            "id",
            {},
            policy=MigrationPolicy(limit, tokens_max),
            metrics=FrontendMetrics(self.registry),
            clock=self.clock,
        )
        self.generation.assign(self.dispatch)

    def touch(self, choice: Choice) -> None: ...

    def ended(self, generation: Generation) -> None:
        self.ends.append(None)

    def failed(self, generation: Generation, error: Exception) -> None:
        if self.dispatch.may_repeat(error):
            generation.revive()
            self.repeats.append(error)
        else:
            self.ends.append(error)

    async def run(self) -> str:
        await self.dispatch.send()
        self.worker.pending()
        while self.repeats:
            sends = len(self.worker.requests)
            await self.repeat()
            if len(self.worker.requests) > sends:
                self.worker.pending()
        return self.generation.choices[0].text()

    async def repeat(self) -> None:
        """Step until the end; the clock advances by each wait."""
        repeating = asyncio.create_task(self.dispatch.repeat(self.repeats.pop(), 7.5))
        while not repeating.done():
            await turns()
            if self.clock._sleepers:
                self.clock.advance(RETRY_MAX_S)
        await repeating

    def metric(self, line: str) -> bool:
        return line in self.registry.render()


def whole_text(count: int = 12) -> str:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return "".join(RAW[token].decode() for token in tokens[len(PROMPT) :])


@given(st.lists(st.integers(0, 12), max_size=8))
async def test_migration_keeps_token_order_and_count_at_any_failure_point(breaks: list[int]) -> None:
    scene = Scene(breaks)
    before_first = 0
    for count in breaks:
        if count:
            break
        before_first += 1
    text = await scene.run()
    if before_first >= SENDS_MAX:
        assert isinstance(scene.ends[0], Disconnected)
        return
    if scene.ends == [None]:
        assert text == whole_text()
        assert scene.generation.counted() == CompletionUsage(3, 12, 15)
    else:
        assert whole_text().startswith(text)
    assert len(scene.ends) == 1


async def test_moves_record_the_silence_before_them_and_the_first_output_after() -> None:
    scene = Scene([3, 0])
    assert await scene.run() == whole_text()
    first, second = scene.dispatch.moves
    assert [(one.tokens, one.silent_s) for one in (first, second)] == [(3, 7.5)] * 2
    assert first.resumed_s == 0, "the second worker failed without any output"
    assert second.resumed_s >= second.at_s > 0
    assert scene.dispatch.requests_ahead == 2


async def test_worker_selection_time_is_recorded_for_each_send() -> None:
    scene = Scene([0])
    await scene.run()
    assert scene.metric('stage_duration_seconds_count{stage="route"} 2')
    assert scene.metric('stage_requests{phase="aggregated",stage="route"} 0')


@pytest.mark.parametrize("count", [1, 5, 11])
async def test_migrated_request_contains_previous_tokens_and_the_remaining_budget(count: int) -> None:
    scene = Scene([count], min_tokens=4)
    assert await scene.run() == whole_text()
    second = scene.worker.requests[1]
    assert second.token_ids[: len(PROMPT)] == PROMPT
    assert len(second.token_ids) == len(PROMPT) + count
    assert second.stop_conditions.max_tokens == 12 - count
    assert second.stop_conditions.min_tokens == max(0, 4 - count)
    assert scene.worker.excluded[1] == {1}
    assert scene.metric('model_migration_total{model="m",migration_type="ongoing_request"} 1')


async def test_stream_that_missed_only_its_end_marker_is_complete() -> None:
    scene = Scene([12])
    assert await scene.run() == whole_text()
    assert len(scene.worker.requests) == 1
    assert scene.ends == [None]


async def test_migration_limit_zero_does_not_move_a_started_stream() -> None:
    scene = Scene([3], limit=0)
    await scene.run()
    assert isinstance(scene.ends[0], Disconnected)


async def test_migration_limit_bounds_the_number_of_moves() -> None:
    scene = Scene([1, 1, 1], limit=2)
    await scene.run()
    assert isinstance(scene.ends[0], Disconnected)
    assert len(scene.worker.requests) == 3


async def test_request_without_a_token_is_resent_despite_a_zero_limit() -> None:
    scene = Scene([0, 0], limit=0)
    assert await scene.run() == whole_text()
    assert scene.metric('model_migration_total{model="m",migration_type="new_request"} 2')


@given(st.lists(st.integers(0, 12), max_size=SENDS_MAX - 1))
async def test_whole_response_starts_over_at_any_failure_point_despite_a_zero_limit(breaks: list[int]) -> None:
    sends = next((place + 1 for place, count in enumerate(breaks) if count == 12), len(breaks) + 1)
    scene = Scene(breaks, limit=0, is_whole=True, echo="the prompt: ")
    assert await scene.run() == "the prompt: " + whole_text()
    assert scene.ends == [None]
    assert scene.generation.counted() == CompletionUsage(3, 12, 15)
    assert [list(request.token_ids) for request in scene.worker.requests] == [PROMPT] * sends


async def test_whole_response_migrates_as_often_as_the_limit_allows_and_then_starts_over() -> None:
    scene = Scene([3, 4, 2], limit=2, is_whole=True)
    assert await scene.run() == whole_text()
    assert [len(request.token_ids) for request in scene.worker.requests] == [3, 6, 10, 3]
    assert scene.generation.counted() == CompletionUsage(3, 12, 15)


async def test_whole_response_starts_over_on_a_bounded_number_of_workers() -> None:
    scene = Scene([5] * 50, limit=0, is_whole=True)
    await scene.run()
    assert [type(end) for end in scene.ends] == [Disconnected]
    assert len(scene.worker.requests) == SENDS_MAX


async def test_stream_beyond_the_maximum_length_is_not_migrated_and_is_counted() -> None:
    scene = Scene([5], tokens_max=7)
    await scene.run()
    assert isinstance(scene.ends[0], Disconnected)
    assert scene.metric('model_migration_max_seq_len_exceeded_total{model="m"} 1')


@pytest.mark.parametrize(
    "request_fields",
    [
        {"sampling_options": SamplingOptions(n=2)},
        {"sampling_options": SamplingOptions(guided_decoding=GuidedDecoding(regex="a"))},
        {"sampling_options": SamplingOptions(best_of=2)},
        {"sampling_options": SamplingOptions(seed=1)},
        {"sampling_options": SamplingOptions(seed=1, temperature=0.5)},
        {"sampling_options": SamplingOptions(presence_penalty=0.5)},
        {"sampling_options": SamplingOptions(frequency_penalty=-0.5)},
        {"output_options": OutputOptions(logprobs=1)},
        {"output_options": OutputOptions(prompt_logprobs=1)},
        {"extra_args": {"sampling_options": {"bad_words": ["x"]}}},
    ],
)
async def test_request_that_tokens_cannot_replay_is_not_migrated(request_fields: dict[str, Any]) -> None:
    scene = Scene([3], **request_fields)
    await scene.run()
    assert isinstance(scene.ends[0], Disconnected)
    assert len(scene.worker.requests) == 1
    refusal = scene.dispatch.refusal(Disconnected("killed"))
    assert refusal is not None and "cannot continue on another worker" in str(refusal)
    assert scene.dispatch.refusal(Unknown("broken")) is None
    whole = Scene([3], is_whole=True, **request_fields)
    await whole.run()
    assert [list(request.token_ids) for request in whole.worker.requests] == [PROMPT] * 2, "it starts over"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(seed=1, temperature=0.0),
        SamplingOptions(repetition_penalty=1.1),
        SamplingOptions(presence_penalty=0.0, frequency_penalty=0.0),
    ],
)
async def test_stream_migrates_when_its_sampling_state_follows_from_its_tokens(sampling: SamplingOptions) -> None:
    scene = Scene([3], sampling_options=sampling)
    assert await scene.run() == whole_text()
    assert scene.dispatch.refusal(Disconnected("killed")) is None
    assert scene.worker.requests[1].extra_args is UNSET


@pytest.mark.parametrize(
    "sampling", [SamplingOptions(seed=1, presence_penalty=1.0), SamplingOptions(frequency_penalty=1.0)]
)
async def test_penalties_are_resumed_by_workers_that_support_resumed_sampling(sampling: SamplingOptions) -> None:
    worker = Worker([3])
    worker.resumes_sampling = True
    scene = Scene([], worker=worker, sampling_options=sampling, extra_args={"other": 1})
    assert await scene.run() == whole_text()
    assert scene.worker.requests[1].extra_args == {"other": 1, "resumed": {"output_tokens": 3, "thinking_tokens": 0}}
    assert resumed_of(scene.worker.requests[1]) == Resumed(3, 0)


async def test_thinking_budget_counts_every_token_without_a_reasoning_parser() -> None:
    scene = Scene([4])
    scene.request.stop_conditions.max_thinking_tokens = 10
    assert await scene.run() == whole_text()
    assert scene.worker.requests[1].stop_conditions.max_thinking_tokens == 6


@pytest.mark.parametrize("error", [InvalidArgument("bad"), Unknown("broken"), RuntimeError("bug")])
async def test_error_that_every_worker_would_return_is_not_retried(error: Exception) -> None:
    scene = Scene([])
    await scene.dispatch.send()
    scene.generation.on_token(1)
    scene.generation.on_error(error)
    assert scene.ends == [error]


async def test_stream_without_available_workers_ends_and_counts_one_migration() -> None:
    scene = Scene([4], limit=8)
    await scene.dispatch.send()

    async def refuse(*args: Any, **options: Any) -> Any:
        raise WorkerUnavailable("no worker is left")

    scene.worker.send = refuse  # type: ignore[method-assign]
    scene.worker.pending()
    await scene.repeat()
    assert len(scene.ends) == 1
    assert scene.metric('model_migration_total{model="m",migration_type="ongoing_request"} 1')


async def test_send_raises_the_last_refusal_when_every_worker_refuses() -> None:
    scene = Scene([])

    async def refuse(*args: Any, **options: Any) -> Any:
        raise WorkerUnavailable("full")

    scene.worker.send = refuse  # type: ignore[method-assign]
    with pytest.raises(DynamoException, match="full"):
        await scene.dispatch.send()


# No other worker is left
# -----------------------------------------------------------------------------------------------


class Fleet(Worker):
    """Workers with ids of their own; the one with the smallest id that is not excluded is chosen."""

    def __init__(self, breaks: list[int], *ids: int) -> None:
        super().__init__(breaks)
        self.ids = ids
        self.received_requests: list[int] = []

    async def choose(self, *_: object) -> None:
        """No KV router here."""

    async def send(self, body: bytes, receiver: Generation, *, exclude: frozenset[int], **options: Any) -> "Worker":
        left = [one for one in self.ids if one not in exclude]
        if not left:
            raise WorkerUnavailable("no instance can take the request")
        await super().send(body, receiver, exclude=exclude, **options)
        self.received_requests.append(left[0])
        self.instance_id = left[0]
        return self

    def has_other(self, exclude: frozenset[int]) -> bool:
        return not set(self.ids) <= exclude


async def test_only_worker_is_retried_after_a_broken_connection() -> None:
    fleet = Fleet([3, 0, 4], 1)
    scene = Scene([], worker=fleet)
    assert await scene.run() == whole_text()
    assert fleet.received_requests == [1, 1, 1, 1]
    assert scene.ends == [None]
    assert scene.clock.now() > 0, "it was asked again without a pause"


async def test_only_worker_is_retried_without_migration_limit_before_the_first_token() -> None:
    fleet = Fleet([0] * 10, 1)
    scene = Scene([], limit=0, worker=fleet)
    await scene.run()
    assert fleet.received_requests == [1] * SENDS_MAX
    assert isinstance(scene.ends[0], Disconnected)


async def test_retries_of_the_only_worker_respect_the_migration_limit() -> None:
    fleet = Fleet([1] * 10, 1)
    scene = Scene([], limit=2, worker=fleet)
    await scene.run()
    assert fleet.received_requests == [1, 1, 1]
    assert isinstance(scene.ends[0], Disconnected)


@given(st.lists(st.integers(1, 2), max_size=9), st.integers(1, 4))
async def test_retry_prefers_workers_not_yet_tried(breaks: list[int], count: int) -> None:
    fleet = Fleet(breaks, *range(1, count + 1))
    scene = Scene([], worker=fleet)
    assert await scene.run() == whole_text()
    for start in range(0, len(fleet.received_requests), count):
        assert (
            fleet.received_requests[start : start + count]
            == list(range(1, count + 1))[: len(fleet.received_requests) - start]
        )


async def test_retry_prefers_a_worker_that_registered_during_the_delay() -> None:
    fleet = Fleet([3], 1)
    scene = Scene([], worker=fleet)
    await scene.dispatch.send()
    scene.worker.pending()
    repeating = asyncio.create_task(scene.dispatch.repeat(scene.repeats.pop()))
    await until(lambda: scene.clock._sleepers)
    fleet.ids = (1, 2)
    scene.clock.advance(RETRY_MAX_S)
    await repeating
    assert fleet.received_requests == [1, 2]


async def test_worker_that_refused_is_not_retried() -> None:
    """The worker reported that it is full; the client receives that at once."""
    fleet = Fleet([], 1)
    scene = Scene([], worker=fleet)
    await scene.dispatch.send()
    scene.generation.call = fleet
    scene.generation.on_error(WorkerOverloaded("full"))
    await scene.repeat()
    assert fleet.received_requests == [1]
    assert isinstance(scene.ends[0], WorkerOverloaded)
    assert scene.clock.now() == 0


async def test_sole_unreachable_worker_is_retried_after_one_delay() -> None:
    fleet = Fleet([2], 1)
    scene = Scene([], limit=8, worker=fleet)
    await scene.dispatch.send()
    scene.worker.pending()

    async def gone(*args: Any, exclude: frozenset[int], **options: Any) -> Any:
        raise WorkerUnavailable("no worker is left") if exclude else CannotConnect("connection refused")

    fleet.send = gone  # type: ignore[method-assign]
    await scene.repeat()
    assert isinstance(scene.ends[0], CannotConnect)
    assert scene.clock.now() <= RETRY_MAX_S


async def test_cancelled_request_is_not_retried() -> None:
    fleet = Fleet([2], 1)
    scene = Scene([], worker=fleet)
    await scene.dispatch.send()
    scene.worker.pending()
    repeating = asyncio.create_task(scene.dispatch.repeat(scene.repeats.pop()))
    await until(lambda: scene.clock._sleepers)
    scene.generation.cancel()
    scene.clock.advance(RETRY_MAX_S)
    await repeating
    assert fleet.received_requests == [1]


# Unresponsive workers
# --------------------------------------------------------------------------------------------------


async def test_stream_leaves_a_silent_worker_only_if_another_exists() -> None:
    for fleet, leaves in ((Fleet([], 1, 2), True), (Fleet([], 1), False)):
        scene = Scene([], worker=fleet)
        await scene.dispatch.send()
        scene.generation.call = fleet
        assert scene.generation.leaves_silent_worker() == leaves
        scene.generation.on_token(5)
        assert scene.generation.leaves_silent_worker() == leaves


@pytest.mark.parametrize(
    "request_fields", [{"limit": 0}, {"tokens_max": 3}, {"sampling_options": SamplingOptions(n=2)}]
)
async def test_stream_that_cannot_migrate_stays_with_its_silent_worker(request_fields: dict[str, Any]) -> None:
    fleet = Fleet([], 1, 2)
    scene = Scene([], worker=fleet, **request_fields)
    await scene.dispatch.send()
    scene.generation.call = fleet
    assert scene.generation.leaves_silent_worker(), "before its first token it may go anywhere"
    scene.generation.on_token(5)
    assert not scene.generation.leaves_silent_worker()
    assert not scene.metric("migration_max_seq_len_exceeded_total{"), "it was only asked whether it could"


async def test_request_pinned_to_a_worker_stays_with_its_silent_worker() -> None:
    fleet = Fleet([], 1, 2)
    scene = Scene([], worker=fleet, routing=Routing(backend_instance_id=1))
    await scene.dispatch.send()
    scene.generation.call = fleet
    assert not scene.generation.leaves_silent_worker()


def test_generation_that_was_never_sent_leaves_no_worker() -> None:
    assert not Generation(PreprocessedRequest("m", [1]), TABLE, Scene([]), 0).leaves_silent_worker()


async def test_long_prompts_are_routed_and_packed_in_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "LONG_TOKENS", len(PROMPT))
    turn, seen = 0, list[int]()

    class Chosen(Worker):
        kv = None

        async def choose(self, *_: object) -> Any:
            seen.append(turn)
            return self, SimpleNamespace(worker_id=7, dp_rank=0)

    def packed(request: PreprocessedRequest) -> bytes:
        seen.append(turn)
        return encode_client_json(request)

    monkeypatch.setattr(migration, "encode_client_json", packed)
    sends = [asyncio.ensure_future(Scene([], worker=Chosen([])).dispatch.send()) for _ in range(3)]
    while not all(one.done() for one in sends):
        await turns()
        turn += 1
    await asyncio.gather(*sends)
    assert len(seen) == len(set(seen)) == 6
