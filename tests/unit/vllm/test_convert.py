"""Conversion of requests to vLLM's types, and of its outputs to ours."""

from typing import Any

import pytest
from tests.unit.vllm.conftest import request
from tests.unit.vllm.scripted import SAMPLING, Logprob, make_output

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import GuidedDecoding, OutputOptions, Routing, SamplingOptions, StopConditions
from dynamo.vllm.convert import VllmLimits, VllmOutput, guided_of, to_vllm

LIMITS = VllmLimits(context_length=16)


def sampling(limits: VllmLimits = LIMITS, **changes: Any) -> dict[str, Any]:
    return dict(to_vllm(request(**changes), limits).sampling)


def test_every_sampling_argument_exists_in_vllm() -> None:
    options = SamplingOptions(
        n=2,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1,
        temperature=0,
        top_p=1,
        top_k=1,
        min_p=0,
        seed=1,
    )
    stop = StopConditions(max_tokens=3, min_tokens=1, ignore_eos=True, stop_token_ids=[4], max_thinking_tokens=2)
    extra = {"sampling_options": {"logit_bias": {"1": 2}, "allowed_token_ids": [1], "bad_words": ["x"]}}
    found = sampling(sampling_options=options, stop=stop, extra_args=extra, output_options=OutputOptions(1, 1))
    assert set(found) <= set(SAMPLING)
    assert found["logit_bias"] == {1: 2.0}
    assert found["thinking_token_budget"] == 2
    assert found["stop_token_ids"] == [4]
    assert found["detokenize"] is True  # Bad words are texts.


def test_max_tokens_is_limited_by_the_context_length() -> None:
    assert sampling(stop=StopConditions())["max_tokens"] == 13
    assert sampling(stop=StopConditions(max_tokens=99, min_tokens=50))["min_tokens"] == 13
    assert sampling(VllmLimits(context_length=16, defaults={"max_tokens": 4}), stop=StopConditions())["max_tokens"] == 4


def test_model_defaults_apply_to_absent_sampling_options() -> None:
    limits = VllmLimits(context_length=16, defaults={"temperature": 0.6, "top_k": 20})
    assert sampling(limits)["temperature"] == 0.6
    found = sampling(limits, sampling_options=SamplingOptions(temperature=0.0))
    assert (found["temperature"], found["top_k"]) == (0.0, 20)


def test_stop_tokens_include_those_of_model_and_request() -> None:
    assert sampling(stop=StopConditions(stop_token_ids=[5], stop_token_ids_hidden=[7]))["stop_token_ids"] == [5, 7, 9]
    assert "stop_token_ids" not in sampling(stop=StopConditions(ignore_eos=True))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "use_beam_search"),
        ({"extra_args": {"sampling_options": {"logit_bias": [1]}}}, "logit_bias"),
        ({"routing": Routing(dp_rank=3)}, "dp_rank"),
        ({"multi_modal_data": {"image_url": [{"Decoded": "x"}]}}, "messages"),
    ],
)
def test_unsupported_request_option_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        to_vllm(request(**changes), LIMITS)
    assert caught.value.param == param


def test_prompts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="16 tokens"):
        to_vllm(request(*range(1, 17)), LIMITS)
    empty = request()
    empty.token_ids = []
    with pytest.raises(InvalidArgument, match="empty"):
        to_vllm(empty, LIMITS)


def test_dp_rank_is_relative_to_the_first_rank_of_the_worker() -> None:
    limits = VllmLimits(context_length=16, ranks=2, first_rank=4)
    assert to_vllm(request(routing=Routing(dp_rank=5)), limits).rank == 1
    assert to_vllm(request(routing=Routing(dp_rank=0)), LIMITS).rank is None
    with pytest.raises(InvalidArgument, match="4 to 5"):
        to_vllm(request(routing=Routing(dp_rank=6)), limits)


def test_priority_is_sent_only_to_a_priority_scheduler() -> None:
    routing = Routing(priority=3)
    assert to_vllm(request(routing=routing), LIMITS).priority == 0
    assert to_vllm(request(routing=routing), VllmLimits(context_length=16, has_priorities=True)).priority == -3


def test_cache_salt_is_passed_to_vllm() -> None:
    assert to_vllm(request(routing=Routing(cache_salt="s")), LIMITS).prompt["cache_salt"] == "s"


def test_each_kind_of_guided_decoding_is_converted() -> None:
    assert guided_of(None) is None
    assert guided_of(GuidedDecoding()) is None
    assert guided_of(GuidedDecoding(json={"type": "object"})) == {"json": {"type": "object"}}
    assert guided_of(GuidedDecoding(structural_tag={"a": 1})) == {"structural_tag": '{"a":1}'}


def test_finish_reason_distinguishes_eos_from_stop() -> None:
    def end(token: int, **changes: Any) -> tuple[str | None, Any]:
        (piece,) = VllmOutput(request(**changes)).take(
            make_output(token, finish="stop", stop=changes.pop("reason", None))
        )
        return piece.finish_reason, piece.stop_reason

    assert end(9) == ("eos", None)
    stop = StopConditions(stop_token_ids=[5])
    (piece,) = VllmOutput(request(stop=stop)).take(make_output(5, finish="stop", stop=5))
    assert (piece.finish_reason, piece.stop_reason) == ("stop", 5)
    (piece,) = VllmOutput(request()).take(make_output(9, finish="stop", stop=9))
    assert (piece.finish_reason, piece.stop_reason) == ("eos", None)


def test_logprobs_are_ordered_by_rank() -> None:
    row = {8: Logprob(-3.0, 5), 4: Logprob(-0.1, 1), 5: Logprob(-0.2, 2)}
    answer = VllmOutput(request(output_options=OutputOptions(logprobs=2)))
    (piece,) = answer.take(make_output(8, logprobs=[row]))
    assert piece.log_probs == [-3.0]
    assert piece.top_logprobs is not None
    assert [(one.rank, one.token_id) for one in piece.top_logprobs[0]] == [(1, 4), (2, 5)]


def test_prompt_logprobs_are_sent_with_the_last_output() -> None:
    answer = VllmOutput(request())
    answer.take(make_output(4, prompt_logprobs=[None, {2: Logprob(-1.0, 1)}]))
    (last,) = answer.take(make_output(5, finish="length"))
    assert last.engine_data == {"prompt_logprobs": [None, {"2": {"logprob": -1.0, "rank": 1}}]}


def test_steps_without_new_tokens_emit_nothing() -> None:
    assert VllmOutput(request()).take(make_output()) == []
