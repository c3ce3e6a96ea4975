"""Completions: token requests to vLLM, and the decoding of its chunks."""

from typing import Any

import pytest
from tests.unit.openai_proxy.requests import LIMITS, outputs_of, request

from dynamo.core.errors import EngineShutdown, InvalidArgument, StreamIncomplete, Unknown
from dynamo.openai_proxy.completions import CompletionsFormat
from dynamo.protocols.engine import GuidedDecoding

NEW = CompletionsFormat(returns_ids=True, version=(0, 32, 0))
OLD = CompletionsFormat(returns_ids=False, version=(0, 8, 5))


def choice(token_ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": token_ids, "finish_reason": reason, **more}]}


def test_plain_request_sends_only_the_given_fields() -> None:
    requested = NEW.server_request(request(max_tokens=7), LIMITS)
    assert requested.path == "/completions"
    assert requested.body == {
        "model": "theirs", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    assert requested.headers == {}


def test_every_option_is_converted() -> None:
    given = request(
        max_tokens=200, min_tokens=300, ignore_eos=True, stop_token_ids=[9], stop_token_ids_hidden=[8],
        eos_token_ids=[7], temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=4, n=2, presence_penalty=0.1,
        frequency_penalty=0.2, repetition_penalty=1.1, logprobs=3, cache_salt="s", dp_rank=1, lora_name="tuned",
        extra_args={"sampling_options": {"logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 6]}},
        guided_decoding=GuidedDecoding(json={"type": "object"}),
    )  # fmt: skip
    requested = NEW.server_request(given, LIMITS)
    assert requested.body == {
        "model": "tuned", "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 97, "min_tokens": 97, "ignore_eos": True, "stop_token_ids": [8, 9], "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 4, "n": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logprobs": 3, "return_tokens_as_token_ids": True, "return_token_ids": True,
        "cache_salt": "s", "logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 6],
        "structured_outputs": {"json": {"type": "object"}},
    }  # fmt: skip
    assert requested.headers == {"X-data-parallel-rank": "1"}


def test_older_server_gets_a_logprobs_request_for_token_ids() -> None:
    body = OLD.server_request(request(guided_decoding=GuidedDecoding(choice=["a"])), LIMITS).body
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (0, True)
    assert "return_token_ids" not in body
    assert body["guided_choice"] == ["a"]
    assert body["max_tokens"] == 97


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1] * 100}, "context of 100"),
        ({"multi_modal_data": {"image_url": [{"Url": "http://x"}]}}, "image_url"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"dp_rank": 2}, "dp_rank 2"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"a": 1}}}}, "logit_bias"),
    ],
)
def test_unsupported_field_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        NEW.server_request(request(**given), LIMITS)


def test_chunks_become_tokens_and_the_last_carries_usage() -> None:
    answer = NEW.answer(request(eos_token_ids=[2]))
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    first, last = outputs_of(answer, choice([5, 6]), choice([2], "stop"), {"choices": [], "usage": usage})
    assert (first.token_ids, first.index, first.finish_reason) == ([5, 6], 0, None)
    assert (last.token_ids, last.finish_reason) == ([2], "eos")
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == 3
    assert last.completion_usage.prompt_tokens_details is not None
    assert last.completion_usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("ended", "reason", "stopped_by"),
    [
        (choice([5], "length"), "length", None),
        (choice([9], "stop", stop_reason=9), "stop", 9),
        (choice([8], "stop", stop_reason=8), "eos", None),
        (choice([5], "stop"), "stop", None),
        (choice([5], "repetition"), "stop", None),
    ],
)
def test_finish_reasons_follow_the_stop_tokens_of_the_request(
    ended: dict[str, Any], reason: str, stopped_by: int | None
) -> None:
    answer = NEW.answer(request(stop_token_ids=[9], stop_token_ids_hidden=[8]))
    (last,) = outputs_of(answer, ended)
    assert (last.finish_reason, last.stop_reason) == (reason, stopped_by)


def test_only_the_last_choice_carries_the_usage() -> None:
    answer = NEW.answer(request(n=2))
    first, last = outputs_of(
        answer,
        {"choices": [{"index": 1, "token_ids": [5], "finish_reason": "length"}]},
        {"choices": [{"index": 0, "token_ids": [6], "finish_reason": "length"}]},
    )
    assert (first.index, first.finish_reason, first.completion_usage) == (1, "length", None)
    assert last.index == 0
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == 2


def logged(*tokens: tuple[int, dict[int, float]]) -> dict[str, Any]:
    return {
        "tokens": [f"token_id:{token}" for token, _ in tokens],
        "token_logprobs": [tops[token] for token, tops in tokens],
        "top_logprobs": [{f"token_id:{one}": value for one, value in tops.items()} for _, tops in tokens],
    }


@pytest.mark.parametrize("form", [NEW, OLD])
def test_logprobs_belong_to_the_generated_tokens(form: CompletionsFormat) -> None:
    answer = form.answer(request(logprobs=2))
    rows = logged((5, {5: -2.0, 6: -0.5, 7: -1.0}), (6, {6: -0.1, 5: -3.0}))
    first, last = outputs_of(answer, choice([5, 6], logprobs=rows), choice([], "length"))
    assert first.token_ids == [5, 6]
    assert first.log_probs == [-2.0, -0.1]
    assert first.cum_log_probs == pytest.approx(-2.1)
    assert first.top_logprobs is not None
    assert [[(top.rank, top.token_id, top.logprob) for top in row] for row in first.top_logprobs] == [
        [(1, 6, -0.5), (2, 7, -1.0)],
        [(1, 6, -0.1), (2, 5, -3.0)],
    ]
    assert last.token_ids == []


def test_logprobs_requested_only_for_token_ids_are_dropped() -> None:
    answer = OLD.answer(request())
    usage = {"completion_tokens": 2}
    first, last = outputs_of(
        answer,
        choice([], logprobs=logged((5, {5: -1.0}))),
        choice([], "stop"),
        {"choices": [], "usage": usage},
    )
    assert (first.token_ids, first.log_probs) == ([5], None)
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == 2  # Its end of text, which it does not show.


def test_stream_without_its_end_is_incomplete() -> None:
    answer = NEW.answer(request())
    answer.take(choice([5]))
    with pytest.raises(StreamIncomplete):
        answer.end()


def test_request_aborted_by_the_server_is_retryable() -> None:
    with pytest.raises(EngineShutdown):
        NEW.answer(request()).take(choice([5], "abort"))


@pytest.mark.parametrize(
    ("form", "chunk"),
    [
        (NEW, {"choices": [{"index": 0, "text": "x"}]}),
        (OLD, {"choices": [{"index": 0, "text": "x"}]}),
        (OLD, choice([], logprobs={"tokens": ["cat"], "token_logprobs": [0.0]})),
        (NEW, {"choices": [1]}),
        (NEW, {"choices": [{"index": "a", "token_ids": [1]}]}),
        (NEW, {"choices": 5}),
        (NEW, 5),
    ],
)
def test_malformed_chunk_raises_an_error(form: CompletionsFormat, chunk: Any) -> None:
    with pytest.raises(Unknown):
        form.answer(request()).take(chunk)


def test_response_keeps_the_kv_transfer_params() -> None:
    answer = NEW.answer(request())
    outputs_of(answer, {**choice([5], "length"), "kv_transfer_params": {"remote_host": "h"}})
    assert answer.kv_transfer_params == {"remote_host": "h"}
