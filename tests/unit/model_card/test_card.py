"""A card has the same fields of a model as upstream's, and leads back to its files."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError
from dynamo.model_card.card import ModelFiles, architectural_context_length, build_card, mdc_sum, read_json, slug_of
from dynamo.protocols.model_card import FileReference, ModelDeploymentCard, RuntimeConfig

BLAKE3_OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def card_of(path: Path, name: str = "tiny", **fields: Any) -> ModelDeploymentCard:
    return build_card(str(path), name, **{"context_length": 512, "kv_cache_block_size": 16} | fields)


def test_card_contains_values_of_the_model_files(model_dir: Path) -> None:
    card = card_of(model_dir, runtime_config=RuntimeConfig(max_num_seqs=8))
    assert (card.display_name, card.source_path, card.context_length) == ("tiny", str(model_dir), 512)
    assert card.architectural_max_context_length == 512
    assert card.runtime_config.max_num_seqs == 8
    assert card.tokenizer is not None
    data = (model_dir / "tokenizer.json").read_bytes()
    file = card.tokenizer["hf_tokenizer_json"]
    assert (file.size, file.checksum[:7], len(file.checksum)) == (len(data), "blake3:", 71)
    assert card.chat_template_file is msgspec.UNSET


def test_card_checksum_is_blake3(tmp_path: Path, model_dir: Path) -> None:
    empty = tmp_path / "empty.jinja"
    empty.touch()
    card = card_of(model_dir, custom_template=str(empty))
    assert card.chat_template_file
    template = card.chat_template_file["hf_chat_template"]
    assert template.is_custom
    assert template.file == FileReference(path=str(empty), checksum=f"blake3:{BLAKE3_OF_NOTHING}", size=0)


def test_card_can_be_resolved_to_its_files(model_dir: Path) -> None:
    assert ModelFiles.from_card(card_of(model_dir)) == ModelFiles.from_dir(str(model_dir))


def test_card_round_trips(model_dir: Path) -> None:
    card = card_of(model_dir, needs=[["prefill"]], model_aliases=["small"], user_data={"a": 1})
    assert msgspec.json.decode(msgspec.json.encode(card), type=ModelDeploymentCard) == card


def test_card_of_a_model_named_by_its_path_has_no_other_source(model_dir: Path) -> None:
    assert card_of(model_dir, str(model_dir)).source_path is msgspec.UNSET


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_card_error_names_a_missing_file(tmp_path: Path, name: str) -> None:
    for other in ("config.json", "tokenizer.json"):
        if other != name:
            (tmp_path / other).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        ModelFiles.from_dir(str(tmp_path))


def test_card_error_names_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such directory"):
        ModelFiles.from_dir(str(tmp_path / "absent"))


def test_card_error_names_an_absent_referenced_file(model_dir: Path, tmp_path: Path) -> None:
    card = card_of(model_dir)
    card.tokenizer = {"hf_tokenizer_json": FileReference(str(tmp_path / "gone.json"), "blake3:x")}
    with pytest.raises(ConfigError, match=r"gone\.json is not a file on this machine"):
        ModelFiles.from_card(card)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "has no hf_tokenizer_json"),
        (
            {"hf_tokenizer_json": FileReference("http://host/x", "blake3:x")},
            "http://host/x is not a file on this machine",
        ),
        ({"gguf": FileReference("x", "blake3:x")}, "gguf is not supported"),
    ],
)
def test_card_error_states_why_a_tokenizer_is_unreadable(model_dir: Path, tokenizer: Any, message: str) -> None:
    card = card_of(model_dir)
    card.tokenizer = tokenizer
    with pytest.raises(ConfigError, match=message):
        ModelFiles.from_card(card)


def test_card_error_names_a_file_that_is_not_a_json_object(tmp_path: Path) -> None:
    for content in (b"[1]", b"{", b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json: not a JSON object"):
            read_json(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 10}, 10),
        ({"n_positions": 20}, 20),
        ({"text_config": {"max_position_embeddings": 30}}, 30),
        ({"max_position_embeddings": None, "text_config": 5}, None),
        ({}, None),
    ],
)
def test_card_finds_the_context_length_of_each_architecture(config: dict[str, Any], length: int | None) -> None:
    assert architectural_context_length(config) == length


def test_card_slug_is_derived_from_the_name() -> None:
    assert slug_of("Qwen/Qwen3-0.6B") == "qwen_qwen3-0_6b"
    assert slug_of("/models/Tiny") == "models_tiny"


# ---- mdc_sum ------------------------------------------------------------------------------------------------------


def test_card_sum_is_64_stable_hex_digits(model_dir: Path) -> None:
    total = mdc_sum(card_of(model_dir))
    assert (len(total), int(total, 16) >= 0) == (64, True)
    assert mdc_sum(card_of(model_dir)) == total


def test_card_sum_does_not_depend_on_the_directory(model_dir: Path, tmp_path: Path) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert mdc_sum(card_of(tmp_path)) == mdc_sum(card_of(model_dir))


def test_card_sum_does_not_depend_on_the_cache_size(model_dir: Path) -> None:
    assert mdc_sum(card_of(model_dir, runtime_config=RuntimeConfig(total_kv_blocks=9))) == mdc_sum(card_of(model_dir))


@pytest.mark.parametrize(
    "fields",
    [
        {"context_length": 1},
        {"kv_cache_block_size": 32},
        {"model_type": "Chat"},
        {"runtime_config": RuntimeConfig(reasoning_parser="qwen3")},
    ],
)
def test_card_sum_changes_with_every_response_relevant_field(model_dir: Path, fields: dict[str, Any]) -> None:
    assert mdc_sum(card_of(model_dir, **fields)) != mdc_sum(card_of(model_dir))


def test_card_sum_changes_with_the_template(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x")
    assert mdc_sum(card_of(model_dir, custom_template=str(tmp_path / "t.jinja"))) != mdc_sum(card_of(model_dir))
