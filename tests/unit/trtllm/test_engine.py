"""TrtllmEngine over a scripted TensorRT-LLM: requests, tokens and failures."""

import asyncio
from typing import Any

import pytest
from msgspec import UNSET
from tests.settle import until
from tests.unit.backend.recorded_reply import RecordedReply
from tests.unit.trtllm import scripted
from tests.unit.trtllm.conftest import Start, request
from tests.unit.trtllm.scripted import DisaggregatedParams, Logprob, make_output

from dynamo.core.errors import EngineShutdown, InvalidArgument, ResponseTimeout, Unknown, WorkerUnavailable
from dynamo.protocols.engine import (
    GuidedDecoding,
    OutputOptions,
    PrefillResult,
    Routing,
    SamplingOptions,
    StopConditions,
)

PREFILLED = DisaggregatedParams(
    request_type="context_only", first_gen_tokens=[4], ctx_request_id=9, opaque_state=b"\x00\xff", disagg_request_id=77
)


async def test_engine_config_describes_model_and_cache(start: Start) -> None:
    config = (await start()).config
    assert config.served_model_name == "m"
    assert (config.context_length, config.kv_cache_block_size, config.total_kv_blocks) == (128, 32, 64)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.data_parallel_size) == (8, 256, 1)
    assert not config.publishes_kv_events
    assert config.adapters is None


async def test_unnamed_model_is_named_after_its_directory(start: Start) -> None:
    running = await start(served_model_name=None)
    assert running.config.served_model_name == running.config.model_path.rpartition("/")[2]


async def test_cumulative_engine_outputs_become_incremental_tokens(start: Start) -> None:
    running = await start()
    reply, error = await running.send_request(
        request(), make_output(4), make_output(4, 5, 6), make_output(4, 5, 6, 7, finish="length", cached_tokens=2)
    )
    assert error is None
    assert reply.tokens == [4, 5, 6, 7]
    (last,) = reply.items
    assert (last.finish_reason, last.completion_usage.completion_tokens) == ("length", 4)
    assert last.completion_usage.prompt_tokens_details.cached_tokens == 2
    (requested,) = running.llm.received_requests
    assert (requested.inputs, requested.streaming, requested.disaggregated) == ([1, 2, 3], True, None)
    assert (requested.params.end_id, requested.params.stop_token_ids, requested.params.detokenize) == (9, [9], False)


async def test_stop_without_a_visible_stop_reason_is_eos(start: Start) -> None:
    running = await start()
    reply, _ = await running.send_request(request(), make_output(4, 9, finish="stop"))
    assert reply.items[-1].finish_reason == "eos"
    requested = request(stop=StopConditions(stop_token_ids_visible=[5], max_tokens=4))
    reply, _ = await running.send_request(requested, make_output(4, 5, finish="stop", stop_reason=5))
    assert (reply.items[-1].finish_reason, reply.items[-1].stop_reason) == ("stop", 5)


async def test_several_choices_are_sent_once_each(start: Start) -> None:
    running = await start()
    first = scripted.CompletionOutput(0, token_ids=[4])
    second = scripted.CompletionOutput(1, token_ids=[5])
    both = make_output(0)
    both.outputs = [first, second]
    ended = make_output(0)
    ended.outputs = [
        scripted.CompletionOutput(0, token_ids=[4], finish_reason="length"),
        scripted.CompletionOutput(1, token_ids=[5, 6]),
    ]
    last = make_output(0)
    last.outputs = [ended.outputs[0], scripted.CompletionOutput(1, token_ids=[5, 6], finish_reason="length")]
    reply, error = await running.send_request(request(sampling_options=SamplingOptions(n=2)), both, ended, last)
    assert error is None
    message: dict[int, list[int]] = {0: [4], 1: []}  # The first choice's bare token used the fast path.
    for item in reply.items:
        message[item.index] += item.token_ids
    assert message == {0: [4], 1: [5, 6]}
    assert [item.completion_usage is not None for item in reply.items].count(True) == 1


