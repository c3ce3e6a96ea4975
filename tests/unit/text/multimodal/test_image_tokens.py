"""The token count of an image equals that of the model's processor."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.text.multimodal.image_size import Size
from dynamo.text.multimodal.image_tokens import resized, resolve_routing_image_token_id, rule_of

QWEN: dict[str, Any] = {"model_type": "qwen2_vl", "image_token_id": 9, "vision_config": {"patch_size": 14}}
BOUNDS = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}


def model(folder: Path, processor: dict[str, Any]) -> list[str]:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return ["/nowhere", str(folder)]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((1, 1), 4),
        ((30, 500), 18),
        ((2000, 10), 71),
        ((4000, 3000), 15301),
        ((100, 100), 16),
        ((42, 42), 4),
        ((14, 70), 5),
        ((98, 154), 24),
        ((280, 140), 50),
        ((2010, 10), None),
    ],
)
def test_image_tokens_of_qwen_equal_those_of_the_released_frontend(
    tmp_path: Path, size: Size, count: int | None
) -> None:
    """Observed of ai-dynamo 1.6.1 with this processor."""
    rule = rule_of(QWEN, model(tmp_path, BOUNDS))
    assert (rule.token_id, rule.count(size)) == (9, count)


def test_image_tokens_accept_alternative_bound_names(tmp_path: Path) -> None:
    size = {"shortest_edge": 65536, "longest_edge": 100_000}
    rule = rule_of({**QWEN, "model_type": "qwen3_vl"}, model(tmp_path, {"patch_size": 16, "size": size}))
    assert rule.count((10, 10)) == 64
    assert rule.count((1000, 1000)) == 81
    assert resized((1000, 1000), 32, 65536, 100_000) == (288, 288)


def test_image_tokens_of_llava_are_equal_for_every_image(tmp_path: Path) -> None:
    vision = {"image_size": 336, "patch_size": 14}
    config = {"model_type": "llava", "image_token_index": 32000, "vision_config": vision}
    folders = model(tmp_path, {})
    assert rule_of(config, folders).count((1, 1000)) == 576
    assert rule_of({**config, "vision_feature_select_strategy": "full"}, folders).count((5, 5)) == 577


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None"),
        ({"model_type": "llava_next"}, "model_type llava_next"),
        ({**QWEN, "image_token_id": None}, "image_token_id"),
        ({**QWEN, "vision_config": {}}, "cannot be read"),
    ],
)
def test_image_tokens_report_a_model_without_rule(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(config, model(tmp_path, {}))


def test_image_tokens_have_no_rule_without_the_processor_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        rule_of(QWEN, [str(tmp_path)])


def test_placeholder_for_routing_is_none_without_the_models_files(tmp_path: Path) -> None:
    assert resolve_routing_image_token_id("m", str(tmp_path)) is None
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2_vl", "image_token_id": 7, "vision_config": {"patch_size": 14}}'
    )
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "merge_size": 2}')
    assert resolve_routing_image_token_id("m", str(tmp_path)) == 7
