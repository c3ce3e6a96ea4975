"""Conversion of requests to SGLang arguments, and unsupported options."""

import pytest
from tests.unit.sglang import scripted
from tests.unit.vllm.conftest import request

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import GuidedDecoding, OutputOptions, Routing, SamplingOptions, StopConditions
from dynamo.sglang.convert import SglangLimits, guided_of, to_arguments

LIMITS = SglangLimits(context_length=16, ranks=2, first_rank=2, has_priorities=True)


def test_request_uses_the_arguments_of_sglang() -> None:
    requested = to_arguments(
        request(
            1, 2,
            stop=StopConditions(min_tokens=30, stop_token_ids=[5]),
            sampling_options=SamplingOptions(temperature=0.5, top_k=3, seed=7),
            routing=Routing(dp_rank=3, priority=4, cache_salt="s", lora_name="a"),
            extra_args={"sampling_options": {"logit_bias": {"4": 1}}},
            require_reasoning=True,
        ),
        LIMITS,
    )  # fmt: skip
    sampling = requested.pop("sampling_params")
    assert set(sampling) <= set(scripted.SAMPLING)
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["sampling_seed"]) == (14, 14, 7)
    assert (sampling["stop_token_ids"], sampling["logit_bias"]) == ([5, 9], {"4": 1.0})
    assert requested == {
        "input_ids": [1, 2],
        "stream": True,
        "require_reasoning": True,
        "cache_salt": "s",
        "lora_path": "a",
        "priority": 4,
        "routed_dp_rank": 1,
    }


def test_priority_is_negated_when_sglang_runs_low_values_first() -> None:
    low = SglangLimits(context_length=16, has_priorities=True, is_low_first=True)
    requested = request(routing=Routing(priority=4))
    assert to_arguments(requested, low)["priority"] == -4
    assert "priority" not in to_arguments(requested, SglangLimits(context_length=16))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"routing": Routing(dp_rank=1)}, "dp_rank 1"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "use_beam_search"),
        ({"stop": StopConditions(max_thinking_tokens=4)}, "max_thinking_tokens"),
        ({"extra_args": {"sampling_options": {"bad_words": ["x"]}}}, "bad_words"),
        ({"extra_args": {"sampling_options": {"logit_bias": "x"}}}, "logit_bias"),
    ],
)
def test_unsupported_request_option_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        to_arguments(request(**changes), LIMITS)


@pytest.mark.parametrize("tokens", [[], list(range(16))])
def test_empty_and_overlong_prompts_are_refused(tokens: list[int]) -> None:
    requested = request()
    requested.token_ids = tokens
    with pytest.raises(InvalidArgument, match="prompt"):
        to_arguments(requested, LIMITS)


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (GuidedDecoding(json={"type": "object"}), {"json_schema": '{"type":"object"}'}),
        (GuidedDecoding(json='{"a":1}'), {"json_schema": '{"a":1}'}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(choice=["a.", "b"]), {"regex": r"(a\.|b)"}),
        (GuidedDecoding(grammar="root ::= x"), {"ebnf": "root ::= x"}),
        (GuidedDecoding(structural_tag={"x": 1}), {"structural_tag": '{"x":1}'}),
        (None, {}),
    ],
)
def test_guided_decoding_uses_sglang_names(guided: GuidedDecoding | None, expected: dict[str, str]) -> None:
    assert guided_of(guided, has_grammars=True) == expected


def test_guided_decoding_without_a_grammar_backend_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--skip-tokenizer-init"):
        guided_of(GuidedDecoding(regex="a"), has_grammars=False)
    with pytest.raises(InvalidArgument, match="whitespace"):
        guided_of(GuidedDecoding(regex="a", whitespace_pattern=" "), has_grammars=True)


def test_logprob_arguments_follow_the_output_options() -> None:
    requested = to_arguments(request(output_options=OutputOptions(logprobs=0)), LIMITS)
    assert (requested["return_logprob"], requested["top_logprobs_num"], requested["logprob_start_len"]) == (True, 0, -1)
    requested = to_arguments(request(output_options=OutputOptions(prompt_logprobs=2)), LIMITS)
    assert (requested["top_logprobs_num"], requested["logprob_start_len"]) == (2, 0)