async def test_logprobs_are_sent_with_their_tokens(start: Start) -> None:
    running = await start()
    rows = [{4: Logprob(-0.5, 1), 8: Logprob(-1.0, 2)}, {5: Logprob(-2.0, 3), 8: Logprob(-0.1, 1)}]
    requested = request(output_options=OutputOptions(logprobs=1))
    reply, _ = await running.send_request(
        requested, make_output(4, logprobs=rows[:1]), make_output(4, 5, logprobs=rows, finish="length")
    )
    assert [item.log_probs for item in reply.items] == [[-0.5], [-2.0]]
    assert [[top.token_id for top in item.top_logprobs[0]] for item in reply.items] == [[4], [8]]


async def test_caller_disconnect_aborts_the_request_and_suppresses_output(start: Start) -> None:
    running = await start()
    running.llm.script = [make_output(4), asyncio.Event(), make_output(4, finish="cancelled")]
    reply = RecordedReply()
    running.engine.submit(request(), reply)
    await until(lambda: reply.tokens)
    running.engine.cancel(reply)
    async with asyncio.timeout(30):
        await running.engine.drain()
    assert running.llm.results[0].is_aborted
    assert reply.tokens == [4]
    assert not reply.ended.done()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (make_output(4, finish="cancelled"), EngineShutdown),
        (make_output(4, finish="timeout"), ResponseTimeout),
        (make_output(4), EngineShutdown),
        (scripted.RequestError("max_tokens is greater than the model's context"), InvalidArgument),
        (scripted.RequestError("the executor failed"), Unknown),
        (ValueError("top_k must be at least 0"), InvalidArgument),
        (ValueError("operands could not be broadcast together"), Unknown),
        (RuntimeError("CUDA"), Unknown),
    ],
)
async def test_failed_response_error_class_depends_on_its_cause(
    start: Start, message: Any, expected: type[Exception]
) -> None:
    running = await start()
    _, error = await running.send_request(request(), message)
    assert type(error) is expected


async def test_prefill_returns_serializable_disaggregated_params(start: Start) -> None:
    running = await start(disaggregation_mode="prefill")
    reply, error = await running.send_request(
        request(), make_output(4, finish="length", disaggregated_params=PREFILLED)
    )
    assert error is None
    (item,) = reply.items
    assert item.finish_reason == "length"
    assert item.disaggregated_params["opaque_state"] == "AP8="
    assert item.disaggregated_params["first_gen_tokens"] == [4]
    (requested,) = running.llm.received_requests
    assert (requested.disaggregated.request_type, requested.streaming) == ("context_only", False)
    assert 1 << 40 < requested.disaggregated.disagg_request_id < 1 << 63
    assert requested.params.max_tokens == 1
    assert running.llm.given["cache_transceiver_config"] == {"backend": "DEFAULT"}


async def test_decode_continues_from_the_prefill_result(start: Start) -> None:
    prefill = await start(disaggregation_mode="prefill")
    reply, _ = await prefill.send_request(request(), make_output(4, finish="length", disaggregated_params=PREFILLED))
    decode = await start(disaggregation_mode="decode")
    requested = request(prefill_result=PrefillResult(reply.items[0].disaggregated_params))
    reply, error = await decode.send_request(requested, make_output(4), make_output(4, 5, finish="length"))
    assert error is None
    assert reply.tokens == [4, 5]
    given = decode.llm.received_requests[0].disaggregated
    assert (given.request_type, given.opaque_state, given.disagg_request_id) == ("generation_only", b"\x00\xff", 77)


