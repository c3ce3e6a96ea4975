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
from dynamo.cpu.engine import CpuEngine
from dynamo.cpu.guided import Guide
from dynamo.protocols.engine import GuidedDecoding, OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.protocols.load import ForwardPass, WorkerLoad

TIMEOUT_S = 20.0


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
def listening(heard: type[Any]) -> Callable[[], Any]:
    """A reply that can be waited for."""

    class Listening(heard):  # type: ignore[misc]
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


async def test_the_engine_says_what_it_is(begin: Any) -> None:
    _, host, config = await begin(model_name="tiny", max_num_seqs=4, max_model_len=100)
    assert (config.served_model_name, config.context_length, config.kv_cache_block_size) == ("tiny", 100, 4)
    assert config.total_kv_blocks == 4 * 25
    assert host.loads == [WorkerLoad(kv_total_blocks=100)]


async def test_a_request_is_answered_token_by_token(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    reply = listening()
    engine.submit(request(), reply)
    await reply.end()
    assert len(reply.tokens) == 8
    assert [isinstance(word, int) for word in reply.said] == [True] * 7 + [False]
    assert reply.said[-1].finish_reason == "length"
    stored = [event for event in host.events if isinstance(event, Stored)]
    assert sum(len(event.blocks) for event in stored) == 3
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)
    assert host.loads[-1].running_requests == 0
    assert len(host.passes) == 8
    assert all(one.wall_time > 0 for one in host.passes)


async def test_the_same_seed_says_the_same_among_others(begin: Any, listening: Any) -> None:
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


async def test_logprobs_come_with_every_token(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    reply, asked = listening(), request()
    asked.output_options = OutputOptions(logprobs=2)
    engine.submit(asked, reply)
    await reply.end()
    assert all(len(word.log_probs) == 1 and len(word.top_logprobs[0]) == 2 for word in reply.said)


async def test_a_cancelled_request_hears_nothing_more(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    reply = listening()
    engine.submit(request(max_tokens=None), reply)
    await asyncio.wait_for(reply.began.wait(), TIMEOUT_S)
    engine.cancel(reply)
    engine.cancel(reply)
    said = len(reply.said)
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)
    after = listening()
    engine.submit(request([9, 9, 9]), after)
    await after.end()
    assert len(reply.said) == said
    assert not reply.is_finished
    assert host.loads[-1].kv_used_blocks == 0


async def test_requests_beyond_the_queue_are_for_another_worker(begin: Any, listening: Any) -> None:
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


async def test_a_bad_request_is_refused_at_once(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    with pytest.raises(InvalidArgument, match="vocabulary"):
        engine.submit(request([5000]), listening())
    await asyncio.wait_for(engine.drain(), TIMEOUT_S)


async def test_a_request_that_fails_takes_no_other_with_it(
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


async def test_a_reply_that_cannot_be_written_takes_no_other_with_it(begin: Any, listening: Any) -> None:
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


async def test_a_broken_engine_fails_everyone_and_tells_its_host(
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


async def test_a_stopped_engine_ends_what_runs_and_takes_nothing_new(begin: Any, listening: Any) -> None:
    engine, _, _ = await begin()
    reply = listening()
    engine.submit(request(max_tokens=None), reply)
    await engine.stop()
    assert isinstance(reply.error, EngineShutdown) or reply.is_finished
    with pytest.raises(EngineShutdown):
        engine.submit(request(), listening())


async def test_a_cleared_cache_is_told(begin: Any, listening: Any) -> None:
    engine, host, _ = await begin()
    first, second = listening(), listening()
    engine.submit(request(), first)
    await first.end()
    await engine.between_steps(engine.core.clear)
    engine.submit(request(), second)
    await second.end()
    assert Cleared() in host.events
    assert second.said[-1].completion_usage.prompt_tokens_details.cached_tokens == 0
    assert not any(isinstance(event, Removed) for event in host.events)


async def test_an_engine_that_cannot_load_can_be_stopped(begin: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        await begin(model_path=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1000}, "--max-model-len 1000: must be at most 256"),
        ({"max_model_len": 100, "kv_cache_blocks": 20}, "holds 20 blocks of 4 tokens"),
    ],
)
async def test_limits_that_do_not_fit_are_refused(begin: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await begin(**options)


async def test_a_small_cache_shortens_the_context(begin: Any) -> None:
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


async def test_a_guided_request_waits_for_its_grammar_and_then_follows_it(
    guided_engine: CpuEngine, listening: Callable[[], Any], letters: str
) -> None:
    for _ in range(2):
        reply = listening()
        guided_engine.submit(constrained(regex="[0-9]{3}-[0-9]{2}"), reply)
        await reply.end()
        assert reply.is_finished
        assert re.fullmatch("[0-9]{3}-[0-9]{2}", read(reply, letters))


async def test_a_request_for_nonsense_is_refused_by_name(
    guided_engine: CpuEngine, listening: Callable[[], Any]
) -> None:
    reply = listening()
    guided_engine.submit(constrained(regex="("), reply)
    await reply.end()
    assert isinstance(reply.error, InvalidArgument)
    assert reply.error.param == "guided_regex"
    assert not reply.said
    await asyncio.wait_for(guided_engine.drain(), TIMEOUT_S)
    with pytest.raises(InvalidArgument, match="bytes"):
        guided_engine.submit(constrained(regex="a" * (1 << 21)), listening())
    await asyncio.wait_for(guided_engine.drain(), TIMEOUT_S)


async def test_who_leaves_before_the_grammar_is_there_hears_nothing(
    guided_engine: CpuEngine, listening: Callable[[], Any]
) -> None:
    gone, stays = listening(), listening()
    guided_engine.submit(constrained(regex="a{5}"), gone)
    guided_engine.cancel(gone)
    guided_engine.submit(constrained(regex="a{5}"), stays)
    await stays.end()
    assert stays.is_finished
    assert not gone.said
    assert not gone.ended.is_set()


async def test_a_constraint_waits_for_the_end_of_thoughts(
    guided_engine: CpuEngine, listening: Callable[[], Any], letters: str
) -> None:
    bias = {"sampling_options": {"logit_bias": {str(letters.index(char)): 60.0 for char in "</think>"}}}
    reply = listening()
    guided_engine.submit(constrained({"require_reasoning": True, "extra_args": bias}, regex="[0-9]{3}"), reply)
    await reply.end()
    text = read(reply, letters)
    assert not re.match("[0-9]{3}$", text)
    if reply.said[-1].finish_reason == "stop":
        assert re.fullmatch("(.|\n)*</think>[ \n]{0,4}[0-9]{3}", text)


async def test_a_grammar_that_proves_too_complex_is_the_callers_error(
    guided_engine: CpuEngine, listening: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_complex(*_: Any) -> None:
        raise InvalidArgument("guided decoding: too complex", param="guided_decoding")

    monkeypatch.setattr(Guide, "take", too_complex)
    reply = listening()
    guided_engine.submit(constrained(regex="a{5}"), reply)
    await reply.end()
    assert isinstance(reply.error, InvalidArgument)
