"""A request of two phases is answered once, for any failure of its workers at any time."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import repeat, turns, until

from dynamo.core.clock import ManualClock
from dynamo.core.codec import msgpack_decoder, msgpack_encode
from dynamo.core.errors import (
    Cancelled,
    Disconnected,
    DynamoException,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import (
    BYPASS_REMOTE_PREFILL,
    BootstrapInfo,
    CompletionUsage,
    EngineOutput,
    PrefillDetails,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    StopConditions,
)
from dynamo.protocols.model_card import DisaggregatedEndpoint, ModelDeploymentCard, RuntimeConfig
from dynamo.routing.prefill_plan import Conditional
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.choice import Choice
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.serving.prefill_router import DisaggregatedDispatch
from dynamo.text.detokenizer import TokenTable, text_json_of

RAW = [f"<{number}>".encode() for number in range(50)]
TABLE = TokenTable(RAW, text_json_of(RAW))
PROMPT = [3, 1, 4]
BREAK = Disconnected("killed")
decode = msgpack_decoder(PreprocessedRequest).decode


def next_token(tokens: list[int]) -> int:
    """The tokens of every worker after these tokens."""
    return (7 * len(tokens) + sum(tokens[-2:])) % len(RAW)


class Call:
    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id
        self.killed = False
        self.on_stop: Callable[[], None] | None = None
        self.stops = 0

    def kill(self) -> None:
        self.killed = True

    def stop(self) -> None:
        self.stops += 1
        if self.on_stop is not None:
            self.on_stop()


class Pool:
    """Workers of one role with the interface of a worker set; the behaviour of each is scripted."""

    name = "m"
    resumes_sampling = False
    kv: Any = None
    sessions: Any = None
    routed: Any = None
    conditional: Conditional | None = None

    def __init__(self, scene: "Scene", *ids: int, **config: Any) -> None:
        self.scene = scene
        self.ids = list(ids)
        self.mode = RouterMode.ROUND_ROBIN
        self.card = RuntimeConfig(**config)
        self.cards: dict[int, RuntimeConfig] = {}
        """Cards of workers that have one of their own."""
        self.prefill_sets: list[Pool] = []
        self.prefills_locally = False
        self.is_decode = False
        self.sent: list[tuple[int, PreprocessedRequest]] = []
        self.calls: list[Call] = []
        self.client = SimpleNamespace(instance_ids=lambda: list(self.ids))

    @property
    def current(self) -> "Pool":
        return self

    def worker_ids(self) -> list[int]:
        return list(self.ids)

    def card_of(self, instance_id: int) -> ModelDeploymentCard:
        return ModelDeploymentCard(display_name="m", slug="m", runtime_config=self.cards.get(instance_id, self.card))

    def pick(self, exclude: frozenset[int]) -> int:
        able = [one for one in self.ids if one not in exclude]
        if not able:
            raise WorkerUnavailable("no worker is left")
        return able[0]

    def next_rank(self, worker_id: int) -> int | None:
        return None

    def has_other(self, exclude: frozenset[int]) -> bool:
        return bool(set(self.ids) - exclude)

    def inflight(self, instance_id: int) -> int:
        return 1

    async def choose(self, *_: object) -> None: ...

    def bound(self, *_: object) -> None: ...

    async def send(
        self, body: bytes, receiver: Any, *, instance_id: int | None, exclude: frozenset[int], **_: Any
    ) -> Call:
        worker = self.pick(exclude) if instance_id is None else instance_id
        request = decode(body)
        self.sent.append((worker, request))
        call = Call(worker)
        self.calls.append(call)
        self.scene.queue.append(lambda: None if call.killed else self.scene.answer(self, worker, request, receiver))
        return call


Script = Exception | str | int | None
"""Behaviour of a worker: raises at once, ends with a reason (prefill), fails after that many tokens (decode), or
answers.
"""


class Scene:
    """One request and two scripted pools."""

    def __init__(
        self,
        prefill: list[Script],
        decode: list[Script],
        *,
        ids: tuple[int, ...] = (1, 2),
        limit: int = 10,
        **config: Any,
    ) -> None:
        self.queue: list[Callable[[], None]] = []
        self.prefills = Pool(self, *ids, **config)
        self.decodes = Pool(self, 11, 12)
        self.decodes.is_decode = True
        self.decodes.prefill_sets = [self.prefills]
        self.scripts: dict[int, Iterator[Script]] = {
            id(self.prefills): iter(prefill),
            id(self.decodes): iter(decode),
        }
        self.clock = ManualClock()
        self.registry = MetricsRegistry()
        self.ends: list[Exception | None] = []
        self.repeats: list[Exception] = []
        self.limit = limit
        self.prefilling: Any = None
        """Prefill that has sent its parameters in advance."""
        self.generation: Generation
        self.dispatch: Dispatch

    def make(self, routing: Routing | None = None, max_tokens: int = 6) -> None:
        request = PreprocessedRequest("m", list(PROMPT), StopConditions(max_tokens=max_tokens), routing=routing)
        self.generation = Generation(request, TABLE, self, 0)
        make = DisaggregatedDispatch if self.decodes.is_decode else Dispatch
        self.dispatch = make(
            self.decodes,  # type: ignore[arg-type]
            self.generation,
            "id",
            {},
            policy=MigrationPolicy(self.limit),
            metrics=FrontendMetrics(self.registry),
            clock=self.clock,
        )
        self.generation.assign(self.dispatch)

    # Response side.

    is_whole = False

    def touch(self, choice: Choice) -> None: ...

    def ended(self, generation: Generation) -> None:
        self.ends.append(None)

    def failed(self, generation: Generation, error: Exception) -> None:
        if self.dispatch.may_repeat(error):
            generation.revive()
            self.repeats.append(error)
        else:
            self.ends.append(error)

    # The workers' side.

    def answer(self, pool: Pool, worker: int, request: PreprocessedRequest, receiver: Any) -> None:
        script = next(self.scripts[id(pool)], None)
        if pool is self.prefills:
            self.prefill(script, worker, request, receiver)
        else:
            self.decode(script, request, receiver)

    def prefill(self, script: Script, worker: int, request: PreprocessedRequest, receiver: Any) -> None:
        if isinstance(script, Exception):
            receiver.on_error(script)
            return
        usage = CompletionUsage(len(request.token_ids), 1, len(request.token_ids) + 1, PromptTokensDetails(2))
        output = EngineOutput(
            [next_token(list(request.token_ids))],
            0,
            finish_reason=script if isinstance(script, str) else "length",
            completion_usage=usage,
            disaggregated_params=None if script == "nothing" else {"at": worker, "tokens": len(request.token_ids)},
        )
        if script == "nothing":
            output.finish_reason = "length"
        if script == "advance":  # As SGLang, it ends once the decode worker has fetched the blocks.
            params = {"at": worker, "tokens": len(request.token_ids)}
            receiver.on_item(Item(msgpack_encode(EngineOutput([], 0, disaggregated_params=params))))
            self.prefilling = receiver
            return
        receiver.on_item(Item(msgpack_encode(output)))
        receiver.on_end()

    def decode(self, script: Script, request: PreprocessedRequest, receiver: Any) -> None:
        if isinstance(script, Exception):
            receiver.on_error(script)
            return
        tokens, limit = list(request.token_ids), request.stop_conditions.max_tokens or 0
        for count in range(limit):
            if count == script:
                receiver.on_error(BREAK)
                return
            tokens.append(next_token(tokens))
            if count == limit - 1:
                receiver.on_item(Item(msgpack_encode(EngineOutput([tokens[-1]], 0, finish_reason="length"))))
            else:
                receiver.on_token(tokens[-1])
        receiver.on_end()

    async def turn(self) -> None:
        """Step all parts until no step is left."""
        for _ in range(200):
            await turns()
            self.clock.advance(1.0)
            if self.queue:
                self.queue.pop(0)()

    async def run(self, routing: Routing | None = None, max_tokens: int = 6) -> str:
        self.make(routing, max_tokens)
        sending = asyncio.get_running_loop().create_task(self.dispatch.send())
        await self.turn()
        try:
            await sending
        except Exception as error:
            self.ends.append(error)
        while self.repeats:
            repeating = asyncio.get_running_loop().create_task(self.dispatch.repeat(self.repeats.pop(0)))
            await self.turn()
            await repeating
        self.dispatch.release()
        return self.generation.choices[0].text()


def output_text(count: int) -> str:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return b"".join(RAW[token] for token in tokens[len(PROMPT) :]).decode()


async def test_prefill_runs_first_and_its_result_is_passed_to_decode() -> None:
    scene = Scene([], [])
    assert await scene.run() == output_text(6)
    ((worker, prefill),) = scene.prefills.sent
    ((_, decode),) = scene.decodes.sent
    assert prefill.stop_conditions.max_tokens == 1
    assert prefill.routing == decode.routing == Routing(prefill_worker_id=worker)
    assert decode.prefill_result == PrefillResult({"at": 1, "tokens": 3}, PrefillDetails(cached_tokens=2))
    assert scene.ends == [None]
    assert scene.generation.tokens == 6, "the prefill's token is the decode's first: it is counted once"


async def test_aggregated_model_uses_the_plain_dispatch() -> None:
    scene = Scene([], [])
    scene.decodes.is_decode = False
    scene.make()
    assert type(scene.dispatch) is Dispatch


async def test_prefill_that_ends_the_text_is_the_response() -> None:
    scene = Scene(["stop"], [])
    assert await scene.run() == output_text(1)
    assert scene.decodes.sent == []
    assert scene.generation.choices[0].finish_reason == "stop"
    assert scene.ends == [None]


@pytest.mark.parametrize("reason", [None, "length"])
async def test_other_prefill_finish_reason_continues_with_decode(reason: Script) -> None:
    scene = Scene([reason], [])
    assert await scene.run() == output_text(6)


async def test_disconnected_prefill_worker_is_replaced() -> None:
    scene = Scene([BREAK], [])
    assert await scene.run() == output_text(6)
    assert [worker for worker, _ in scene.prefills.sent] == [1, 2]
    assert scene.ends == [None]
    assert 'migration_type="new_request"} 1' in scene.registry.render()


async def test_only_prefill_worker_is_retried_after_a_broken_connection() -> None:
    scene = Scene([BREAK], [], ids=(1,))
    assert await scene.run() == output_text(6)
    assert [worker for worker, _ in scene.prefills.sent] == [1, 1]


@pytest.mark.parametrize("error", [InvalidArgument("no"), Unknown("bug"), Cancelled("x")])
async def test_prefill_error_that_is_not_retryable_is_returned(error: Exception) -> None:
    scene = Scene([error], [])
    assert await scene.run() == ""
    assert scene.ends == [error]
    assert scene.decodes.sent == []


@pytest.mark.parametrize(
    ("script", "kind"),
    [("nothing", Unknown), ("error:boom", Unknown), ("cancelled", Cancelled)],
)
async def test_prefill_without_a_usable_result_fails_the_request(script: str, kind: type[Exception]) -> None:
    scene = Scene([script], [])
    await scene.run()
    assert [type(end) for end in scene.ends] == [kind]


async def test_failing_prefills_are_retried_a_bounded_number_of_times() -> None:
    scene = Scene([BREAK] * 50, [], ids=(1, 2, 3, 4, 5, 6))
    await scene.run()
    assert [type(end) for end in scene.ends] == [Disconnected]
    assert len(scene.prefills.sent) == 4


async def test_decode_worker_with_local_prefill_serves_the_whole_request_without_prefill_workers() -> None:
    scene = Scene([BREAK] * 50, [])
    scene.decodes.prefills_locally = True
    assert await scene.run() == output_text(6)
    ((_, request),) = scene.decodes.sent
    assert request.annotations == [BYPASS_REMOTE_PREFILL]
    assert not request.prefill_result
    assert scene.dispatch.prefill is None
    scene = Scene([], [], ids=())
    scene.decodes.prefills_locally = True
    assert await scene.run() == output_text(6)


async def test_request_without_prefill_workers_or_local_prefill_fails_at_once() -> None:
    scene = Scene([], [], ids=())
    assert await scene.run() == ""
    assert [type(end) for end in scene.ends] == [WorkerUnavailable]
    assert scene.decodes.sent == []


async def test_prefill_is_repeated_after_a_decode_worker_disconnects_before_its_first_token() -> None:
    scene = Scene([], [BREAK])
    assert await scene.run() == output_text(6)
    assert [worker for worker, _ in scene.decodes.sent] == [11, 12]
    assert len(scene.prefills.sent) == 2
    assert scene.ends == [None]


async def test_request_migrates_to_another_decode_worker_with_its_previous_tokens() -> None:
    scene = Scene([], [3])
    assert await scene.run() == output_text(6)
    (_, again) = scene.prefills.sent[1]
    assert len(again.token_ids) == len(PROMPT) + 3
    (_, going_on) = scene.decodes.sent[1]
    assert going_on.stop_conditions.max_tokens == 3
    assert going_on.prefill_result == PrefillResult({"at": 1, "tokens": 6}, PrefillDetails(cached_tokens=2))
    assert scene.ends == [None]


async def test_migration_limit_zero_ends_an_interrupted_decode_stream() -> None:
    scene = Scene([], [3], limit=0)
    assert await scene.run() == output_text(3)
    assert scene.ends == [BREAK]


async def test_whole_response_starts_over_with_both_phases_after_an_interruption() -> None:
    scene = Scene([], [3], limit=0)
    scene.is_whole = True
    assert await scene.run() == output_text(6)
    assert scene.ends == [None]
    assert [list(request.token_ids) for _, request in scene.prefills.sent] == [PROMPT, PROMPT]


async def test_stalled_transfer_is_repeated_with_the_only_workers() -> None:
    scene = Scene([], [StreamIncomplete("the blocks did not come")], ids=(1,))
    scene.decodes.ids = [11]
    assert await scene.run() == output_text(6)
    assert (len(scene.prefills.sent), len(scene.decodes.sent)) == (2, 2)


# At once.

MEETS: dict[str, Any] = {"disaggregated_endpoint": DisaggregatedEndpoint("host", 7)}


async def test_prefill_and_decode_are_sent_at_once_with_a_bootstrap_endpoint() -> None:
    scene = Scene([], [], **MEETS)
    scene.make()
    await scene.dispatch.send()
    assert (len(scene.prefills.sent), len(scene.decodes.sent)) == (1, 1)
    meeting = scene.prefills.sent[0][1].bootstrap_info
    assert isinstance(meeting, BootstrapInfo)
    assert (meeting.bootstrap_host, meeting.bootstrap_port) == ("host", 7)
    assert meeting.bootstrap_room < 2**63
    assert isinstance(meeting.handoff_id, bytes)
    assert len(meeting.handoff_id) == 16
    assert scene.decodes.sent[0][1].bootstrap_info == meeting
    assert not scene.decodes.sent[0][1].prefill_result
    await scene.turn()
    assert scene.generation.choices[0].text() == output_text(6)


@pytest.mark.parametrize("mode", [RouterMode.POWER_OF_TWO, RouterMode.LEAST_LOADED])
async def test_load_counting_router_modes_send_decode_after_prefill(mode: RouterMode) -> None:
    scene = Scene([BREAK], [], **MEETS)
    scene.prefills.mode = mode
    assert await scene.run() == output_text(6)
    assert len(scene.decodes.sent) == 1, "it was not sent before a prefill had succeeded"
    assert scene.decodes.sent[0][1].bootstrap_info


@pytest.mark.parametrize("config", [{}, MEETS])
async def test_decode_is_sent_once_the_prefill_worker_has_sent_parameters_in_advance(config: dict[str, Any]) -> None:
    scene = Scene(["advance"], [], **config)
    scene.prefills.mode = RouterMode.LEAST_LOADED
    assert await scene.run() == output_text(6)
    (_, decode) = scene.decodes.sent[0]
    if config:
        assert decode.bootstrap_info == scene.prefills.sent[0][1].bootstrap_info
    else:
        assert decode.prefill_result == PrefillResult({"at": 1, "tokens": 3}, None)
    assert scene.ends == [None]


async def test_prefill_failure_after_parameters_in_advance_repeats_both_phases() -> None:
    scene = Scene(["advance"], [])
    scene.make()
    sending = asyncio.get_running_loop().create_task(scene.dispatch.send())
    while not scene.decodes.sent:
        await turns()
        if scene.queue and not scene.prefilling:
            scene.queue.pop(0)()
    await sending
    scene.queue.clear()
    scene.prefilling.on_error(BREAK)
    assert scene.repeats == [BREAK]
    repeating = asyncio.get_running_loop().create_task(scene.dispatch.repeat(scene.repeats.pop(0)))
    await scene.turn()
    await repeating
    assert [worker for worker, _ in scene.prefills.sent] == [1, 2]
    assert scene.generation.choices[0].text() == output_text(6)


async def test_prefill_failure_during_decode_wait_repeats_both_phases() -> None:
    scene = Scene([BREAK], [], **MEETS)
    assert await scene.run() == output_text(6)
    assert [worker for worker, _ in scene.prefills.sent] == [1, 2]
    assert [worker for worker, _ in scene.decodes.sent] == [11, 11], "who only waited is not to blame"
    assert scene.decodes.calls[0].killed
    assert scene.ends == [None]


async def test_prefill_invalid_argument_is_returned_and_kills_decode() -> None:
    error = InvalidArgument("no")
    scene = Scene([error], [], **MEETS)
    await scene.run()
    assert scene.ends == [error]
    assert scene.decodes.calls[0].killed


async def test_prefill_failure_after_the_first_decode_token_is_ignored() -> None:
    scene = Scene([], [], **MEETS)
    scene.make()
    await scene.dispatch.send()
    phase = scene.dispatch.prefill
    assert phase is not None
    scene.generation.on_token(next_token(PROMPT))
    phase.on_error(BREAK)
    assert scene.repeats == []
    assert not scene.decodes.calls[0].killed


# Requested and allowed workers.


async def test_request_can_name_its_prefill_worker() -> None:
    scene = Scene([], [])
    await scene.run(Routing(prefill_worker_id=2))
    assert [worker for worker, _ in scene.prefills.sent] == [2]


async def test_unknown_prefill_worker_is_an_invalid_argument() -> None:
    scene = Scene([], [])
    await scene.run(Routing(prefill_worker_id=9))
    assert [type(end) for end in scene.ends] == [InvalidArgument]


async def test_required_transfer_domain_restricts_the_decode_workers() -> None:
    place: dict[str, Any] = {
        "topology_domains": {"rack": "a"},
        "kv_transfer_domain": "rack",
        "kv_transfer_enforcement": "required",
    }
    scene = Scene([], [], **place)
    far, near = RuntimeConfig(topology_domains={"rack": "b"}), RuntimeConfig(topology_domains={"rack": "a"})
    scene.decodes.cards = {11: far, 12: near}
    assert await scene.run() == output_text(6)
    assert [worker for worker, _ in scene.decodes.sent] == [12]
    scene = Scene([], [], **place)
    scene.decodes.cards = {11: far, 12: far}
    await scene.run()
    assert [type(end) for end in scene.ends] == [WorkerUnavailable]
    scene = Scene([], [], **place)
    scene.decodes.cards = {11: far, 12: far}
    await scene.run(Routing(prefill_worker_id=1))
    assert [type(end) for end in scene.ends] == [Unknown], "of the named worker no repetition succeeds"


async def test_prefill_ranks_rotate_without_a_kv_router_unless_the_client_names_one() -> None:
    scene = Scene([], [])
    ranks = iter((3, 4))
    scene.prefills.next_rank = lambda worker_id: next(ranks)  # type: ignore[method-assign]
    await scene.run()
    await scene.run(Routing(prefill_dp_rank=9))
    await scene.run()
    routings = [request.routing for _, request in scene.prefills.sent]
    assert [routing.prefill_dp_rank for routing in routings if routing is not None] == [3, 9, 4]


def cancelled(receiver: Any) -> None:
    """The messages of a worker for a request that it was to stop."""
    receiver.on_item(Item(msgpack_encode(EngineOutput([], 0, finish_reason="cancelled"))))
    receiver.on_end()


async def test_client_disconnect_during_prefill_stops_it_and_sends_no_decode_request() -> None:
    scene = Scene([], [])
    scene.make()
    sending = asyncio.get_running_loop().create_task(scene.dispatch.send())
    await turns(2)
    (call,) = scene.prefills.calls
    scene.queue.clear()
    call.on_stop = lambda: scene.queue.append(lambda: cancelled(scene.dispatch.prefill))
    scene.generation.cancel()
    scene.dispatch.release()
    await scene.turn()
    with pytest.raises(Cancelled):
        await sending
    assert (call.stops, call.killed) == (1, False)
    assert scene.decodes.sent == [] and scene.ends == []


async def test_prefill_that_ends_after_a_disconnect_has_its_blocks_fetched_and_dropped() -> None:
    """The worker keeps the blocks for a decode worker: only its fetch, or the end of the worker, frees them."""
    scene = Scene([], [])
    scene.make()
    sending = asyncio.get_running_loop().create_task(scene.dispatch.send())
    await turns(2)
    scene.generation.cancel()
    scene.dispatch.release()
    await scene.turn()
    await sending
    assert scene.prefills.calls[0].stops == 1
    assert scene.decodes.calls[0].killed
    assert scene.ends == []


async def test_client_disconnect_removes_a_queued_prefill() -> None:
    scene = Scene([], [])
    cluster: list[Any] = []

    async def choose(_request: object, _id: object, progress: Any, *_: object) -> Any:
        cluster.append(progress)
        await until(lambda: progress.is_over)
        raise DynamoException("the request was cancelled")

    scene.prefills.kv = SimpleNamespace(machine=SimpleNamespace(waiting=[]), release=lambda _: None)
    scene.prefills.choose = choose  # type: ignore[method-assign]
    scene.make()
    sending = asyncio.get_running_loop().create_task(scene.dispatch.send())
    await until(lambda: cluster)
    scene.generation.cancel()
    scene.dispatch.release()
    async with asyncio.timeout(10):
        with pytest.raises(DynamoException, match="cancelled"):
            await sending
    assert scene.prefills.sent == [] and scene.decodes.sent == []


async def test_prefill_with_a_decode_response_is_not_stopped() -> None:
    scene = Scene([], [], ids=(1,), disaggregated_endpoint=DisaggregatedEndpoint("host", 7))
    scene.make()
    await scene.dispatch.send()
    _, decode_answer = scene.queue
    decode_answer()
    scene.dispatch.release()
    assert scene.prefills.calls[0].stops == 0 and not scene.prefills.calls[0].killed


async def test_client_disconnect_during_decode_wait_stops_the_prefill() -> None:
    scene = Scene([], [], ids=(1,), disaggregated_endpoint=DisaggregatedEndpoint("host", 7))
    scene.make()
    await scene.dispatch.send()
    scene.generation.cancel()
    scene.dispatch.release()
    assert scene.prefills.calls[0].stops == 1 and scene.decodes.calls[0].killed


async def test_unanswered_prefill_is_killed_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_PREFILL_TIMEOUT_SECS", "0.01")
    scene = Scene([], [])
    scene.make()
    sending = asyncio.get_running_loop().create_task(scene.dispatch.send())
    await repeat(scene.queue.clear, lambda: len(scene.prefills.sent) >= 2)
    scene.queue.clear()
    assert scene.prefills.calls[0].killed
    with pytest.raises(WorkerUnavailable):
        await sending


class ScriptedKvRouter:
    """Decisions of a pool's KV router, and the busy state of its workers."""

    def __init__(self, worker: int, overlap: int, prefill_tokens: float = 0.0, blocks: float = 0.0) -> None:
        self.found = SimpleNamespace(worker_id=worker, dp_rank=0, overlap_blocks=overlap, blocks=4)
        self.config = SimpleNamespace(block_size=16)
        facts = SimpleNamespace(batch_tokens=100, kv_blocks=100)
        self.machine = SimpleNamespace(
            loads=lambda: {(worker, 0): (prefill_tokens, blocks, 1)}, workers={worker: facts}, waiting=[]
        )
        self.received_requests: list[PreprocessedRequest] = []

    def peek(self, request: PreprocessedRequest, *_: object, avoid: object) -> SimpleNamespace:
        self.received_requests.append(request)
        return self.found

    def release(self, request_id: str) -> None: ...


