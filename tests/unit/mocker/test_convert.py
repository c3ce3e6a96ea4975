"""Requests are parsed strictly; of models only the required fields are read."""

import json
from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.convert import ModelFacts, SimulationInput, default_name, last_output, read_request
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.protocols.engine import PreprocessedRequest, Routing, SamplingOptions, StopConditions
from dynamo.tokens.hashing import SEED, seed_of

FACTS = ModelFacts(path="", name="m", answer_vocab_size=90, eos_token_ids=frozenset({2}), context_length=20)


def request(token_ids: list[int], max_tokens: int | None = 5, **fields: object) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=max_tokens)
    return PreprocessedRequest(model="m", token_ids=token_ids, stop_conditions=stop, **fields)  # type: ignore[arg-type]


def facts(directory: Path, *argv: str) -> ModelFacts:
    return ModelFacts.read(str(directory), load(MockerConfig, [f"--model-path={directory}", *argv], {}))


def test_request_is_converted_to_a_simulation_input() -> None:
    assert read_request(request([1, 99]), FACTS, 1) == SimulationInput([1, 99], 5, SEED, None)


def test_output_is_limited_by_the_context_length() -> None:
    assert read_request(request([1] * 15, 100), FACTS, 1).max_tokens == 5


def test_lora_name_and_cache_salt_change_the_hash_seed() -> None:
    requested = read_request(request([1], routing=Routing(lora_name="a", cache_salt="b")), FACTS, 1)
    assert requested.hash_seed == seed_of("a", "b") != SEED


def test_image_prompt_uses_the_routing_tokens_of_the_frontend() -> None:
    info = {"routing_token_ids": [1, 1_000_007, 1_000_007, 0], "block_mm_infos": [], "expanded_prompt_len": 3}
    assert read_request(request([1, 9], mm_routing_info=info), FACTS, 1).prompt == [1, 1_000_007, 1_000_007]
    assert read_request(request([1, 9], mm_routing_info={}), FACTS, 1).prompt == [1, 9]


def test_request_can_name_its_rank() -> None:
    assert read_request(request([1], routing=Routing(dp_rank=1)), FACTS, 2).dp_rank == 1
    with pytest.raises(InvalidArgument, match="dp_rank 2"):
        read_request(request([1], routing=Routing(dp_rank=2)), FACTS, 2)


def test_missing_max_tokens_is_refused_with_the_upstream_message() -> None:
    with pytest.raises(
        InvalidArgument, match=r"`max_output_tokens` \(or `max_tokens`\) is required by the mocker worker"
    ):
        read_request(request([1], None), FACTS, 1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (request([]), "no tokens"),
        (request([1, 1 << 32]), "token id 4294967296"),
        (request([1, -1]), "token id -1"),
        (request([1], 0), "max_tokens is 0"),
        (request([1] * 20), "no answer fits"),
        (request([1], sampling_options=SamplingOptions(n=2)), "n is 2"),
    ],
)
def test_invalid_request_is_refused_with_its_reason(wrong: PreprocessedRequest, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=f"Invalid request: .*{sentence}"):
        read_request(wrong, FACTS, 1)


def test_model_facts_are_read_from_the_configuration_files(model_dir: Path) -> None:
    read = facts(model_dir)
    assert read.answer_vocab_size == 100
    assert read.eos_token_ids == {2}
    assert read.context_length == 512
    assert read.name == "tiny-model"


def test_generation_config_overrides_the_eos_token_ids(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert facts(model_dir).eos_token_ids == {3, 4}


def test_flags_override_the_model_name_and_context_length(model_dir: Path) -> None:
    read = facts(model_dir, "--model-name=other", "--max-model-len=64")
    assert (read.name, read.context_length) == ("other", 64)


def test_context_length_is_bounded_by_the_cache_size(model_dir: Path) -> None:
    assert facts(model_dir, "--num-gpu-blocks-override=2", "--block-size=16").context_length == 32


def test_vocabulary_size_is_read_from_a_tiktoken_file(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "tiktoken.model").write_text("YQ== 0\nYg== 1\n")
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("vocab_size", None)
    (model_dir / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    assert facts(model_dir).answer_vocab_size == 2 + 256


def test_invalid_tokenizer_file_is_a_config_error(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        facts(model_dir)
    (model_dir / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(ConfigError, match="no tokens found"):
        facts(model_dir)


def test_default_model_name_is_the_directory_name_or_the_hub_id(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert default_name(f"{tmp_path}/model/") == "model"
    assert default_name("owner/model") == "owner/model"


def test_last_output_contains_the_usage_of_the_response() -> None:
    sequence = SimulatedSequence[None](None, [1, 2, 3], 4, 0.0, 0)
    sequence.last_token, sequence.cached_tokens = 7, 2
    output = last_output(sequence)
    assert (output.token_ids, output.finish_reason) == ([7], "length")
    usage = output.completion_usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