@pytest.mark.parametrize("result", [UNSET, PrefillResult({"bootstrap_room": 1}), PrefillResult("text")])
async def test_decode_without_a_prefill_is_refused(start: Start, result: object) -> None:
    running = await start(disaggregation_mode="decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        running.engine.submit(request(prefill_result=result), RecordedReply())


async def test_decode_with_bypass_computes_the_prompt(start: Start) -> None:
    running = await start(disaggregation_mode="decode")
    _, error = await running.send_request(
        request(annotations=["x-bypass-remote-prefill"]), make_output(4, finish="length")
    )
    assert error is None
    assert running.llm.received_requests[0].disaggregated is None


async def test_prefill_without_disaggregated_params_is_a_retryable_error(start: Start) -> None:
    running = await start(disaggregation_mode="prefill")
    _, error = await running.send_request(request(), make_output(4, finish="length"))
    assert isinstance(error, EngineShutdown)


async def test_request_may_name_its_rank(start: Start) -> None:
    running = await start(tensor_parallel_size=2, enable_attention_dp=True)
    assert running.config.data_parallel_size == 2
    await running.send_request(request(routing=Routing(dp_rank=1)), make_output(4, finish="length"))
    assert running.llm.received_requests[0].scheduling.attention_dp_rank == 1
    with pytest.raises(InvalidArgument, match="dp_rank 2"):
        running.engine.submit(request(routing=Routing(dp_rank=2)), RecordedReply())


async def test_guided_decoding_requires_a_backend(start: Start) -> None:
    requested = request(sampling_options=SamplingOptions(guided_decoding=GuidedDecoding(choice=["a+", "b"])))
    with pytest.raises(InvalidArgument, match="--guided-decoding-backend"):
        (await start()).engine.submit(requested, RecordedReply())
    running = await start(guided_decoding_backend="xgrammar")
    await running.send_request(requested, make_output(4, finish="length"))
    assert running.llm.received_requests[0].params.guided_decoding.regex == r"(a\+|b)"
    assert not running.llm.given["skip_tokenizer_init"]
    spaced = request(sampling_options=SamplingOptions(guided_decoding=GuidedDecoding(json={}, whitespace_pattern=" ")))
    with pytest.raises(InvalidArgument, match="guided_whitespace_pattern is not supported"):
        running.engine.submit(spaced, RecordedReply())


async def test_adapter_is_passed_with_requests_that_name_it(start: Start) -> None:
    running = await start({"lora_config": {"max_loras": 2}})
    requested = request(routing=Routing(lora_name="a"))
    with pytest.raises(WorkerUnavailable):
        running.engine.submit(requested, RecordedReply())
    number = await running.config.adapters.load("a", "/a")
    await running.send_request(requested, make_output(4, finish="length"))
    assert running.llm.received_requests[0].lora == scripted.LoRARequest("a", number, "/a")


async def test_engine_publishes_kv_events_and_iteration_stats(start: Start) -> None:
    running = await start(publish_kv_events=True, publish_metrics=True, kv_block_size=2)
    tokens = [{"token_id": 1}, {"token_id": 2}]
    running.llm.events.append(
        {
            "event_id": 1,
            "window_size": 8,
            "data": {
                "type": "stored",
                "parent_hash": None,
                "blocks": [{"block_hash": 5, "tokens": tokens, "cache_level": 0}],
            },
        }
    )
    running.llm.stats.append(
        {
            "iterLatencyMS": 20.0,
            "numActiveRequests": 3,
            "numQueuedRequests": 1,
            "kvCacheStats": {"usedNumBlocks": 4, "maxNumBlocks": 64, "cacheHitRate": 0.5},
            "inflightBatchingStats": {"numContextRequests": 1, "numGenRequests": 2, "numCtxTokens": 7},
        }
    )
    await until(lambda: running.host.events and running.host.passes)
    (event, rank, tier) = running.host.events[0]
    assert ([block.block_hash for block in event.blocks], rank, tier) == ([5], 0, "device")
    (load,) = running.host.loads
    assert (load.kv_used_blocks, load.running_requests, load.waiting_requests) == (4, 3, 1)
    (passed, _) = running.host.passes[0]
    assert (passed.wall_time, passed.scheduled_requests.sum_prefill_tokens) == (0.02, 7)
    assert "trtllm_kv_cache_hit_rate" in running.host.metrics.render()
    assert running.llm.given["kv_cache_config"]["event_buffer_max_size"] > 0
    assert running.llm.given["enable_iter_perf_stats"]


async def test_unhealthy_engine_refuses_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_INTERVAL", "0.01")
    running = await start()
    running.llm.is_healthy = False
    await until(lambda: running.host.failed)
    with pytest.raises(EngineShutdown):
        running.engine.submit(request(), RecordedReply())


async def test_engine_stop_shuts_trtllm_down_once(start: Start) -> None:
    running = await start()
    await running.engine.stop()
    await running.engine.stop()
    assert running.llm.is_shut