@pytest.mark.parametrize(
    ("overlap", "prefill_tokens", "blocks", "rule", "is_whole"),
    [
        (3, 0, 0, Conditional(), True),
        (1, 0, 0, Conditional(), False),
        (3, 0, 99, Conditional(decode_busy_threshold=0.5), False),
        (0, 90, 0, Conditional("prefill_load", prefill_busy_threshold=0.8), True),
        (0, 70, 0, Conditional("prefill_load", prefill_busy_threshold=0.8), False),
    ],
)
async def test_conditional_disaggregation_keeps_a_short_prefill_on_the_decode_worker(
    overlap: int, prefill_tokens: float, blocks: float, rule: Conditional, is_whole: bool
) -> None:
    scene = Scene([], [])
    scene.decodes.conditional = rule
    scene.decodes.kv = ScriptedKvRouter(11, overlap, blocks=blocks)
    scene.make(Routing(prefill_worker_id=2, backend_instance_id=11))
    scene.generation.request.token_ids[:] = [3] * 64
    scene.prefills.kv = kv = ScriptedKvRouter(1, 0, prefill_tokens)
    assert isinstance(scene.dispatch, DisaggregatedDispatch)
    assert scene.dispatch._stays_whole() is is_whole
    assert kv.received_requests[0].routing == Routing(prefill_worker_id=2, backend_instance_id=2), "in its own words"
    if is_whole:
        await scene.dispatch.send()
        assert scene.prefills.sent == []
        assert [request.annotations for _, request in scene.decodes.sent] == [[BYPASS_REMOTE_PREFILL]]


