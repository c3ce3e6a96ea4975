"""VllmEngine over a scripted vLLM: requests, tokens and failures."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.settle import turns, until
from tests.unit.backend.recorded_reply import RecordedReply
from tests.unit.vllm import scripted
from tests.unit.vllm.conftest import Host, Start, request
from tests.unit.vllm.scripted import make_output

from dynamo.backend.adapters import LoadedAdapters
from dynamo.backend.disagg import prefill_request
from dynamo.backend.health import watch
from dynamo.backend.listeners import PassListener, reachable
from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.model_card.card import lora_name_to_id
from dynamo.protocols.engine import (
    EngineOutput,
    GuidedDecoding,
    PrefillResult,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.protocols.load import ForwardPass, ScheduledRequests
from dynamo.vllm.engine import adapters_of, kv_listeners, publishes
from dynamo.vllm.steps import queued_requests, scheduled_requests

NIXL = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={}, engine_id="e")


async def test_engine_config_describes_model_and_cache(start: Start) -> None:
    running = await start()
    config = running.config
    assert (config.served_model_name, list(config.model_aliases)) == ("m", ["other"])
    assert (config.context_length, config.kv_cache_block_size, config.total_kv_blocks) == (128, 16, 64)
    assert not config.publishes_kv_events
    assert "vllm:x 1" in running.host.metrics.render()


async def test_tokens_are_sent_as_generated_and_the_last_output_has_the_usage(start: Start) -> None:
    running = await start()
    reply, error = await running.send_request(
        request(), make_output(4), make_output(5, 6), make_output(7, finish="length", num_cached_tokens=2)
    )
    assert error is None
    assert reply.tokens == [4, 5, 6, 7]
    (last,) = reply.items
    assert (last.finish_reason, last.completion_usage.completion_tokens) == ("length", 4)
    assert last.completion_usage.prompt_tokens_details.cached_tokens == 2
    step_state = running.llm.received_requests[0]
    assert step_state.prompt == {"type": "token", "prompt_token_ids": [1, 2, 3]}
    assert step_state.params.output_kind == scripted.RequestOutputKind.DELTA
    assert not step_state.params.detokenize


async def test_caller_disconnect_aborts_the_request(start: Start) -> None:
    running = await start()
    running.llm.script = [make_output(4), asyncio.Event()]
    reply = RecordedReply("gone")
    running.engine.submit(request(), reply)
    await until(lambda: reply.tokens)
    running.engine.cancel(reply)
    await running.engine.drain()
    assert running.llm.aborted == ["gone"]


async def test_engine_aborts_a_running_prefill_when_its_caller_disconnects(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="prefill")
    running.llm.script = [
        asyncio.Event(),
        make_output(4, finish="length", kv_transfer_params={"remote_engine_id": "e"}),
    ]
    reply = RecordedReply("gone")
    running.engine.submit(request(), reply)
    await until(lambda: running.llm.received_requests)
    await turns()
    running.engine.cancel(reply)
    await running.engine.drain()
    assert running.llm.aborted == ["gone"]
    assert reply.items == []


async def test_prefill_returns_kv_transfer_params(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="prefill")
    reply, error = await running.send_request(
        request(sampling_options=SamplingOptions(n=3)),
        make_output(4, finish="length", kv_transfer_params={"remote_port": 1}),
    )
    assert error is None
    (only,) = reply.items
    assert only.disaggregated_params == {"kv_transfer_params": {"remote_port": 1}}
    params = running.llm.received_requests[0].params
    assert (params.max_tokens, params.min_tokens, params.n) == (
        1,
        1,
        prefill_request(request()).sampling_options.n or 1,
    )
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"] is True


async def test_decode_continues_from_kv_transfer_params(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="decode")
    result = PrefillResult({"kv_transfer_params": {"remote_port": 1}})
    await running.send_request(request(prefill_result=result), make_output(4, finish="length"))
    assert running.llm.received_requests[0].params.extra_args == {"kv_transfer_params": {"remote_port": 1}}


async def test_decode_without_a_prefill_result_is_refused_unless_bypassed(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        running.engine.submit(request(), RecordedReply())
    await running.send_request(request(annotations=["x-bypass-remote-prefill"]), make_output(4, finish="length"))
    assert running.llm.received_requests[0].params.extra_args is None


async def test_failed_block_transfer_is_a_retryable_error(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="decode")
    result = PrefillResult({"kv_transfer_params": {"remote_port": 1}})
    _, error = await running.send_request(request(prefill_result=result), make_output(finish="error"))
    assert isinstance(error, WorkerUnavailable)
    assert error.retry_elsewhere


async def test_request_refused_by_vllm_is_an_invalid_argument(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), scripted.ClientError("too much"))
    assert isinstance(error, InvalidArgument)
    assert str(error) == "too much"


async def test_vllm_value_error_is_an_invalid_argument_only_if_it_names_a_parameter(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), ValueError("top_p must be in (0, 1], got 2"))
    assert isinstance(error, InvalidArgument)
    assert error.param == "top_p"
    for fault in (
        ValueError("shape '[1, 2]' is invalid for input of size 3"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "stop"),
    ):
        _, error = await running.send_request(request(), fault)
        assert isinstance(error, Unknown)


async def test_other_engine_error_ends_only_its_request(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), RuntimeError("boom"))
    assert isinstance(error, Unknown)
    _, error = await running.send_request(request(), make_output(4, finish="stop"))
    assert error is None
    assert running.host.failed == []


async def test_dead_engine_fails_the_worker_once_and_its_requests_as_retryable(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), scripted.EngineDeadError("dead"))
    assert isinstance(error, EngineShutdown)
    assert len(running.host.failed) == 1
    with pytest.raises(EngineShutdown):
        running.engine.submit(request(), RecordedReply())


async def test_aborted_output_is_a_retryable_error(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), make_output(4), make_output(finish="abort"))
    assert isinstance(error, EngineShutdown)


async def test_guided_text_and_adapters_reach_vllm(start: Start) -> None:
    running = await start()
    adapters = running.config.adapters
    await adapters.load("tuned", "/somewhere")
    step_state = request(
        sampling_options=SamplingOptions(guided_decoding=GuidedDecoding(regex="a+")), routing=Routing(lora_name="tuned")
    )
    await running.send_request(step_state, make_output(4, finish="stop"))
    reported = running.llm.received_requests[0]
    assert reported.params.structured_outputs.regex == "a+"
    assert reported.lora.lora_name == "tuned"
    with pytest.raises(WorkerUnavailable):
        running.engine.submit(request(routing=Routing(lora_name="none")), RecordedReply())


async def test_images_require_enable_multimodal(start: Start) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    step_state = request(multi_modal_data={"image_url": [{"Url": pixel}]})
    running = await start()
    with pytest.raises(InvalidArgument, match="enable-multimodal"):
        running.engine.submit(step_state, RecordedReply())
    looking = await start(enable_multimodal=True)
    _, error = await looking.send_request(step_state, make_output(4, finish="stop"))
    assert error is None
    prompt = looking.llm.received_requests[0].prompt
    assert [kind for kind, _ in prompt["multi_modal_data"]["image"]] == ["image"]
    assert "type" not in prompt


PIXEL = {"image_url": [{"Url": "data:image/png;base64,iVBORw0KGgo="}]}


async def test_media_io_options_of_worker_and_request_are_merged(start: Start) -> None:
    settings = scripted.settings()
    settings.model_config.multimodal_config = SimpleNamespace(media_io_kwargs={"image": {"a": 1, "b": 1}})
    running = await start(settings=settings, enable_multimodal=True)
    step_state = request(multi_modal_data=PIXEL, media_io_kwargs={"image": {"b": 2}})
    _, error = await running.send_request(step_state, make_output(4, finish="stop"))
    assert error is None
    ((_, _, io),) = running.llm.received_requests[0].prompt["multi_modal_data"]["image"]
    assert io == {"a": 1, "b": 2}


@pytest.mark.parametrize("kwargs", [{"image": {"wrong": 1}}, {"image": 3}, [1]])
async def test_vllm_engine_names_media_options_that_cannot_be_used(start: Start, kwargs: object) -> None:
    running = await start(enable_multimodal=True)
    step_state = request(multi_modal_data=PIXEL, media_io_kwargs=kwargs)
    try:
        _, error = await running.send_request(step_state, make_output(4, finish="stop"))
    except InvalidArgument as refused:  # Before vLLM gets the request.
        error = refused
    assert isinstance(error, InvalidArgument)
    assert error.param == "media_io_kwargs"


async def test_several_choices_end_with_the_last(start: Start) -> None:
    running = await start()
    reply, _ = await running.send_request(
        request(sampling_options=SamplingOptions(n=2)),
        make_output(4, finish="stop", index=1), make_output(5, finish="stop", index=0),
    )  # fmt: skip
    outputs = [one for one in reply.items if isinstance(one, EngineOutput)]
    assert [one.index for one in outputs] == [1, 0]
    assert [one.completion_usage is not None for one in outputs] == [False, True]


async def test_load_is_published_less_often_than_every_step(start: Start) -> None:
    running = await start()
    (logger,) = running.llm.loggers
    stats = SimpleNamespace(kv_cache_usage=0.5, num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=1)
    for _ in range(5):
        logger.record(stats, None)
    logger.record(None, None)
    await until(lambda: running.host.loads)
    (load,) = running.host.loads
    assert (load.kv_used_blocks, load.kv_total_blocks, load.running_requests, load.waiting_requests) == (32, 64, 3, 2)


async def test_engine_stop_shuts_vllm_down_once(start: Start) -> None:
    running = await start()
    await running.engine.stop()
    await running.engine.stop()
    assert running.llm.is_shut


# ---- prompts as embeddings ------------------------------------------------------------------------------------------


async def test_vllm_engine_passes_prompt_embeds_and_counts_them(start: Start) -> None:
    running = await start()
    embeds = request(prompt_embeds="100", stop=StopConditions(max_tokens=60))
    reply, error = await running.send_request(embeds, make_output(4, finish="length"))
    assert error is None
    assert running.llm.received_requests[0].prompt["prompt_embeds"].shape == (100, 8)
    assert "prompt_token_ids" not in running.llm.received_requests[0].prompt
    assert running.llm.received_requests[0].params.max_tokens == 28
    assert reply.items[-1].completion_usage.prompt_tokens == 100


@pytest.mark.parametrize(
    ("text", "message"), [("128", "128 positions"), ("0", "0 positions"), ("bad", "not a valid tensor")]
)
async def test_vllm_engine_refuses_invalid_prompt_embeds(start: Start, text: str, message: str) -> None:
    running = await start()
    _, error = await running.send_request(request(prompt_embeds=text), make_output(4, finish="length"))
    assert isinstance(error, InvalidArgument)
    assert message in str(error)


async def test_vllm_prefill_and_decode_workers_refuse_prompt_embeds(start: Start) -> None:
    running = await start(settings=scripted.settings(kv_transfer_config=NIXL), disaggregation_mode="prefill")
    with pytest.raises(InvalidArgument, match="prompt_embeds is not supported by prefill workers"):
        running.engine.submit(request(prompt_embeds="3"), RecordedReply())


def adapters_of_engine(
    settings: object = SimpleNamespace(max_loras=2),
) -> tuple[LoadedAdapters[Any], scripted.AsyncLLM]:
    llm = scripted.AsyncLLM(None)
    return adapters_of(llm, scripted.LoRARequest, settings), llm


async def test_adapter_is_loaded_once_and_unloaded() -> None:
    adapters, llm = adapters_of_engine()
    number = await adapters.load("a", "/a")
    assert number == await adapters.load("a", "/a") == lora_name_to_id("a")
    assert adapters.of("a").lora_path == "/a"
    assert await adapters.unload("a") == number
    assert llm.calls == [("add_lora", "a"), ("remove_lora", number)]
    with pytest.raises(WorkerUnavailable):
        adapters.of("a")
    assert adapters.of(None) is None


async def test_adapter_refused_by_vllm_is_not_loaded() -> None:
    adapters, llm = adapters_of_engine()
    llm.refuses = ValueError("rank 64 is above 16")
    with pytest.raises(InvalidArgument, match="rank 64"):
        await adapters.load("a", "/a")
    assert adapters.ids == {}


async def test_engine_without_lora_refuses_adapters() -> None:
    adapters, _ = adapters_of_engine(None)
    with pytest.raises(InvalidArgument, match="--enable-lora"):
        await adapters.load("a", "/a")


def source(**changes: Any) -> Any:
    given = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    return SimpleNamespace(**given | changes)


def frames(number: int, *events: dict[str, Any]) -> list[bytes]:
    return [b"", struct.pack(">q", number), msgspec.msgpack.encode([0.0, list(events), 0])]


STORED = {
    "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4,
    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 0,
}  # fmt: skip


def test_kv_events_are_published_with_rank_and_tier() -> None:
    host = Host()
    (listener,) = kv_listeners({1: source()}, 4, 2, host)
    assert (listener.endpoint, listener.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 0}
    listener.events.process(frames(0, STORED))
    listener.events.process(frames(1, removed, {"type": "AllBlocksCleared"}))
    kinds = [(type(event), rank, tier) for event, rank, tier in host.events]
    assert kinds == [(Stored, 3, "device"), (Removed, 3, "host_pinned"), (Cleared, 3, "device")]


def test_event_publishers_other_than_zmq_are_refused() -> None:
    with pytest.raises(ConfigError, match="publisher"):
        kv_listeners({0: source(publisher="null")}, 4, 0, Host())


@pytest.mark.parametrize(
    ("step_state", "caching", "found"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_kv_events_are_published_with_event_config_and_prefix_caching(
    step_state: bool, caching: bool, found: bool
) -> None:
    settings = scripted.settings(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=step_state),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    assert publishes(settings) is found


def test_bind_address_is_converted_to_a_connect_address() -> None:
    assert reachable("tcp://0.0.0.0:1") == reachable("tcp://*:1") == "tcp://127.0.0.1:1"
    assert reachable("tcp://10.0.0.3:1") == "tcp://10.0.0.3:1"


def test_forward_pass_messages_are_forwarded_and_malformed_ones_skipped() -> None:
    host = Host()
    listener = PassListener("tcp://127.0.0.1:1", 1, host)
    step = ForwardPass(0.5, ScheduledRequests(num_decode_requests=2))
    listener.on_message([b"", struct.pack(">Q", 1), msgspec.msgpack.encode(step)])
    listener.on_message([b"", struct.pack(">Q", 3), b"\xc1"])
    listener.on_message([b"x"])
    assert host.passes == [(step, 1)]


def step_state(prompt: int, computed: int, **more: Any) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed, **more)


def test_scheduled_requests_are_counted_from_the_scheduler_output() -> None:
    requests = {"a": step_state(100, 64), "b": step_state(10, 21), "c": step_state(50, 50)}
    found = scheduled_requests({"a": 32, "b": 1, "c": 50, "gone": 3}, requests)
    assert (found.num_prefill_requests, found.sum_prefill_tokens, found.sum_prefill_kv_tokens) == (2, 82, 32)
    assert (found.num_decode_requests, found.sum_decode_kv_tokens) == (1, 21)
    assert found.var_prefill_length == 625.0
    waiting = [step_state(10, 0, num_preemptions=0, num_tokens=10), step_state(10, 0, num_preemptions=1, num_tokens=30)]
    queued = queued_requests(waiting)
    assert (queued.num_prefill_requests, queued.sum_prefill_tokens, queued.sum_decode_kv_tokens) == (1, 10, 30)


async def test_dead_engine_is_reported_by_the_next_health_check() -> None:
    llm, clock, reported = scripted.AsyncLLM(None), ManualClock(), []
    watching = asyncio.ensure_future(watch(llm.check_health, reported.append, clock))
    for _ in range(3):
        await turns()
        clock.advance(2.0)
    await turns()
    assert reported == []
    llm.is_dead = True
    while not watching.done():
        clock.advance(2.0)
        await turns()
    assert [type(one) for one in reported] == [scripted.EngineDeadError]
