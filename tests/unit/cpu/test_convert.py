import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.cpu.convert import CpuLimits, Defaults, to_generation
from dynamo.cpu.generation import ActiveGeneration
from dynamo.protocols.engine import (
    OutputOptions,
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.tokens.hashing import block_hashes, seed_of

LIMITS = CpuLimits(vocab_size=100, context_length=20, block_tokens=4, choices_max=4)


def converted(receiver_type: Any, defaults: Defaults | None = None, **fields: Any) -> ActiveGeneration:
    request = PreprocessedRequest(**({"model": "m", "token_ids": [1, 2, 3]} | fields))
    return to_generation(request, receiver_type(), LIMITS, defaults or Defaults())


def test_request_conversion_limits_output_to_the_context_by_default(receiver_type: Any) -> None:
    assert converted(receiver_type).choices[0].rules.max_tokens == 17
    assert converted(receiver_type, stop_conditions=StopConditions(max_tokens=50)).choices[0].rules.max_tokens == 17
    assert converted(receiver_type, stop_conditions=StopConditions(max_tokens=5)).choices[0].rules.max_tokens == 5


def test_request_conversion_uses_model_defaults(receiver_type: Any) -> None:
    defaults = Defaults(temperature=0.6, top_p=0.9, top_k=20)
    sampling = converted(receiver_type, defaults, sampling_options=SamplingOptions(top_p=0.5)).choices[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)


def test_request_conversion_reads_top_k_minus_one_as_all(receiver_type: Any) -> None:
    defaults = Defaults(top_k=20)
    assert converted(receiver_type, defaults, sampling_options=SamplingOptions(top_k=-1)).choices[0].sampling.top_k == 0


def test_request_conversion_keeps_a_seed_and_generates_a_missing_one(receiver_type: Any) -> None:
    assert converted(receiver_type, sampling_options=SamplingOptions(seed=-1)).choices[0].sampling.seed == 2**64 - 1
    seeds = {converted(receiver_type).choices[0].sampling.seed for _ in range(3)}
    assert len(seeds) == 3


def test_request_conversion_separates_eos_and_stop_tokens(receiver_type: Any) -> None:
    stop = StopConditions(stop_token_ids=[5], stop_token_ids_visible=[6], stop_token_ids_hidden=[7, 1000])
    rules = converted(receiver_type, stop_conditions=stop, eos_token_ids=[8]).choices[0].rules
    assert (rules.end_ids, rules.stop_ids) == ({7, 8}, {5, 6})


def test_request_conversion_ignore_eos_keeps_named_stops(receiver_type: Any) -> None:
    stop = StopConditions(stop_token_ids=[5], ignore_eos=True)
    rules = converted(receiver_type, stop_conditions=stop, eos_token_ids=[8]).choices[0].rules
    assert (rules.end_ids, rules.stop_ids) == (set(), {5})


def test_request_conversion_choices_share_prompt_and_seed(receiver_type: Any) -> None:
    generation = converted(receiver_type, sampling_options=SamplingOptions(n=3, seed=5))
    assert [choice.index for choice in generation.choices] == [0, 1, 2]
    assert [choice.sampling.index for choice in generation.choices] == [0, 1, 2]
    leader = generation.choices[0].sequence
    assert [choice.sequence.leader for choice in generation.choices] == [None, leader, leader]
    assert generation.unfinished == 3


def test_request_conversion_keeps_history_only_for_penalties(receiver_type: Any) -> None:
    assert converted(receiver_type).choices[0].history is None
    history = converted(receiver_type, sampling_options=SamplingOptions(presence_penalty=0.5)).choices[0].history
    assert history is not None
    assert history.is_seen.sum() == 3


def test_request_conversion_salt_separates_blocks(receiver_type: Any) -> None:
    tokens = list(range(9))
    sequence = converted(receiver_type, token_ids=tokens, routing=Routing(cache_salt="a")).choices[0].sequence
    assert sequence.reusable_hashes()[0] == block_hashes(tokens, 4, seed_of(cache_salt="a"))[0]


def native(**sampling: Any) -> dict[str, Any]:
    """A request of vLLM's native API with these sampling parameters."""
    return {"extra_args": {"vllm_tito": {"sampling_params": sampling}}}


def test_request_conversion_native_api_uses_the_models_eos_tokens(receiver_type: Any) -> None:
    ends = Defaults(eos_token_ids=(8, 9))
    assert converted(receiver_type, defaults=ends, **native()).choices[0].rules.end_ids == {8, 9}
    ignoring = {"stop_conditions": StopConditions(max_tokens=4, ignore_eos=True)}
    assert converted(receiver_type, defaults=ends, **ignoring, **native()).choices[0].rules.end_ids == frozenset()
    assert converted(receiver_type, defaults=ends, eos_token_ids=[3]).choices[0].rules.end_ids == {3}


def test_request_conversion_reads_logit_bias_from_extras(receiver_type: Any) -> None:
    extra = {"sampling_options": {"logit_bias": {"5": -3, "7": 2.5}}}
    assert converted(receiver_type, extra_args=extra).choices[0].sampling.logit_bias == ((5, -3.0), (7, 2.5))
    assert converted(receiver_type, extra_args={"other": 1}).choices[0].sampling.logit_bias == ()


def test_request_conversion_reads_allowed_tokens_from_extras(receiver_type: Any) -> None:
    extra = {"sampling_options": {"allowed_token_ids": [5, 7, 500]}}
    allowed = converted(receiver_type, extra_args=extra).choices[0].sampling.allowed
    assert allowed is not None
    assert [token for token, is_allowed in enumerate(allowed) if is_allowed] == [5, 7]
    assert converted(receiver_type).choices[0].sampling.allowed is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"token_ids": []}, "prompt", "the prompt is empty"),
        ({"token_ids": [1, 100]}, "prompt", "token 100; the vocabulary ends at 99"),
        ({"token_ids": [-1]}, "prompt", "token -1"),
        ({"token_ids": [1] * 20}, "prompt", "20 tokens; .* context of 20"),
        ({"stop_conditions": StopConditions(max_tokens=0)}, "max_tokens", "max_tokens is 0"),
        ({"stop_conditions": StopConditions(min_tokens=-1)}, "min_tokens", "min_tokens is -1"),
        ({"stop_conditions": StopConditions(max_thinking_tokens=4)}, "max_thinking_tokens", "not supported"),
        ({"multi_modal_data": {"image_url": [{"Url": "https://x"}]}}, "messages", "image_url parts are not supported"),
        ({"sampling_options": SamplingOptions(n=5)}, "n", "1 to 4 choices"),
        ({"sampling_options": SamplingOptions(n=2, best_of=3)}, "best_of", "not supported"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "use_beam_search", "not supported"),
        ({"sampling_options": SamplingOptions(temperature=-1.0)}, "temperature", "expected 0 to inf"),
        ({"sampling_options": SamplingOptions(temperature=float("nan"))}, "temperature", "nan"),
        ({"sampling_options": SamplingOptions(top_p=1.5)}, "top_p", "expected 0 to 1"),
        ({"sampling_options": SamplingOptions(repetition_penalty=0.0)}, "repetition_penalty", "expected"),
        ({"output_options": OutputOptions(logprobs=1000)}, "logprobs", "expected 0 to 100"),
        ({"output_options": OutputOptions(prompt_logprobs=101)}, "prompt_logprobs", "expected 0 to 100"),
        ({"output_options": OutputOptions(prompt_logprobs=-1)}, "prompt_logprobs", "expected 0 to 100"),
        ({"routing": Routing(dp_rank=1)}, "dp_rank", "not supported"),
        (native(bad_words=["x"]), "sampling_params.bad_words", "not supported"),
        ({"extra_args": {"vllm_tito": {"features": {"a": 1}}}}, "features", "not supported"),
        (
            {**native(stop="x"), "stop_conditions": StopConditions(stop=["x"])},
            "sampling_params.stop",
            "use stop_token_ids",
        ),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": "x"}}}, "allowed_token_ids", "must be a list"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": [500]}}}, "allowed_token_ids", "lists no token"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"x": 1}}}}, "logit_bias", "must map"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"500": 1}}}}, "logit_bias", "token 500"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"5": float("nan")}}}}, "logit_bias", "token 5 is nan"),
        ({"extra_args": {"sampling_options": {"bad_words": ["no"]}}}, "bad_words", "not supported"),
        ({"sampling_options": SamplingOptions(length_penalty=0.5)}, "length_penalty", "not supported"),
        (native(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens", "not supported"),
        ({"stop_conditions": StopConditions(stop=["x"]), **native()}, "sampling_params.stop", "not supported"),
        ({"extra_args": {"vllm_tito": {"kv_transfer_params": {"a": 1}}}}, "kv_transfer_params", "not supported"),
    ],
)
def test_request_conversion_refuses_unsupported_fields_by_name(
    receiver_type: Any, fields: Any, param: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        converted(receiver_type, **fields)
    assert raised.value.param == param


def test_request_conversion_accepts_native_parameters_without_effect(receiver_type: Any) -> None:
    assert converted(receiver_type, **native(bad_words=[])).choices
    assert converted(receiver_type, **native(detokenize=False)).choices


def test_request_conversion_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    assert Defaults.read(str(tmp_path)) == Defaults()
    given = {"temperature": 0.7, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert Defaults.read(str(tmp_path)) == Defaults(temperature=0.7, top_k=20, eos_token_ids=(1, 2))


def test_request_conversion_refuses_a_default_that_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match="is not a number"):
        Defaults.read(str(tmp_path))
