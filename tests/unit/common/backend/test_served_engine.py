"""ServedEngine: an engine written for upstream's SDK behind the worker of dynamo.backend."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns, until

from dynamo.backend.worker import EngineWorker
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, RawEngine
from dynamo.common.backend.bindings import DisaggregationMode, WorkerConfig
from dynamo.common.backend.bound_worker import worker_options
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.served_engine import ServedEngine, check_kind, model_type_of, needs_of, output_of
from dynamo.core.clock import ManualClock
from dynamo.core.errors import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.llm import ModelInput
from dynamo.protocols.discovery import EVENT_SOURCES, MODEL_CARDS
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context

CONFIG = WorkerConfig("ns", model_name="m", metrics_labels=[("zone", "a")])
GENERATE = "ns.backend.generate"


class Engine(LLMEngine):
    """Records its calls; a request names what `generate` does."""

    def __init__(self, model: str, **registration: Any) -> None:
        self.calls: list[str] = []
        self.model = model
        self.registration = registration
        self.sources: list[PushSource] = []
        self.ranks: list[int] = []
        self.load: Any = None
        self.contexts: list[Context] = []
        self.released = asyncio.Event()
        self.chunks: list[Any] = []
        self.error: Exception | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        if self.error is not None:
            raise self.error
        return EngineConfig(self.model, **self.registration)

    async def register_prometheus(self, metrics: Any) -> None:
        self.calls.append("register_prometheus")
        labels = metrics.auto_labels
        metrics.register_prometheus_expfmt_callback(lambda: f'mine{{model_name="{labels["model_name"]}"}} 3\n')

    def component_metrics_dp_ranks(self) -> list[int]:
        return self.ranks

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self.calls.append("attach_snapshot_publisher")
        self.load = publisher

    async def kv_event_sources(self) -> Any:
        self.calls.append("kv_event_sources")
        return self.sources

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self.calls.append(f"on_endpoint_ready {endpoint}")

    def supported_controls(self) -> set[str]:
        return {"pause"}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        return {control: body}

    def supported_updates(self) -> set[str]:
        return {"load"}

    async def generate(self, request: Any, context: Context) -> Any:
        self.contexts.append(context)
        self.calls.append(f"generate {request['token_ids']} {dict(context.metadata)}")
        try:
            for chunk in self.chunks or [{"token_ids": [one], "index": 0} for one in request["token_ids"]]:
                if chunk == "wait":
                    await self.released.wait()
                elif isinstance(chunk, Exception):
                    raise chunk
                else:
                    yield chunk
        except GeneratorExit:
            self.calls.append("closed")
            raise

    async def abort(self, context: Context) -> None:
        self.calls.append(f"abort {context.is_killed()}")

    async def is_quiescent(self) -> bool | None:
        self.calls.append("is_quiescent")
        return self.calls.count("is_quiescent") > 2

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


class Bench:
    """A worker with an engine of the SDK, and a client of it."""

    def __init__(self, worker: EngineWorker, client: Client, cluster: MemoryCluster, clock: ManualClock) -> None:
        self.worker = worker
        self.client = client
        self.cluster = cluster
        self.clock = clock

    async def values(self, request: Any, context: Context | None = None) -> list[Any]:
        stream = await self.client.generate(request, annotated=False, context=context)
        return [value async for value in stream]

    async def card(self) -> dict[str, Any]:
        records = await self.worker.runtime.discovery.snapshot(MODEL_CARDS)
        (record,) = records.values()
        card: dict[str, Any] = json.loads(record)["card_json"]
        return card


@asynccontextmanager
async def serving(engine: Any, config: WorkerConfig) -> AsyncIterator[Bench]:
    cluster, clock = MemoryCluster(), ManualClock()
    caller = cluster.runtime()
    served = ServedEngine(engine, config, is_raw=isinstance(engine, RawEngine))
    worker = EngineWorker(worker_options(config), served, cluster.runtime(), clock=clock)
    try:
        await worker.start()
        client = await caller.endpoint(GENERATE).client()
        await client.wait_for_instances(5)
        yield Bench(worker, client, cluster, clock)
    finally:
        await worker.stop(drain_s=0.0)
        await caller.shutdown()


@pytest.fixture
def config(model_dir: str) -> WorkerConfig:
    return replace(CONFIG, model_name=model_dir, served_model_name="named")


async def test_lifecycle_calls_have_upstream_order(config: WorkerConfig) -> None:
    engine = Engine("m", llm=LlmRegistration(kv_cache_block_size=16))
    engine.ranks = [0]
    async with serving(engine, config):
        pass
    assert engine.calls == [
        "start",
        "register_prometheus",
        "kv_event_sources",
        "attach_snapshot_publisher",
        f"on_endpoint_ready {GENERATE}",
        "cleanup",
    ]


async def test_card_contains_the_registration(config: WorkerConfig) -> None:
    llm = LlmRegistration(512, 32, 100, 4, 256, 2, 6, "host", 9000, enable_eagle=True, max_gpu_lora_count=4)
    engine = Engine("m", runtime_data={"a": [1]}, llm=llm, model_aliases=["alias"])
    async with serving(engine, replace(config, route_to_encoder=True, tool_call_parser="hermes")) as bench:
        card = await bench.card()
    assert (card["display_name"], card["aliases"], card["needs"]) == ("named", ["alias"], [["encode"]])
    assert (card["context_length"], card["kv_cache_block_size"]) == (512, 32)
    assert card["runtime_config"]["runtime_data"] == {"encoder_result_handoff": True, "a": [1]}
    expected = {
        "total_kv_blocks": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "data_parallel_size": 2,
        "data_parallel_start_rank": 6,
        "disaggregated_endpoint": {"bootstrap_host": "host", "bootstrap_port": 9000},
        "enable_eagle": True,
        "max_gpu_lora_count": 4,
        "tool_call_parser": "hermes",
    }
    assert {name: card["runtime_config"][name] for name in expected} == expected


async def test_unreported_values_are_those_of_the_model_or_the_upstream_default(config: WorkerConfig) -> None:
    async with serving(Engine("m"), config) as bench:
        card = await bench.card()
    assert (card["context_length"], card["kv_cache_block_size"]) == (512, 16)


async def test_chunks_arrive_in_order_and_metadata_reaches_the_engine(config: WorkerConfig) -> None:
    engine = Engine("m")
    engine.chunks = [
        {"token_ids": [5], "index": 0},
        {"token_ids": (6, 7), "log_probs": [-1, -0.5]},
        {"token_ids": [], "index": 0, "finish_reason": "abort", "encoder_result": {"a": 1}},
    ]
    async with serving(engine, config) as bench:
        found = await bench.values({"token_ids": [1, 2]}, Context(metadata={"tenant": "t"}))
    assert engine.calls[-2:] == ["generate [1, 2] {'tenant': 't'}", "cleanup"]
    assert found == [
        {"token_ids": [5], "index": 0},
        {"token_ids": [6, 7], "index": 0, "log_probs": [-1.0, -0.5]},
        {"token_ids": [], "index": 0, "finish_reason": "cancelled", "encoder_result": {"a": 1}},
    ]


async def test_packed_token_ids_reach_the_engine_as_a_list(config: WorkerConfig) -> None:
    engine = Engine("m")
    async with serving(engine, config) as bench:
        await bench.values({"token_ids": b"\1\0\0\0\2\1\0\0"})
    assert "generate [1, 258] {}" in engine.calls


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ValueError("wrong"), InvalidArgument, "wrong"),
        (InvalidArgument("too long"), InvalidArgument, "too long"),
        (RuntimeError("broken"), Unknown, "broken"),
        (HttpError(415, "no media"), HttpError, "no media"),
        ("text", InvalidArgument, "must be a mapping, not str"),
        ({"index": 0}, InvalidArgument, "token_ids is missing"),
        ({"token_ids": "x", "index": 0}, InvalidArgument, "cannot be interpreted as an integer"),
        ({"token_ids": [1], "finish_reason": "odd"}, InvalidArgument, "finish_reason 'odd': must be one of"),
        ({"token_ids": [1], "completion_usage": 3}, InvalidArgument, "got `int` - at `\\$.completion_usage`"),
    ],
)
async def test_errors_of_the_engine_reach_the_caller(
    config: WorkerConfig, failure: Any, kind: type[Exception], message: str
) -> None:
    engine = Engine("m")
    engine.chunks = [failure]
    async with serving(engine, config) as bench:
        with pytest.raises(kind, match=message):
            await bench.values({"token_ids": [1]})


async def test_request_that_is_not_an_object_is_refused(config: WorkerConfig) -> None:
    async with serving(Engine("m"), config) as bench:
        with pytest.raises(InvalidArgument, match="must be a JSON object, not list"):
            await bench.values([1, 2])


async def test_cancelled_request_is_aborted_once_and_its_generator_closed(config: WorkerConfig) -> None:
    engine = Engine("m")
    engine.chunks = [
        {"token_ids": [5], "index": 0},
        "wait",
        {"token_ids": [6], "index": 0},
        {"token_ids": [7], "index": 0},
    ]
    async with serving(engine, config) as bench:
        stream = await bench.client.generate({"token_ids": [1]}, annotated=False)
        await anext(stream)
        await stream.aclose()
        await until(lambda: "abort True" in engine.calls)
        engine.released.set()
        await until(lambda: "closed" in engine.calls)
        await until(lambda: bench.worker.service.status().inflight_requests == 0)
    assert [call for call in engine.calls if call.startswith("abort")] == ["abort True"]


async def test_stopped_worker_aborts_requests_before_cleanup(config: WorkerConfig) -> None:
    engine = Engine("m")
    engine.chunks = ["wait"]
    async with serving(engine, config) as bench:
        stream = await bench.client.generate({"token_ids": [1]}, annotated=False)
        await until(lambda: engine.contexts)
        stopping = asyncio.ensure_future(bench.worker.stop(drain_s=0.0))
        with pytest.raises(EngineShutdown):
            await anext(stream)
        await until(lambda: "abort True" in engine.calls)
        assert "cleanup" not in engine.calls
        engine.released.set()
        await stopping
    assert engine.calls.count("cleanup") == 1


async def test_failed_start_calls_cleanup_and_an_unstarted_engine_is_not_cleaned_up(config: WorkerConfig) -> None:
    engine = Engine("m")
    engine.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        async with serving(engine, config):
            pass
    assert engine.calls == ["start", "cleanup"]
    unstarted = Engine("m")
    await ServedEngine(unstarted, config, is_raw=False).stop()
    assert unstarted.calls == []


async def test_engine_kv_events_are_published_by_the_worker(config: WorkerConfig) -> None:
    found: list[Any] = []
    engine = Engine("m", llm=LlmRegistration(kv_cache_block_size=2, total_kv_blocks=9, data_parallel_start_rank=3))
    engine.sources = [PushSource(found.append, dp_rank=3)]
    async with serving(engine, config) as bench:
        before = len(await bench.worker.runtime.discovery.snapshot(EVENT_SOURCES))
        found[0].publish_stored([1, 2, 3, 4], [2, 2], [10, 11])
        bench.worker.kv_sources[3].flush()
        assert len(bench.worker.kv_sources[3].holdings.held()) == 2
        assert (await bench.card())["runtime_config"]["enable_local_indexer"]
        assert len(await bench.worker.runtime.discovery.snapshot(EVENT_SOURCES)) == before == 1


async def test_kv_events_of_another_rank_are_refused(config: WorkerConfig) -> None:
    engine = Engine("m", llm=LlmRegistration(kv_cache_block_size=2))
    engine.sources = [PushSource(lambda _: None, dp_rank=1)]
    with pytest.raises(InvalidArgument, match="dp_rank 1: this worker has 0 to 0"):
        async with serving(engine, config):
            pass


async def test_without_kv_routing_neither_events_nor_load_are_published(config: WorkerConfig) -> None:
    engine = Engine("m", llm=LlmRegistration(kv_cache_block_size=2))
    engine.ranks = [0]
    async with serving(engine, replace(config, enable_kv_routing=False)):
        pass
    assert not {"kv_event_sources", "attach_snapshot_publisher"} & {*engine.calls}


async def test_load_and_engine_metrics_are_part_of_the_worker_metrics(config: WorkerConfig) -> None:
    engine = Engine("m", llm=LlmRegistration(total_kv_blocks=100))
    engine.ranks = [0]
    async with serving(engine, config) as bench:
        engine.load.publish(0, ComponentSnapshot(25, 100, 0.25, 0, 0.5))
        text = bench.worker.runtime.metrics.render()
    assert 'mine{model_name="named"} 3' in text
    for name, value in (("gpu_cache_usage_percent", "0.25"), ("kv_cache_hit_rate", "0.5"), ("total_blocks", "100")):
        (line,) = [line for line in text.splitlines() if line.startswith(f"dynamo_component_{name}{{")]
        assert line.endswith(value)
        assert 'model="named"' in line
    assert 'zone="a"' in text


async def test_load_published_while_the_engine_starts_is_kept(config: WorkerConfig) -> None:
    engine = Engine("m", llm=LlmRegistration(total_kv_blocks=10))
    engine.ranks = [0]
    engine.attach_snapshot_publisher = lambda load: load.publish(0, ComponentSnapshot(5, 10, 0.5, 0))  # type: ignore[method-assign]
    async with serving(engine, config) as bench:
        text = bench.worker.runtime.metrics.render()
    (line,) = [line for line in text.splitlines() if line.startswith("dynamo_component_gpu_cache_usage_percent{")]
    assert line.endswith("0.5")


@pytest.mark.parametrize(
    ("rank", "snapshot", "error"),
    [
        ("x", ComponentSnapshot(1, 2, 0.5, 0), TypeError),
        (0, ComponentSnapshot(-1, 2, 0.5, 0), OverflowError),
        (0, object(), AttributeError),
    ],
)
async def test_invalid_load_is_refused(config: WorkerConfig, rank: Any, snapshot: Any, error: type[Exception]) -> None:
    engine = Engine("m")
    engine.ranks = [0]
    async with serving(engine, config):
        with pytest.raises(error):
            engine.load.publish(rank, snapshot)


async def test_controls_and_updates_are_engine_routes(config: WorkerConfig) -> None:
    engine = Engine("m")
    async with serving(engine, config) as bench:
        routes = bench.worker.runtime.engine_routes
        assert {*routes} >= {"control/pause", "update/load"}
        assert await routes["control/pause"]({"x": 1}) == {"pause": {"x": 1}}
        assert (await routes["update/load"]({}))["message"] == "unsupported engine update: load"
        refused: Any = await routes["update/load"]([1])  # type: ignore[arg-type]
        assert refused["message"] == "engine update request body must be a JSON object"


async def test_stopping_prefill_worker_waits_until_the_engine_is_quiescent(config: WorkerConfig) -> None:
    engine = Engine("m")
    async with serving(engine, replace(config, disaggregation_mode=DisaggregationMode.Prefill)) as bench:
        card = await bench.card()
        assert (card["worker_type"], card["needs"], card["model_type"]) == ("prefill", [["decode"]], "")
        stopping = asyncio.ensure_future(bench.worker.stop())
        while not stopping.done():
            bench.clock.advance(0.05)
            await turns()
        await stopping
    assert engine.calls[-4:] == ["is_quiescent", "is_quiescent", "is_quiescent", "cleanup"]


class MediaEngine(RawEngine):
    """Repeats the prompt of a request for media."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig("painter")

    async def generate(self, request: Any, context: Context) -> Any:
        yield {"data": [request["prompt"]]}

    async def cleanup(self) -> None: ...


