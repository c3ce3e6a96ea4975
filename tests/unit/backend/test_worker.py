"""A worker is discoverable while it can serve, and every response ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.backend.config import DisaggregatedOptions, WorkerOptions
from dynamo.backend.drain import DrainState, joint
from dynamo.backend.sample import EchoEngine
from dynamo.backend.worker import EngineWorker
from dynamo.core.clock import ManualClock
from dynamo.core.codec import MSGPACK, encode
from dynamo.core.config import load
from dynamo.core.errors import (
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    WorkerOverloaded,
    WorkerUnavailable,
)
from dynamo.protocols.discovery import EVENT_SOURCES, INSTANCES, MODEL_CARDS
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, StopConditions
from dynamo.protocols.kv_events import Cleared, WorkerKvEvent
from dynamo.protocols.load import KvMetrics, WorkerLoad
from dynamo.protocols.worker_control import WORKER_CONTROL
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.request_plane.base import Call, Item


class ReceivedOutput:
    """Receiver that records its messages and can be awaited."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: EngineOutput | None = None
        self.error: Exception | None = None
        self.first = asyncio.Event()
        self.ended = asyncio.Event()

    def on_token(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.first.set()

    def on_item(self, item: Item) -> None:
        assert item.data is not None
        self.last = msgspec.msgpack.decode(item.data, type=EngineOutput)

    def on_end(self) -> None:
        self.ended.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    async def end(self) -> "ReceivedOutput":
        await asyncio.wait_for(self.ended.wait(), 5)
        return self


class Held(EchoEngine):
    """Echo that sends one token and blocks until it is released."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.is_held = True
        self.is_stopped = False

    def _schedule(self) -> None:
        message = [echo.sent for echo in self._running.values()]
        if not self.is_held or not all(message):
            super()._schedule()

    def let_go(self) -> None:
        self.is_held = False
        self._schedule()

    async def stop(self) -> None:
        self.is_stopped = True
        await super().stop()


class Bench:
    """A worker and a client that calls it."""

    def __init__(self, worker: EngineWorker, caller: DistributedRuntime, client: Client, clock: ManualClock) -> None:
        self.worker = worker
        self.caller = caller
        self.client = client
        self.clock = clock

    async def send_request(self, *token_ids: int) -> tuple[ReceivedOutput, Call]:
        return await self.send(
            encode(
                PreprocessedRequest(model="echo", token_ids=list(token_ids), stop_conditions=StopConditions()), MSGPACK
            )
        )

    async def send(self, body: bytes) -> tuple[ReceivedOutput, Call]:
        received = ReceivedOutput()
        return received, await self.client.send(
            body, received, request_id="r", instance_id=self.worker.runtime.instance_id
        )

    async def records(self, bucket: str) -> dict[str, bytes]:
        return await self.caller.discovery.snapshot(bucket)

    def metrics(self) -> str:
        return self.worker.runtime.metrics.render()


@asynccontextmanager
async def serving(engine: EchoEngine, *argv: str) -> AsyncIterator[Bench]:
    cluster, clock = MemoryCluster(), ManualClock()
    caller = cluster.runtime()
    worker = EngineWorker(load(WorkerOptions, argv, {}), engine, cluster.runtime(), clock=clock)
    await worker.start()
    client = await caller.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances(5)
    bench = Bench(worker, caller, client, clock)
    try:
        yield bench
    finally:
        await worker.stop(drain_s=0.0)
        await caller.shutdown()


async def test_worker_answers_a_request(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        received, _ = await bench.send_request(5, 6, 7)
        await received.end()
        assert received.error is None
        assert received.tokens == [5, 6]
        assert received.last is not None
        assert (received.last.token_ids, received.last.finish_reason) == ([7], "length")


async def test_model_card_has_the_values_of_the_engine(model_dir: str) -> None:
    flags = ("--dyn-tool-call-parser=hermes", "--endpoint-types=chat", "--dyn-structural-tag=true")
    async with serving(EchoEngine(model_dir, "parrot"), *flags) as bench:
        (record,) = [json.loads(value) for value in (await bench.records(MODEL_CARDS)).values()]
        assert record["instance_id"] == bench.worker.runtime.instance_id
        card = record["card_json"]
        assert (card["display_name"], card["model_type"]) == ("parrot", "Chat")
        assert (card["context_length"], card["kv_cache_block_size"]) == (4096, 16)
        assert card["runtime_config"]["total_kv_blocks"] == 1024
        assert card["runtime_config"]["tool_call_parser"] == "hermes"
        assert card["runtime_config"]["structural_tag"]["scope"] == "always"
        assert card["runtime_config"]["structural_tag_mode"] == "on"


async def test_worker_is_ready_between_start_and_stop(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        assert bench.worker.runtime.health.is_ready()
        await bench.worker.stop()
        assert not bench.worker.runtime.health.is_ready()


@pytest.mark.parametrize("body", [b"", b"\xc1", encode({"model": 3}, MSGPACK), encode([1], MSGPACK)])
async def test_unreadable_request_is_an_invalid_argument(model_dir: str, body: bytes) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        received, _ = await bench.send(body)
        assert isinstance((await received.end()).error, InvalidArgument)


async def test_request_refused_by_the_engine_is_an_invalid_argument(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        received, _ = await bench.send_request()
        assert isinstance((await received.end()).error, InvalidArgument)


async def test_worker_refuses_prompt_embeds_for_an_engine_with_token_input_only(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        request = PreprocessedRequest(model="echo", token_ids=[], prompt_embeds="AAAA")
        received, _ = await bench.send(encode(request, MSGPACK))
        error = (await received.end()).error
        assert isinstance(error, InvalidArgument)
        assert "prompt_embeds is not supported by the engine of model `echo`" in str(error)


async def test_full_worker_refuses_requests_as_overloaded(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "1")
    engine = Held(model_dir)
    async with serving(engine, "--engine-request-limit=1") as bench:
        running, waiting, third = [(await bench.send_request(1, 2, 3))[0] for _ in range(3)]
        error = (await third.end()).error
        assert isinstance(error, WorkerOverloaded)
        assert error.retry_elsewhere
        assert "dynamo_work_handler_enqueue_rejected_total" in bench.metrics()
        engine.let_go()
        await running.end()
        await waiting.end()
        assert waiting.error is None


async def test_stopped_request_ends_with_finish_reason_cancelled(model_dir: str) -> None:
    async with serving(Held(model_dir)) as bench:
        received, call = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(received.first.wait(), 5)
        call.stop()
        await received.end()
        assert received.last is not None
        assert received.last.finish_reason == "cancelled"


async def test_cancelled_request_is_removed_from_the_engine(model_dir: str) -> None:
    engine = Held(model_dir)
    async with serving(engine) as bench:
        received, call = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(received.first.wait(), 5)
        call.kill()
        await turns(10)
        assert not engine._running


async def test_stopping_worker_deregisters_first_and_answers_late_requests(model_dir: str) -> None:
    engine = Held(model_dir)
    async with serving(engine) as bench:
        early, _ = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(early.first.wait(), 5)
        stopping = asyncio.create_task(bench.worker.stop(grace_s=5.0))
        late, _ = await bench.send_request(4, 5)
        await turns(10)
        assert await bench.records(INSTANCES) == {}
        assert await bench.records(MODEL_CARDS) == {}
        engine.let_go()
        assert (await early.end()).error is None
        assert (await late.end()).error is None
        bench.clock.advance(1.0)
        await turns(10)
        bench.clock.advance(1.0)
        await asyncio.wait_for(stopping, 5)


async def test_worker_refuses_new_requests_after_the_grace_period_and_finishes_running_ones(model_dir: str) -> None:
    engine = Held(model_dir)
    async with serving(engine) as bench:
        running, _ = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(running.first.wait(), 5)
        client = bench.client
        target = client._targets[bench.worker.runtime.instance_id]
        stopping = asyncio.create_task(bench.worker.stop(grace_s=0.0))
        await turns(10)
        client._targets[bench.worker.runtime.instance_id] = target
        late, _ = await bench.send_request(4)
        error = (await late.end()).error
        assert isinstance(error, EngineShutdown)
        engine.let_go()
        assert (await running.end()).error is None
        await asyncio.wait_for(stopping, 5)
        assert engine.is_stopped


async def test_request_beyond_the_drain_timeout_fails_as_retryable(model_dir: str) -> None:
    async with serving(Held(model_dir)) as bench:
        received, _ = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(received.first.wait(), 5)
        await bench.worker.stop(drain_s=0.0)
        error = (await received.end()).error
        assert isinstance(error, WorkerUnavailable)
        assert error.retry_elsewhere


async def test_failed_engine_refuses_and_fails_requests_at_once(model_dir: str) -> None:
    failures: list[BaseException] = []
    async with serving(Held(model_dir)) as bench:
        bench.worker._on_failure = failures.append
        running, _ = await bench.send_request(1, 2, 3)
        await asyncio.wait_for(running.first.wait(), 5)
        bench.worker.fail(DynamoException("out of memory"))
        bench.worker.fail(DynamoException("again"))
        late, _ = await bench.send_request(4)
        assert isinstance((await late.end()).error, EngineShutdown)
        await bench.worker.stop(grace_s=60.0)
        assert isinstance((await running.end()).error, EngineShutdown)
        assert [str(error) for error in failures] == ["out of memory"]


async def test_worker_with_a_failed_engine_start_leaves_no_records(model_dir: str) -> None:
    class Broken(EchoEngine):
        async def start(self, host: Any) -> Any:
            raise DynamoException("no memory")

    cluster = MemoryCluster()
    worker = EngineWorker(load(WorkerOptions, [], {}), Broken(model_dir), cluster.runtime())
    with pytest.raises(DynamoException, match="no memory"):
        await worker.start()
    await worker.stop()
    observer = cluster.runtime()
    assert await observer.discovery.snapshot(INSTANCES) == {}
    assert await observer.discovery.snapshot(MODEL_CARDS) == {}
    await observer.shutdown()


async def test_second_stop_has_no_effect(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        await bench.worker.stop()
        await bench.worker.stop()


async def test_worker_publishes_kv_events_and_load(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        plane, endpoint = bench.caller.event_plane, bench.caller.endpoint("dynamo.backend.generate")
        blocks = await plane.subscriber(endpoint.id, "kv-events")
        loads = await plane.subscriber(endpoint.id, "kv_metrics")
        await turns(10)
        bench.worker.publish_kv_event(Cleared())
        bench.worker.publish_load(WorkerLoad(kv_used_blocks=3, kv_total_blocks=12))
        event = await asyncio.wait_for(anext(aiter(blocks)), 5)
        assert isinstance(event, Event)
        (reported,) = msgspec.msgpack.decode(event.payload, type=list[WorkerKvEvent])
        assert (reported.worker_id, reported.event.data) == (bench.worker.runtime.instance_id, "cleared")
        event = await asyncio.wait_for(anext(aiter(loads)), 5)
        assert isinstance(event, Event)
        assert msgspec.msgpack.decode(event.payload, type=KvMetrics).kv_used_blocks == 3
        await blocks.close()
        await loads.close()


async def test_metrics_report_blocks_and_slots(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir, "parrot"), "--engine-request-limit=7") as bench:
        bench.worker.publish_load(WorkerLoad(kv_used_blocks=3, kv_total_blocks=12))
        text = bench.metrics()
        worker = (
            f'dynamo_namespace="dynamo",dynamo_component="backend",worker_id="{bench.worker.runtime.instance_id:x}"'
        )
        rank = f'{worker},model="parrot",dp_rank="0"'
        assert f"dynamo_component_total_blocks{{{rank}}} 1024" in text
        assert f"dynamo_component_gpu_cache_usage_percent{{{rank}}} 0.25" in text
        assert f"dynamo_work_handler_pool_capacity{{{worker}}} 7" in text
        assert f"dynamo_work_handler_queue_capacity{{{worker}}} 16" in text


async def test_drained_worker_is_deregistered_and_resumes_with_the_same_records(model_dir: str) -> None:
    async with serving(EchoEngine(model_dir)) as bench:
        before = {bucket: await bench.records(bucket) for bucket in (INSTANCES, MODEL_CARDS, EVENT_SOURCES)}
        assert all(before.values())
        await bench.worker.service.drain()
        left = {key for bucket in before for key in await bench.records(bucket)}
        assert {key.split("/")[2] for key in left} == {WORKER_CONTROL}, "only the endpoint that resumes it"
        assert not bench.worker.runtime.health.is_ready()
        late, _ = await bench.send_request(5, 6)
        assert (await late.end()).error is None
        while bench.worker.service.state is not DrainState.DRAINED:
            bench.clock.advance(1.0)
            await turns(10)
        with pytest.raises(WorkerUnavailable):
            await bench.send_request(5, 6)

        await bench.worker.service.resume()
        await bench.client.wait_for_instances(5)
        assert {bucket: await bench.records(bucket) for bucket in before} == before
        assert bench.worker.runtime.health.is_ready()
        served, _ = await bench.send_request(5, 6)
        assert (await served.end()).error is None


# Roles.


def role_options(*argv: str) -> DisaggregatedOptions:
    return load(DisaggregatedOptions, argv, {})


class ExportingEngine(EchoEngine):
    """Exports its blocks until it is notified that they were fetched."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.polls = 0
        self.lent: bool | None = True
        self.stopped = False

    def is_quiescent(self) -> bool | None:
        self.polls += 1
        return None if self.lent is None else not self.lent

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


async def stopping(engine: ExportingEngine, *argv: str) -> tuple[asyncio.Task[None], ManualClock]:
    clock = ManualClock()
    runtime = MemoryCluster().runtime()
    worker = EngineWorker(role_options(*argv), engine, runtime, clock=clock)
    await worker.start()
    records = await runtime.discovery.snapshot(MODEL_CARDS)
    assert [json.loads(value)["card_json"]["worker_type"] for value in records.values()] == [
        worker.options.role.worker_type
    ]
    return asyncio.get_running_loop().create_task(worker.stop()), clock


async def until_polled(engine: ExportingEngine, clock: ManualClock, polls: int) -> None:
    while engine.polls < polls:
        clock.advance(0.1)
        await turns(10)


async def test_prefill_worker_keeps_its_blocks_until_they_are_fetched(model_dir: str) -> None:
    engine = ExportingEngine(model_dir)
    ending, clock = await stopping(engine, "--disaggregation-mode=prefill")
    await until_polled(engine, clock, 3)
    assert not engine.stopped
    engine.lent = False
    await until_polled(engine, clock, 4)
    await ending
    assert engine.stopped


@pytest.mark.parametrize("lent", [True, None])
async def test_prefill_worker_drain_has_a_timeout(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, lent: bool | None
) -> None:
    monkeypatch.setenv("DYN_PREFILL_DRAIN_TIMEOUT_S", "0.3")
    engine = ExportingEngine(model_dir)
    engine.lent = lent
    ending, clock = await stopping(engine, "--disaggregation-mode=prefill")
    while not ending.done():
        clock.advance(0.1)
        await turns(10)
    assert engine.stopped


async def test_decode_worker_does_not_wait_for_block_transfers(model_dir: str) -> None:
    engine = ExportingEngine(model_dir)
    ending, _ = await stopping(engine, "--is-decode-worker")
    await ending
    assert engine.polls == 0


@pytest.mark.parametrize(
    ("role", "lent", "message", "is_safe"),
    [
        ("prefill", True, "pending", False),
        ("prefill", False, "complete", True),
        ("prefill", None, "unknown", True),
        ("decode", True, "not_applicable", True),
    ],
)
async def test_worker_status_reports_pending_block_transfers(
    model_dir: str, role: str, lent: bool | None, message: str, is_safe: bool
) -> None:
    engine, clock = ExportingEngine(model_dir), ManualClock()
    engine.lent = lent
    runtime = MemoryCluster().runtime()
    worker = EngineWorker(role_options(f"--disaggregation-mode={role}"), engine, runtime, clock=clock)
    await worker.start()
    await worker.service.drain()
    while worker.service.state is not DrainState.DRAINED:
        clock.advance(1.0)
        await turns(10)
    status = worker.service.status()
    assert (status.kv_transfers, status.safe_to_delete) == (message, is_safe)
    assert joint([status]).kv_transfers == message
    engine.lent = False
    await worker.stop()