async def test_request_is_disaggregated_when_the_cost_is_unknown() -> None:
    scene = Scene([], [])
    scene.decodes.conditional = Conditional()
    scene.decodes.kv = ScriptedKvRouter(11, 4)
    kv = ScriptedKvRouter(1, 0)
    scene.prefills.kv = kv
    scene.make()
    assert isinstance(scene.dispatch, DisaggregatedDispatch)

    def peek(*_: object, **__: object) -> SimpleNamespace:
        raise WorkerUnavailable("no worker is left")

    kv.peek = peek  # type: ignore[method-assign]
    assert scene.dispatch._stays_whole() is False


@given(
    st.lists(st.sampled_from([None, None, BREAK, "length"]), max_size=6),
    st.lists(st.sampled_from([None, BREAK, 0, 1, 2, 4, 5]), max_size=6),
    st.booleans(),
)
def test_disaggregated_response_is_complete_or_one_error_after_any_failure(
    prefill: list[Script], decode: list[Script], meets: bool
) -> None:
    async def live() -> None:
        scene = Scene(prefill, decode, **(MEETS if meets else {}))
        text = await scene.run(max_tokens=8)
        assert len(scene.ends) == 1
        if scene.ends == [None]:
            assert text == output_text(8)
            assert scene.generation.tokens == 8
        else:
            assert output_text(8).startswith(text)

    asyncio.run(live())