async def test_raw_engine_receives_the_request_unchanged_and_its_card_has_no_files(config: WorkerConfig) -> None:
    raw = WorkerConfig("ns", model_input=ModelInput.Text, endpoint_types="images,Video")
    async with serving(MediaEngine(), raw) as bench:
        assert await bench.values({"prompt": "p", "token_ids": b"1"}) == [{"data": ["p"]}]
        card = await bench.card()
    assert (card["display_name"], card["model_type"], card["model_input"]) == ("painter", "Images | Videos", "Text")
    assert card["tokenizer"] is None


@pytest.mark.parametrize(
    ("changes", "is_raw", "message"),
    [
        ({"model_input": ModelInput.Text}, False, "model_input Text: must be Tokens for an LLMEngine"),
        ({}, True, "model_input Tokens: must be Text or Tensor for a RawEngine"),
        ({"route_to_encoder": True, "disaggregation_mode": DisaggregationMode.Decode}, False, "Decode: must be"),
        ({"endpoint_types": "chat,foo"}, False, "endpoint_types 'chat,foo': must be one or more of chat"),
        ({"endpoint_types": " "}, False, "endpoint_types ' ': must be"),
        ({"kv_state_endpoint": "a.b.c"}, False, "kv_state_endpoint is not supported"),
    ],
)
def test_unsuitable_configuration_is_refused(changes: dict[str, Any], is_raw: bool, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_kind(replace(CONFIG, **changes), is_raw=is_raw)


def test_required_roles_equal_those_of_upstream() -> None:
    encode = replace(CONFIG, disaggregation_mode=DisaggregationMode.Encode)
    prefill = replace(CONFIG, disaggregation_mode=DisaggregationMode.Prefill, route_to_encoder=True)
    assert needs_of(CONFIG) is None
    assert needs_of(encode) == [["prefill", "decode"], ["aggregated"]]
    assert needs_of(prefill) == [["decode", "encode"]]
    assert model_type_of("CHAT, tensor") == "Chat | TensorBased"


def test_whole_output_is_converted() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    top = [[{"rank": 1, "token_id": 5, "token": None, "logprob": -0.1}]]
    output = output_of(
        {"token_ids": [5], "index": 1, "finish_reason": "error: x", "completion_usage": usage, "top_logprobs": top}
    )
    found = msgspec.to_builtins(output)
    assert (found["index"], found["finish_reason"]) == (1, "error: x")
    assert found["completion_usage"]["total_tokens"] == 2
    assert found["top_logprobs"][0][0]["token_id"] == 5
