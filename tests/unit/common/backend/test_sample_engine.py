"""The sample engine for tokens in each of its roles."""

import queue
from typing import Any

import pytest
from tests.settle import until

from dynamo.common.backend import sample_engine
from dynamo.common.backend.publisher import PushSource
from dynamo.common.backend.sample_engine import BLOCK_TOKENS, QUEUE_MAX, SampleLLMEngine
from dynamo.common.constants import DisaggregationMode
from dynamo.runtime.context import Context

MEDIA = {"multi_modal_data": {"image": [{"Url": "https://x"}]}}


async def output(engine: Any, **request: Any) -> list[Any]:
    return [chunk async for chunk in engine.generate({"token_ids": [1, 2], **request}, Context())]


async def test_request_without_limit_uses_the_token_limit_of_the_engine() -> None:
    chunks = await output(SampleLLMEngine(max_tokens=2, delay=0))
    assert [chunk["token_ids"] for chunk in chunks] == [[1], [2]]
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


async def test_media_pass_from_encode_to_prefill_and_only_its_result_to_decode() -> None:
    (encoded,) = await output(SampleLLMEngine(delay=0, disaggregation_mode=DisaggregationMode.ENCODE), **MEDIA)
    prefill = SampleLLMEngine(delay=0, disaggregation_mode=DisaggregationMode.PREFILL, route_to_encoder=True)
    (prefilled,) = await output(prefill, **MEDIA, encoder_result=encoded["encoder_result"])
    assert prefilled["engine_data"] == {"sample_multimodal": encoded["encoder_result"]}
    decode = SampleLLMEngine(delay=0, max_tokens=2, disaggregation_mode=DisaggregationMode.DECODE)
    result = {"disaggregated_params": prefilled["disaggregated_params"]}
    assert len(await output(decode, prefill_result=result)) == 2
    with pytest.raises(ValueError, match="decode worker should not receive raw media"):
        await output(decode, **MEDIA, prefill_result=result)


async def test_blocks_of_a_prompt_are_stored_and_removed() -> None:
    published: list[Any] = []

    class Publisher:
        """Records the events."""

        def publish_stored(self, tokens: list[int], sizes: list[int], hashes: list[int]) -> None:
            published.append(("stored", len(tokens), hashes))

        def publish_removed(self, hashes: list[int]) -> None:
            published.append(("removed", hashes))

    engine = SampleLLMEngine(delay=0, max_tokens=1)
    (source,) = await engine.kv_event_sources()
    assert isinstance(source, PushSource)
    source.on_ready(Publisher())  # type: ignore[arg-type]
    await output(engine, token_ids=[1] * (2 * BLOCK_TOKENS + 1))
    await until(engine._publish_queue.empty)
    await engine.cleanup()
    assert published == [("stored", 2 * BLOCK_TOKENS, [0, 1]), ("removed", [0, 1])]
    assert engine._kv_used_blocks == 0


def test_events_that_do_not_fit_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = SampleLLMEngine()
    engine._publish_thread = object()  # type: ignore[assignment]
    for number in range(QUEUE_MAX + 1):
        engine._report("stored", [number])
    assert engine._publish_queue.qsize() == QUEUE_MAX
    assert "KV event of 1 blocks dropped" in caplog.text
    with pytest.raises(queue.Full):
        engine._publish_queue.put_nowait(("stored", [1]))


def test_alternatives_are_limited_to_the_maximum_of_the_api() -> None:
    chunk: Any = {"token_ids": [3]}
    sample_engine.add_logprobs(chunk, 50)
    assert len(chunk["top_logprobs"][0]) == 21
