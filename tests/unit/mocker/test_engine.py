"""The engine follows its simulation: tokens at the end of steps, none for cancelled requests, no work when idle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.settle import turns

from dynamo.backend.engine import EngineConfig
from dynamo.core.clock import ManualClock
from dynamo.core.config import load
from dynamo.core.errors import EngineShutdown, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.engine import LATE_MAX_S, TURN_TOKENS, MockerEngine
from dynamo.mocker.simulation.timing import Timing
from dynamo.protocols.engine import (
    EngineOutput,
    PrefillResult,
    PreprocessedRequest,
    Routing,
    StopConditions,
)
from dynamo.protocols.kv_events import KvEvent, Stored
from dynamo.protocols.load import ForwardPass, WorkerLoad


class Host:
    """A worker that records every call."""

    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.worker_id = 1
        self.tiers: set[str] = set()
        self.events: list[tuple[KvEvent, int]] = []
        self.loads: list[WorkerLoad] = []
        self.passes: list[ForwardPass] = []
        self.failure: BaseException | None = None

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        self.events.append((event, dp_rank))
        self.tiers.add(tier)

    def publish_load(self, load: WorkerLoad) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        self.passes.append(passed)

    def fail(self, error: BaseException) -> None:
        self.failure = error


class ReceivedOutput:
    """Reply that records its messages."""

    request_id = "r"
    is_cancelled = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: EngineOutput | None = None
        self.is_finished = False
        self.error: BaseException | None = None

    def finished_with(self) -> str | None:
        return self.last.finish_reason if self.last is not None and self.is_finished else None

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """A cancel callback that is never called."""

    def token(self, token_id: int) -> None:
        assert self.last is None
        self.tokens.append(token_id)

    def item(self, value: Any) -> None:
        self.last = value

    def finish(self) -> None:
        self.is_finished = True

    def fail(self, error: BaseException) -> None:
        self.error = error


class Bench:
    """An engine, its host, and its clock."""

    def __init__(self, config: MockerConfig) -> None:
        self.host: Any = Host()
        self.clock = ManualClock()
        self.engine = MockerEngine(config, clock=self.clock)
        self.config: EngineConfig

    def send_request(self, max_tokens: int, prompt: int = 10, routing: Routing | None = None) -> ReceivedOutput:
        received = ReceivedOutput()
        stop = StopConditions(max_tokens=max_tokens)
        request = PreprocessedRequest(model="m", token_ids=[1] * prompt, stop_conditions=stop, routing=routing)
        self.engine.submit(request, received)
        return received

    async def pass_ms(self, milliseconds: float) -> None:
        self.clock.advance(milliseconds / 1000)
        await turns(5)


@asynccontextmanager
async def running(model_dir: Path, *argv: str) -> AsyncIterator[Bench]:
    bench = Bench(load(MockerConfig, [f"--model-path={model_dir}", "--block-size=4", *argv], {}))
    bench.config = await bench.engine.start(bench.host)
    try:
        await bench.pass_ms(0)
        yield bench
    finally:
        await bench.engine.stop()
    assert bench.host.failure is None


async def test_engine_config_describes_the_model_and_cache(model_dir: Path) -> None:
    async with running(model_dir, "--num-gpu-blocks-override=100", "--data-parallel-size=2") as bench:
        assert bench.config.served_model_name == "tiny-model"
        assert bench.config.model_path == str(model_dir)
        assert (bench.config.context_length, bench.config.total_kv_blocks) == (0, 100)
        assert (bench.config.kv_cache_block_size, bench.config.data_parallel_size) == (4, 2)


async def test_published_context_length_is_that_of_the_flag(model_dir: Path) -> None:
    async with running(model_dir, "--max-model-len=64") as bench:
        assert bench.config.context_length == 64


async def test_tokens_are_sent_at_the_end_of_their_step(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        received = bench.send_request(3)
        await bench.pass_ms(0)
        prefill_ms = Timing().prefill_ms(10)
        await bench.pass_ms(prefill_ms - 0.1)
        assert received.tokens == []
        await bench.pass_ms(0.2)
        assert len(received.tokens) == 1
        await bench.pass_ms(6)
        assert len(received.tokens) == 2
        await bench.pass_ms(6)
        assert received.is_finished
        assert received.last is not None
        assert received.last.finish_reason == "length"
        assert received.last.token_ids
        assert received.last.completion_usage is not None
        assert received.last.completion_usage.completion_tokens == 3


async def test_engine_catches_up_after_a_late_timer(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        received = bench.send_request(100)
        await bench.pass_ms(0)
        for _ in range(30):
            await bench.pass_ms(7)
        elapsed_ms = 30 * 7 - Timing().prefill_ms(10)
        assert len(received.tokens) - 1 == pytest.approx(elapsed_ms / 5.75, abs=1)


async def test_engine_does_not_catch_up_after_a_long_stall(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        received = bench.send_request(400)
        await bench.pass_ms(0)
        await bench.pass_ms(60_000)
        for _ in range(200):
            await bench.pass_ms(0)
        assert len(received.tokens) < LATE_MAX_S * 1000 / 5 + 5


async def test_speedup_ratio_zero_completes_requests_without_delay(model_dir: Path) -> None:
    async with running(model_dir, "--speedup-ratio=0") as bench:
        received = bench.send_request(50)
        await asyncio.wait_for(bench.engine.drain(), 5)
        assert len(received.tokens) == 49
        assert received.is_finished
        assert 2 not in received.tokens
        assert max(received.tokens) < 100


async def test_speedup_ratio_zero_streams_the_first_token_and_yields_to_the_loop(model_dir: Path) -> None:
    async with running(model_dir, "--speedup-ratio=0", "--max-model-len=2000") as bench:
        received = bench.send_request(900)
        seen = [0]
        while not received.is_finished:
            await turns()
            seen.append(len(received.tokens))
        assert 1 in seen
        assert max(after - before for before, after in pairwise(seen)) <= TURN_TOKENS


async def test_cancelled_request_receives_no_further_tokens(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        received, other = bench.send_request(100), bench.send_request(3)
        await bench.pass_ms(0)
        await bench.pass_ms(30)
        output = len(received.tokens)
        assert output > 0
        bench.engine.cancel(received)
        for _ in range(10):
            await bench.pass_ms(6)
        assert len(received.tokens) <= output + 1
        assert not received.is_finished
        assert other.is_finished
        await asyncio.wait_for(bench.engine.drain(), 5)
        bench.engine.cancel(received)


async def test_prefill_cancelled_during_its_last_step_releases_its_blocks(model_dir: Path) -> None:
    async with running(model_dir, "--disaggregation-mode=prefill", "--num-gpu-blocks-override=8") as bench:
        for _ in range(4):  # All blocks would be lost by then.
            received = bench.send_request(1, prompt=16)
            await bench.pass_ms(0)
            bench.engine.cancel(received)
            await bench.pass_ms(1000)
            assert received.last is None
        other = bench.send_request(1, prompt=16)
        for _ in range(10):
            await bench.pass_ms(100)
        assert other.finished_with() == "length"
        await asyncio.wait_for(bench.engine.drain(), 5)


async def test_request_cancelled_before_its_first_step_runs_no_step(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        bench.engine.cancel(bench.send_request(10))
        await bench.pass_ms(0)
        await asyncio.wait_for(bench.engine.drain(), 5)
        assert bench.host.loads == []


async def test_rank_is_selected_by_the_request_or_by_load(model_dir: Path) -> None:
    async with running(model_dir, "--data-parallel-size=2", "--speedup-ratio=0") as bench:
        bench.send_request(5, routing=Routing(dp_rank=1))
        bench.send_request(5)
        bench.send_request(5, routing=Routing(dp_rank=1))
        await asyncio.wait_for(bench.engine.drain(), 5)
        stored = [dp_rank for event, dp_rank in bench.host.events if isinstance(event, Stored)]
        assert set(stored) == {0, 1}
        assert {load.dp_rank for load in bench.host.loads} == {0, 1}


async def test_engine_publishes_blocks_and_load_at_the_end_of_a_step(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        bench.send_request(2, prompt=9)
        await bench.pass_ms(0)
        assert bench.host.events == []
        await bench.pass_ms(30)
        (event, dp_rank) = bench.host.events[0]
        assert isinstance(event, Stored)
        assert (len(event.blocks), dp_rank) == (2, 0)
        assert bench.host.loads[0].kv_used_blocks == 3
        await bench.pass_ms(30)
        assert bench.host.loads[-1].kv_used_blocks == 0


async def test_engine_publishes_idle_load_after_its_last_request_is_cancelled(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        received = bench.send_request(100)
        await bench.pass_ms(0)
        await bench.pass_ms(30)
        assert bench.host.loads[-1].running_requests == 1
        bench.engine.cancel(received)
        for _ in range(3):
            await bench.pass_ms(10)
        last = bench.host.loads[-1]
        assert (last.running_requests, last.kv_used_blocks, last.active_decode_blocks) == (0, 0, 0)
        assert 'vllm:num_requests_running{engine="0",model_name="tiny-model"} 0' in bench.host.metrics.render()


async def test_metrics_have_vllm_names(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        bench.send_request(3)
        await bench.pass_ms(0)
        for _ in range(6):
            await bench.pass_ms(10)
        text = bench.host.metrics.render()
        labels = 'engine="0",model_name="tiny-model"'
        assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 1" in text
        assert f"vllm:inter_token_latency_seconds_count{{{labels}}} 2" in text
        assert f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1" in text
        assert f"vllm:num_requests_running{{{labels}}} 0" in text
        assert f"vllm:kv_cache_usage_perc{{{labels}}} 0" in text


async def test_invalid_request_is_refused_on_submit(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        with pytest.raises(InvalidArgument):
            bench.send_request(0)


async def test_stopped_engine_refuses_requests_with_engine_shutdown(model_dir: Path) -> None:
    async with running(model_dir) as bench:
        await bench.engine.stop()
        with pytest.raises(EngineShutdown):
            bench.send_request(3)


async def test_engine_reports_a_crash_to_the_worker(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(load(MockerConfig, [f"--model-path={model_dir}"], {}))
    await bench.engine.start(bench.host)
    received = bench.send_request(3)

    def broken(token_id: int) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(received, "token", broken)
    await bench.pass_ms(0)
    await bench.pass_ms(100)
    assert isinstance(bench.host.failure, RuntimeError)
    await bench.engine.stop()


async def test_prefill_worker_sends_one_token_and_finishes_after_the_transfer(model_dir: Path) -> None:
    flags = ["--disaggregation-mode=prefill", "--kv-bytes-per-token=1000000", "--kv-transfer-bandwidth=1"]
    async with running(model_dir, *flags) as bench:
        received = bench.send_request(8, prompt=20)
        await bench.pass_ms(0)
        await bench.pass_ms(18)
        first = received.last
        assert first is not None
        assert (len(first.token_ids), first.finish_reason) == (1, None)
        assert first.disaggregated_params is not None
        assert received.finished_with() is None, "20 tokens of a megabyte take 20 ms at 1 GB/s"
        await bench.pass_ms(25)
        assert received.finished_with() == "length"


async def test_decode_worker_starts_with_the_first_token_and_publishes_no_kv_events(model_dir: Path) -> None:
    async with running(model_dir, "--disaggregation-mode=decode") as bench:
        received = ReceivedOutput()
        request = PreprocessedRequest(
            model="m",
            token_ids=[1] * 20,
            stop_conditions=StopConditions(max_tokens=3),
            prefill_result=PrefillResult({"engine": "mocker"}),
        )
        bench.engine.submit(request, received)
        await bench.pass_ms(0)
        await bench.pass_ms(7)
        assert len(received.tokens) == 1, "a prompt of 20 tokens would have taken 17 ms"
        assert bench.host.events == []
        with pytest.raises(InvalidArgument, match="prefill_result"):
            bench.send_request(3)


async def test_engine_generates_reasoning_and_recorded_responses(model_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"output_token_ids": [7, 8, 9], "output_replay_id": "a"}')
    text = '--reasoning={"start_thinking_token_id": 5, "end_thinking_token_id": 6, "thinking_ratio": 0.5}'
    flags = ["--speedup-ratio=0", text, f"--response-replay-trace-path={trace}"]
    async with running(model_dir, *flags) as bench:
        thoughtful, recorded = bench.send_request(8), ReceivedOutput()
        stop = StopConditions(max_tokens=50)
        request = PreprocessedRequest("m", [1] * 5, stop, annotations=["output_replay_id:a"])
        bench.engine.submit(request, recorded)
        for _ in range(20):
            await bench.pass_ms(1)
        assert (thoughtful.tokens[0], thoughtful.tokens[3]) == (5, 6)
        assert recorded.last is not None
        assert recorded.tokens + recorded.last.token_ids == [7, 8, 9]
        unknown = ReceivedOutput()
        bench.engine.submit(PreprocessedRequest("m", [1], stop, annotations=["output_replay_id:b"]), unknown)
        for _ in range(60):
            await bench.pass_ms(1)
        assert len(unknown.tokens) == 49, "and the last one: random, as the released mocker's"


async def test_engine_publishes_events_of_the_host_tier(model_dir: Path) -> None:
    async with running(model_dir, "--speedup-ratio=0", "--num-host-blocks=8") as bench:
        bench.send_request(2, prompt=20)
        for _ in range(10):
            await bench.pass_ms(1)
        assert bench.host.tiers == {"device", "host_pinned"}
