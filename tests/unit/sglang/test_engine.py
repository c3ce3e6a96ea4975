"""SglangEngine over a scripted SGLang: requests, tokens and failures."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import UNSET
from tests.settle import turns, until
from tests.unit.backend.recorded_reply import RecordedReply
from tests.unit.sglang.conftest import Start, request
from tests.unit.sglang.scripted import FAKE_BOOTSTRAP_HOST, LENGTH, chunk

from dynamo.backend.disagg import prefill_request
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.protocols.engine import (
    BootstrapInfo,
    EngineOutput,
    OutputOptions,
    PrefillResult,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.sglang.engine import check_alive, sigquit_handler, state_of

STORE = {"extra_backend_tag": "tag", "tp_lcm_size": 4}
ROOM = BootstrapInfo("10.0.0.1", 8998, 77)


async def test_engine_config_describes_model_and_cache(start: Start) -> None:
    running = await start({"enable_metrics": True})
    config = running.config
    assert config.served_model_name == "m"
    assert (config.context_length, config.kv_cache_block_size, config.total_kv_blocks) == (128, 16, 64)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 256)
    assert not config.publishes_kv_events
    assert (config.bootstrap_host, config.bootstrap_port) == (None, None)
    assert running.sglang.server_args.incremental_streaming_output
    assert "sglang:x 1" in running.host.metrics.render()


async def test_only_a_prefill_worker_has_a_bootstrap_address(start: Start) -> None:
    prefill = await start({"disaggregation_bootstrap_port": 9001}, disaggregation_mode="prefill")
    decode = await start(disaggregation_mode="decode")
    assert prefill.config.bootstrap_port == 9001
    assert prefill.config.bootstrap_host
    assert decode.config.bootstrap_port is None


async def test_disaggregated_workers_warm_up_with_the_fake_bootstrap_host(start: Start) -> None:
    for mode in ("prefill", "decode"):
        running = await start(disaggregation_mode=mode)
        (requested,) = running.sglang.received_requests
        assert requested["bootstrap_host"] == FAKE_BOOTSTRAP_HOST
        assert running.config.health_check_payload["bootstrap_info"]["bootstrap_host"] == FAKE_BOOTSTRAP_HOST
    assert (await start()).sglang.received_requests == []


async def test_engine_config_describes_the_shared_store_layout(start: Start) -> None:
    running = await start(
        {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": json.dumps(STORE),
            "hicache_mem_layout": "page_head",
            "served_model_name": "org/m",
            "tp_size": 2,
        }
    )
    layout = running.config.runtime_data["sglang_hicache_mooncake"]
    assert (layout["page_size"], layout["tp_size"], layout["should_split_heads"]) == (16, 2, True)
    assert layout["key_prefix"] == "tag_org-m"


async def test_tokens_are_sent_as_generated_and_the_last_output_has_the_usage(start: Start) -> None:
    running = await start()
    reply, error = await running.send_request(
        request(), chunk(4), chunk(5, 6), chunk(7, finish=LENGTH, cached_tokens=2)
    )
    assert error is None
    assert reply.tokens == [4, 5, 6, 7]
    (last,) = reply.items
    assert (last.finish_reason, last.completion_usage.completion_tokens) == ("length", 4)
    assert last.completion_usage.prompt_tokens_details.cached_tokens == 2
    (requested,) = running.sglang.received_requests
    assert (requested["input_ids"], requested["stream"], requested["rid"]) == ([1, 2, 3], True, "r")


async def test_several_choices_keep_their_indexes(start: Start) -> None:
    running = await start()
    requested = request(sampling_options=SamplingOptions(n=2))
    reply, error = await running.send_request(
        requested,
        chunk(4, rid="a", index=0),
        chunk(5, rid="b", index=1),
        chunk(6, rid="b", index=1, finish=LENGTH),
        chunk(7, rid="a", index=0, finish=LENGTH),
    )
    assert error is None
    assert [(item.index, item.token_ids) for item in reply.items] == [(1, [5]), (1, [6]), (0, [7])]
    assert reply.items[1].completion_usage is None
    assert reply.items[2].completion_usage.completion_tokens == 4


async def test_logprobs_are_sent_with_their_tokens(start: Start) -> None:
    running = await start()
    requested = request(output_options=OutputOptions(logprobs=2, prompt_logprobs=0))
    reported = chunk(
        4,
        finish=LENGTH,
        output_token_logprobs=[(-0.5, 4, None)],
        output_top_logprobs=[[(-0.5, 4, None), (-1.5, 8, None), (-2.5, 9, None)]],
        input_token_logprobs=[(None, 1, None), (-0.25, 2, None)],
    )
    reply, _ = await running.send_request(requested, reported)
    (item,) = reply.items
    assert item.log_probs == [-0.5]
    assert [(top.rank, top.token_id) for top in item.top_logprobs[0]] == [(1, 4), (2, 8)]
    assert item.engine_data == {"prompt_logprobs": [None, {"2": {"logprob": -0.25, "rank": None}}]}
    assert (
        running.sglang.received_requests[0]["top_logprobs_num"],
        running.sglang.received_requests[0]["return_logprob"],
    ) == (2, True)


async def test_caller_disconnect_aborts_the_request_and_suppresses_output(start: Start) -> None:
    running = await start()
    gate = asyncio.Event()
    running.sglang.tokenizer_manager.on_abort = lambda rid: gate.set()
    running.sglang.script = [chunk(4), gate, chunk(5, finish={"type": "abort", "message": "Aborted"})]
    reply = RecordedReply()
    running.engine.submit(request(), reply)
    await until(lambda: reply.tokens)
    running.engine.cancel(reply)
    async with asyncio.timeout(30):
        await running.engine.drain()
    assert running.sglang.tokenizer_manager.aborted == ["r"]
    assert reply.tokens == [4]
    assert not reply.ended.done()


async def test_choices_with_late_request_ids_are_aborted(start: Start) -> None:
    running = await start()
    gate = asyncio.Event()
    running.sglang.script = [gate, chunk(4, rid="a", index=0), chunk(5, rid="b", index=1)]
    reply = RecordedReply()
    running.engine.submit(request(sampling_options=SamplingOptions(n=2)), reply)
    await until(lambda: running.sglang.received_requests)
    await turns()
    running.engine.cancel(reply)
    gate.set()
    async with asyncio.timeout(30):
        await running.engine.drain()
    assert running.sglang.tokenizer_manager.aborted == ["r", "a", "b"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "abort", "message": "too long", "status_code": 400}, InvalidArgument),
        ({"type": "abort", "message": "broken", "status_code": 500}, Unknown),
        ({"type": "abort", "message": "full", "status_code": 503}, EngineShutdown),
        ({"type": "abort", "message": "Aborted"}, EngineShutdown),
    ],
)
async def test_abort_reason_determines_the_error_class(
    start: Start, reason: dict[str, object], expected: type[Exception]
) -> None:
    running = await start()
    _, error = await running.send_request(request(), chunk(4), chunk(finish=reason))
    assert type(error) is expected
    assert str(reason["message"]) in str(error)


async def test_sglang_validation_error_that_names_a_parameter_is_an_invalid_argument(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), ValueError("temperature must be non-negative"))
    assert isinstance(error, InvalidArgument)
    assert error.param == "temperature"


async def test_other_sglang_value_errors_are_unknown_errors(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), ValueError("too many values to unpack (expected 2)"))
    assert isinstance(error, Unknown)


async def test_truncated_response_is_a_retryable_error(start: Start) -> None:
    running = await start()
    _, error = await running.send_request(request(), chunk(4))
    assert isinstance(error, EngineShutdown)


async def test_prefill_with_bootstrap_info_of_the_router_repeats_it_in_advance_and_ends_with_its_token(
    start: Start,
) -> None:
    running = await start(disaggregation_mode="prefill")
    reply, error = await running.send_request(request(bootstrap_info=ROOM), chunk(4, finish=LENGTH))
    assert error is None
    (advance, item) = reply.items
    room = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}
    for one in (advance, item):
        assert isinstance(one, EngineOutput)
        assert one.disaggregated_params == room
    assert (advance.token_ids, advance.finish_reason) == ([], None), (
        "a router that waits for it sends the decode phase then"
    )
    assert item.finish_reason == "length"
    requested = running.sglang.received_requests[-1]
    assert (requested["bootstrap_room"], requested["sampling_params"]["max_new_tokens"]) == (77, 1)


async def test_prefill_without_bootstrap_info_returns_its_own_at_once(start: Start) -> None:
    running = await start({"disaggregation_bootstrap_port": 9001}, disaggregation_mode="prefill")
    gate = asyncio.Event()
    reply, error = await running.send_request(prefill_request(request()), gate, chunk(4, finish=LENGTH))
    assert error is None
    (item,) = reply.items
    assert item.disaggregated_params["bootstrap_port"] == 9001
    assert 0 <= item.disaggregated_params["bootstrap_room"] < 1 << 63
    assert not running.engine.is_quiescent()
    gate.set()
    async with asyncio.timeout(30):
        await running.engine.drain()
    assert running.engine.is_quiescent()


async def test_decode_uses_the_bootstrap_info_and_generates_one_choice(start: Start) -> None:
    running = await start(disaggregation_mode="decode")
    words = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 5}
    requested = request(
        sampling_options=SamplingOptions(n=3),
        prefill_result=PrefillResult(words),
        routing=Routing(prefill_dp_rank=2),
    )
    reply, error = await running.send_request(requested, chunk(4, finish=LENGTH))
    assert error is None
    given = running.sglang.received_requests[-1]
    assert {name: given[name] for name in words} == words
    assert given["disagg_prefill_dp_rank"] == 2
    assert given["sampling_params"]["n"] == 1
    assert reply.items[0].completion_usage is not None


@pytest.mark.parametrize("result", [UNSET, PrefillResult({"kv_transfer_params": {}})])
async def test_decode_without_bootstrap_info_is_refused(start: Start, result: object) -> None:
    running = await start(disaggregation_mode="decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        running.engine.submit(request(prefill_result=result), RecordedReply())


async def test_images_are_refused_without_enable_multimodal(start: Start) -> None:
    running = await start()
    with pytest.raises(InvalidArgument, match="--enable-multimodal"):
        running.engine.submit(request(multi_modal_data={"image_url": [{"Url": "https://x"}]}), RecordedReply())


async def test_images_are_passed_as_data_urls(start: Start) -> None:
    running = await start(enable_multimodal=True)
    requested = request(multi_modal_data={"image_url": [{"Url": "data:image/png;base64,iVBORw0KGgo="}]})
    _, error = await running.send_request(requested, chunk(4, finish=LENGTH))
    assert error is None
    assert running.sglang.received_requests[-1]["image_data"] == ["data:image/png;base64,iVBORw0KGgo="]


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_sglang_engine_refuses_media_options_of_a_request_by_name(start: Start, name: str) -> None:
    running = await start(enable_multimodal=True)
    requested = request(
        multi_modal_data={"image_url": [{"Url": "data:image/png;base64,iVBORw0KGgo="}]}, **{name: {"a": 1}}
    )
    with pytest.raises(InvalidArgument, match=f"{name} of a request is not supported") as raised:
        running.engine.submit(requested, RecordedReply())
    assert raised.value.param == name


async def test_unloaded_adapter_is_unavailable_until_loaded(start: Start) -> None:
    running = await start({"enable_lora": True})
    with pytest.raises(WorkerUnavailable):
        running.engine.submit(request(routing=Routing(lora_name="a")), RecordedReply())
    await running.config.adapters.load("a", "/a")
    _, error = await running.send_request(request(routing=Routing(lora_name="a")), chunk(4, finish=LENGTH))
    assert error is None
    assert running.sglang.received_requests[-1]["lora_path"] == "a"
    await running.config.adapters.unload("a")
    assert running.config.adapters.ids == {}


async def test_adapter_refused_by_sglang_is_an_invalid_argument(start: Start) -> None:
    running = await start({"enable_lora": True})
    running.sglang.tokenizer_manager.succeeds = False
    with pytest.raises(InvalidArgument, match="rank too high"):
        await running.config.adapters.load("a", "/a")


async def test_dead_engine_is_reported_once_and_refuses_requests(start: Start) -> None:
    running = await start()
    running.engine._liveness.die(RuntimeError("gone"))
    running.engine._liveness.die(RuntimeError("again"))
    assert [str(error) for error in running.host.failed] == ["gone"]
    with pytest.raises(EngineShutdown):
        running.engine.submit(request(), RecordedReply())


async def test_engine_stop_shuts_sglang_down_once(start: Start) -> None:
    running = await start()
    await running.engine.stop()
    await running.engine.stop()
    assert running.sglang.is_shut
    with pytest.raises(EngineShutdown):
        running.engine.submit(request(stop=StopConditions()), RecordedReply())


async def test_event_publisher_other_than_zmq_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="publisher"):
        await start({"kv_events_config": '{"publisher": "kafka"}'})


def test_ended_process_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It has ended, and its result was not read yet.
    check_alive([os.getpid()])
    with pytest.raises(RuntimeError, match=str(child.pid)):
        check_alive([os.getpid(), child.pid])
    child.wait()


def test_process_state_is_parsed_when_its_name_contains_a_bracket(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) R (b) Z 1 2 3")
    assert state_of(7, tmp_path) == "Z"
    assert state_of(8, tmp_path) is None


async def test_sigquit_of_a_failed_child_calls_the_handler() -> None:
    reported = asyncio.Event()
    with sigquit_handler(asyncio.get_running_loop(), reported.set) as listen:
        listen()
        os.kill(os.getpid(), signal.SIGQUIT)
        async with asyncio.timeout(30):
            await reported.wait()
