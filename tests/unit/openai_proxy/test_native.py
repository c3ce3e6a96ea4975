"""Native: token requests to SGLang and llama.cpp, and the decoding of their responses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.openai_proxy.requests import LIMITS, outputs_of, request

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.openai_proxy.native import LlamaCppFormat, SglangFormat
from dynamo.protocols.engine import GuidedDecoding

SGLANG, LLAMA = SglangFormat(), LlamaCppFormat()


def test_sglang_request_uses_the_fields_of_sglang() -> None:
    requested = SGLANG.server_request(
        request(
            max_tokens=5, min_tokens=2, eos_token_ids=[7], temperature=0.5, top_k=3, seed=1, logprobs=2, dp_rank=1,
            n=2, extra_args={"sampling_options": {"logit_bias": {"5": 1}}},
            guided_decoding=GuidedDecoding(choice=["a.b", "c"]),
        ),
        LIMITS,
    )  # fmt: skip
    assert requested.path == "/generate"
    assert requested.body == {
        "input_ids": [1, 2, 3],
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "routed_dp_rank": 1,
        "data_parallel_rank": 1,
        "sampling_params": {
            "max_new_tokens": 5, "min_new_tokens": 2, "stop_token_ids": [7], "temperature": 0.5, "top_k": 3, "n": 2,
            "sampling_seed": 1, "logit_bias": {"5": 1.0}, "regex": r"(a\.b|c)",
        },
    }  # fmt: skip


def sglang(output: list[int], total: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    outputs_of = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 1, "finish_reason": reason, **meta}
    return {"text": "x", "output_ids": output, "meta_info": outputs_of}


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=6), st.booleans())
def test_sglang_chunks_may_be_cumulative_or_incremental(steps: list[list[int]], tells_all: bool) -> None:
    answer, so_far, chunks = SGLANG.answer(request()), [], []
    for place, step in enumerate(steps):
        so_far += step
        reason = {"type": "length", "length": len(so_far)} if place == len(steps) - 1 else None
        chunks.append(sglang(list(so_far) if tells_all else step, len(so_far), reason))
    pieces = outputs_of(answer, *chunks)
    assert [token for piece in pieces for token in piece.token_ids] == so_far
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].completion_usage is not None
    assert pieces[-1].completion_usage.completion_tokens == len(so_far)


def test_sglang_finish_reason_is_derived_from_the_matched_token() -> None:
    answer = SGLANG.answer(request(eos_token_ids=[7], stop_token_ids=[9]))
    (last,) = outputs_of(answer, sglang([5, 7], 2, {"type": "stop", "matched": 7}))
    assert (last.finish_reason, last.stop_reason) == ("eos", None)
    (last,) = outputs_of(SGLANG.answer(request(stop_token_ids=[9])), sglang([9], 1, {"type": "stop", "matched": 9}))
    assert (last.finish_reason, last.stop_reason) == ("stop", 9)


def test_sglang_abort_raises_its_status() -> None:
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(HttpError, match="too long"):
        SGLANG.answer(request()).take(sglang([], 0, reason))


def test_sglang_logprobs_belong_to_the_generated_tokens() -> None:
    answer = SGLANG.answer(request(logprobs=1))
    first, _ = outputs_of(
        answer,
        sglang(
            [5], 1, output_token_logprobs=[(-0.7, 5, None)], output_top_logprobs=[[(-0.6, 6, None), (-0.7, 5, None)]]
        ),
        sglang([], 1, {"type": "length"}),
    )
    assert first.log_probs == [-0.7]
    assert first.top_logprobs is not None
    assert [(top.token_id, top.logprob) for top in first.top_logprobs[0]] == [(6, -0.6)]


def test_llama_request_uses_the_fields_of_llama_cpp() -> None:
    requested = LLAMA.server_request(
        request(
            max_tokens=5, temperature=0.5, top_k=-1, repetition_penalty=1.1, seed=2, ignore_eos=True, logprobs=0,
            extra_args={"sampling_options": {"logit_bias": {"5": 1}}},
            guided_decoding=GuidedDecoding(choice=["a", "b"]),
        ),
        LIMITS,
    )  # fmt: skip
    assert requested.path == "/completion"
    assert requested.body == {
        "prompt": [1, 2, 3], "n_predict": 5, "return_tokens": True, "cache_prompt": True, "stream": True,
        "temperature": 0.5, "top_k": 0, "repeat_penalty": 1.1, "seed": 2, "ignore_eos": True, "n_probs": 1,
        "logit_bias": [[5, 1.0]], "grammar": 'root ::= "a" | "b"',
    }  # fmt: skip


@pytest.mark.parametrize(
    "given", [{"n": 2}, {"min_tokens": 3}, {"lora_name": "a"}, {"guided_decoding": GuidedDecoding(regex="a")}]
)
def test_unsupported_llama_cpp_option_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        LLAMA.server_request(request(**given), LIMITS)


def test_llama_cpp_response_ends_by_its_stop_type_or_a_hidden_stop_token() -> None:
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "timings": {"cache_n": 2}}
    first, end = outputs_of(LLAMA.answer(request()), {"content": "a", "tokens": [5], "stop": False}, last)
    assert (first.token_ids, end.finish_reason) == ([5], "stop")
    assert end.completion_usage is not None
    assert end.completion_usage.prompt_tokens_details is not None
    assert end.completion_usage.prompt_tokens_details.cached_tokens == 2
    answer = LLAMA.answer(request(stop_token_ids_hidden=[9]))
    (end,) = outputs_of(answer, {"tokens": [5, 9, 6], "stop": False}, {"tokens": [6], "stop": False})
    assert (end.token_ids, end.finish_reason) == ([5, 9], "eos")
    (end,) = outputs_of(LLAMA.answer(request()), {"tokens": [5], "stop": True, "stop_type": "limit"})
    assert end.finish_reason == "length"


def test_llama_logprobs_belong_to_the_generated_tokens() -> None:
    row = {"id": 5, "logprob": -0.7, "top_logprobs": [{"id": 6, "logprob": -0.6}]}
    first, _ = outputs_of(
        LLAMA.answer(request(logprobs=2)),
        {"tokens": [5], "stop": False, "completion_probabilities": [row]},
        {"tokens": [], "stop": True, "stop_type": "limit"},
    )
    assert first.log_probs == [-0.7]
    assert first.top_logprobs is not None
    assert [top.token_id for top in first.top_logprobs[0]] == [6, 5]
