import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.backend.engine import EngineConfig
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.core import Core
from dynamo.cpu.engine import LOAD_INTERVAL_S, CpuEngine, Reporter
from dynamo.cpu.guided import Guide
from dynamo.protocols.engine import GuidedDecoding, OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.protocols.load import ForwardPass, WorkerLoad

TIMEOUT_S = 20.0


class ReporterHost:
    def __init__(self) -> None:
        self.reported: list[Any] = []

    def publish_kv_event(self, event: Any, dp_rank: int = 0) -> None:
        self.reported.append(event)

    def publish_load(self, load: WorkerLoad) -> None:
        self.reported.append(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        self.reported.append(passed)

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


BUSY, BUSIER, IDLE = (WorkerLoad(running_requests=count) for count in (1, 2, 0))


def loads_of(*reports: tuple[WorkerLoad, float, bool]) -> list[Any]:
    host = ReporterHost()
    reporter = Reporter(host)
    for load, now, is_idle in reports:
        reporter.report([], load, now, is_idle=is_idle)
    return host.reported


def test_event_sender_publishes_events_in_order() -> None:
    host = ReporterHost()
    Reporter(host).report([Removed([1]), Cleared()], BUSY, 0.0, is_idle=False)
    assert host.reported == [Removed([1]), Cleared(), BUSY]


def test_event_sender_publishes_an_unchanged_load_once() -> None:
    assert loads_of((BUSY, 0.0, False), (BUSY, 10.0, False), (BUSY, 20.0, True)) == [BUSY]


def test_event_sender_throttles_frequent_loads() -> None:
    early, late = LOAD_INTERVAL_S / 2, LOAD_INTERVAL_S * 1.5
    assert loads_of((BUSY, 0.0, False), (BUSIER, early, False), (BUSIER, late, False)) == [BUSY, BUSIER]


def test_event_sender_always_publishes_the_last_load() -> None:
    assert loads_of((BUSY, 0.0, False), (IDLE, LOAD_INTERVAL_S / 10, True)) == [BUSY, IDLE]


class Host:
    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.events: list[Any] = []
        self.loads: list[WorkerLoad] = []
        self.passes: list[ForwardPass] = []
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def publish_kv_event(self, event: Any, dp_rank: int = 0) -> None:
        self.events.append(event)

    def publish_load(self, load: WorkerLoad) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        self.passes.append(passed)

    def fail(self, error: BaseException) -> None:
        self.failure.set_result(error)


@pytest.fixture
def listening(receiver_type: type[Any]) -> Callable[[], Any]:
    """A reply that can be waited for."""

    class Listening(receiver_type):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ended = asyncio.Event()
            self.began = asyncio.Event()

        def token(self, token_id: int) -> None:
            super().token(token_id)
            self.began.set()

        def finish(self) -> None:
            super().finish()
            self.ended.set()

        def fail(self, error: BaseException) -> None:
            super().fail(error)
            self.ended.set()

        async def end(self) -> None:
            await asyncio.wait_for(self.ended.wait(), TIMEOUT_S)

    return Listening


@pytest.fixture
async def begin(write_model: Callable[..., str]) -> AsyncIterator[Callable[..., Any]]:
    started: list[CpuEngine] = []

    async def start(**options: Any) -> tuple[CpuEngine, Host, EngineConfig]:
        host = Host()
        engine = CpuEngine(CpuConfig(**({"model_path": write_model(), "block_size": 4} | options)))
        started.append(engine)
        return engine, host, await engine.start(host)

    yield start
    for engine in started:
        await engine.stop()
        await engine.stop()


def request(prompt: list[int] | None = None, *, max_tokens: int | None = 8, **options: Any) -> PreprocessedRequest:
    return PreprocessedRequest(
        model="m",
        token_ids=prompt or [1, 2, 3, 4, 5],
        stop_conditions=StopConditions(max_tokens=max_tokens),
        sampling_options=SamplingOptions(**({"temperature": 0.0} | options)),
    )


async def test_cpu_engine_config_describes_model_and_cache(begin: Any) -> None:
    _, host, config = await begin(model_name="tiny", max_num_seqs=4, max_model_len=100)
    assert (config.served_model_name, config.context_length, config.kv_cache_block_size) == ("tiny", 100, 4)
    assert config.total_kv_blocks == 4 * 25
    assert host.loads == [WorkerLoad(kv_total_blocks=100)]


async def test_cpu_engine_answers_token_by_token(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    reply = listening()
    engine.submit(request(), reply)
    await reply.end()
    assert len(reply.tokens) == 8
    assert [isinstance(word, int) for word in reply.messages] == [True] * 7 + [False]
    assert reply.messages[-1].finish_reason == "length"
    stored = [event for event in host.events if isinstance(event, Stored)]
    assert sum(len(event.blocks) for event in stored) == 3
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)
    assert host.loads[-1].running_requests == 0
    assert len(host.passes) == 8
    assert all(one.wall_time > 0 for one in host.passes)


async def test_cpu_engine_seeded_output_does_not_depend_on_other_requests(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    alone, among, *others = [listening() for _ in range(6)]
    engine.submit(request(seed=5, temperature=1.0), alone)
    await alone.end()
    for place, other in enumerate(others):
        engine.submit(request([7 + place] * (5 + place), seed=place, temperature=1.0), other)
    engine.submit(request(seed=5, temperature=1.0), among)
    await among.end()
    for other in others:
        await other.end()
    assert among.tokens == alone.tokens


async def test_cpu_engine_sends_logprobs_with_every_token(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    reply, requested = listening(), request()
    requested.output_options = OutputOptions(logprobs=2)
    engine.submit(requested, reply)
    await reply.end()
    assert all(len(word.log_probs) == 1 and len(word.top_logprobs[0]) == 2 for word in reply.messages)


async def test_cpu_engine_sends_nothing_after_cancellation(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    reply = listening()
    engine.submit(request(max_tokens=None), reply)
    await asyncio.wait_for(reply.began.wait(), TIMEOUT_S)
    engine.cancel(reply)
    engine.cancel(reply)
    output = len(reply.messages)
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)
    after = listening()
    engine.submit(request([9, 9, 9]), after)
    await after.end()
    assert len(reply.messages) == output
    assert not reply.is_finished
    assert host.loads[-1].kv_used_blocks == 0


async def test_cpu_engine_refuses_requests_beyond_its_queue_as_retryable(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin(max_num_seqs=1, max_waiting_requests=1)
    replies = [listening(), listening()]
    for reply in replies:
        engine.submit(request(max_tokens=4), reply)
    with pytest.raises(WorkerOverloaded, match="queue full: 1 requests running, 1 waiting"):
        engine.submit(request(), listening())
    for reply in replies:
        await reply.end()
    again = listening()
    engine.submit(request(), again)
    await again.end()
    assert len(again.tokens) == 8


async def test_cpu_engine_refuses_an_invalid_request_at_once(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    with pytest.raises(InvalidArgument, match="vocabulary"):
        engine.submit(request([5000]), listening())
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)


async def test_cpu_engine_failing_request_does_not_affect_others(
    begin: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo.cpu import core

    def fragile(logits: Any, draw: Any) -> Any:
        raise FloatingPointError("the model's logits are not finite")

    monkeypatch.setattr(core, "sample", fragile)
    engine, _, _ = await begin()
    broken, fine = listening(), listening()
    engine.submit(request(temperature=1.0), broken)
    engine.submit(request(), fine)
    await broken.end()
    await fine.end()
    assert isinstance(broken.error, Unknown)
    assert len(fine.tokens) == 8


async def test_cpu_engine_failing_reply_does_not_affect_others(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    broken, fine = listening(), listening()

    def refuse(token_id: int) -> None:
        raise OSError("the connection is gone")

    broken.token = refuse
    engine.submit(request(max_tokens=None), broken)
    engine.submit(request(), fine)
    await fine.end()
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)
    assert not broken.is_finished


async def test_cpu_engine_crash_fails_all_requests_and_notifies_its_host(
    begin: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(core: Core) -> Any:
        raise MemoryError("no more")

    engine, host, _ = await begin()
    monkeypatch.setattr(Core, "step", explode)
    reply = listening()
    engine.submit(request(), reply)
    await reply.end()
    assert isinstance(reply.error, EngineShutdown)
    assert isinstance(await asyncio.wait_for(host.failure, TIMEOUT_S), MemoryError)
    with pytest.raises(EngineShutdown):
        engine.submit(request(), listening())


async def test_cpu_engine_stop_ends_requests_and_refuses_new_ones(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    reply = listening()
    engine.submit(request(max_tokens=None), reply)
    await engine.stop()
    assert isinstance(reply.error, EngineShutdown) or reply.is_finished
    with pytest.raises(EngineShutdown):
        engine.submit(request(), listening())


async def test_cpu_engine_emits_a_cleared_cache(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    first, second = listening(), listening()
    engine.submit(request(), first)
    await first.end()
    await engine.between_steps(engine.core.clear)
    engine.submit(request(), second)
    await second.end()
    assert Cleared() in host.events
    assert second.messages[-1].completion_usage.prompt_tokens_details.cached_tokens == 0
    assert not any(isinstance(event, Removed) for event in host.events)


async def test_cpu_engine_can_be_stopped_after_a_failed_start(begin: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        await begin(model_path=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1000}, "--max-model-len 1000: must be at most 256"),
        ({"max_model_len": 100, "kv_cache_blocks": 20}, "holds 20 blocks of 4 tokens"),
    ],
)
async def test_cpu_engine_refuses_contradictory_limits(begin: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await begin(**options)


async def test_cpu_engine_small_cache_shortens_the_context(begin: Any) -> None:
    _, _, config = await begin(kv_cache_blocks=10)
    assert config.context_length == 40


# ---- guided ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def guided_engine(
    begin: Callable[..., Any], write_model: Callable[..., str], write_letters: Callable[[Path], None]
) -> CpuEngine:
    path = write_model()
    write_letters(Path(path))
    engine, _, _ = await begin(model_path=path, reasoning_parser="qwen3")
    assert isinstance(engine, CpuEngine)
    return engine


def constrained(more: dict[str, Any] | None = None, **constraint: Any) -> PreprocessedRequest:
    sampling = SamplingOptions(temperature=0.0, guided_decoding=GuidedDecoding(**constraint))
    return PreprocessedRequest(
        "m", list(range(9)), StopConditions(max_tokens=60), sampling, eos_token_ids=[95], **(more or {})
    )


def read(reply: Any, letters: str) -> str:
    return "".join(letters[token] for token in reply.tokens if token != 95)


async def test_cpu_engine_guided_request_waits_for_its_grammar(
    guided_engine: CpuEngine, listening: Callable[[], Any], letters: str
) -> None:
    for _ in range(2):
        reply = listening()
        guided_engine.submit(constrained(regex="[0-9]{3}-[0-9]{2}"), reply)
        await reply.end()
        assert reply.is_finished
        assert re.fullmatch("[0-9]{3}-[0-9]{2}", read(reply, letters))


async def test_cpu_engine_refuses_an_invalid_grammar_by_name(
    guided_engine: CpuEngine, listening: Callable[[], Any]
) -> None:
    reply = listening()
    guided_engine.submit(constrained(regex="("), reply)
    await reply.end()
    assert isinstance(reply.error, InvalidArgument)
    assert reply.error.param == "guided_regex"
    assert not reply.messages
    await asyncio.wait_for(guided_engine.drain(), TIMEOUT_S)
    with pytest.raises(InvalidArgument, match="bytes"):
        guided_engine.submit(constrained(regex="a" * (1 << 21)), listening())
    await asyncio.wait_for(guided_engine.drain(), TIMEOUT_S)


async def test_cpu_engine_sends_nothing_to_a_request_cancelled_during_compilation(
    guided_engine: CpuEngine, listening: Callable[[], Any]
) -> None:
    gone, stays = listening(), listening()
    guided_engine.submit(constrained(regex="a{5}"), gone)
    guided_engine.cancel(gone)
    guided_engine.submit(constrained(regex="a{5}"), stays)
    await stays.end()
    assert stays.is_finished
    assert not gone.messages
    assert not gone.ended.is_set()


async def test_cpu_engine_constraint_applies_after_reasoning(
    guided_engine: CpuEngine, listening: Callable[[], Any], letters: str
) -> None:
    bias = {"sampling_options": {"logit_bias": {str(letters.index(char)): 60.0 for char in "</think>"}}}
    reply = listening()
    guided_engine.submit(constrained({"require_reasoning": True, "extra_args": bias}, regex="[0-9]{3}"), reply)
    await reply.end()
    text = read(reply, letters)
    assert not re.match("[0-9]{3}$", text)
    if reply.messages[-1].finish_reason == "stop":
        assert re.fullmatch("(.|\n)*</think>[ \n]{0,4}[0-9]{3}", text)


async def test_cpu_engine_reports_a_too_complex_grammar_as_a_client_error(
    guided_engine: CpuEngine, listening: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_complex(*_: Any) -> None:
        raise InvalidArgument("guided decoding: too complex", param="guided_decoding")

    monkeypatch.setattr(Guide, "take", too_complex)
    reply = listening()
    guided_engine.submit(constrained(regex="a{5}"), reply)
    await reply.end()
    assert isinstance(reply.error, InvalidArgument)
