"""ImageTokens: number of placeholder tokens of an image in a prompt, by the model's own rule.

The rules are those of the models' processors (Hugging Face): Qwen-VL scales an image to whole patches within bounds,
LLaVA to one size. Other model types, and models without `preprocessor_config.json`, are not supported.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.model_card.assets import PROCESSOR_FILE
from dynamo.model_card.card import read_json
from dynamo.text.multimodal.image_size import Size

ASPECT_MAX = 200  # Qwen's processor rejects longer images.
QWEN_MIN, QWEN_MAX = 56 * 56, 28 * 28 * 1280  # Defaults if the processor's file has no bounds.


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Image token rule of one model."""

    token_id: int
    """The placeholder, once per image in the template's output."""
    count: Callable[[Size], int | None]
    """Number of tokens for an image of the given size; None if the model does not accept it."""


def rule_of(config: dict[str, Any], folders: list[str]) -> ImageTokens:
    """Return the rule of a model with this config.json and its files in one of `folders`. Raise `ConfigError`."""
    kind = str(config.get("model_type"))
    make = next((make for start, make in _RULES if kind.startswith(start)), None)
    if make is None or kind in _OTHERS:
        raise ConfigError(f"the image token rule for model_type {kind} is unknown")
    paths = [os.path.join(folder, PROCESSOR_FILE) for folder in folders]
    path = next((path for path in paths if os.path.isfile(path)), None)
    if path is None:
        raise ConfigError(f"{PROCESSOR_FILE} is missing")
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token_id, int):
        raise ConfigError("config.json has no image_token_id")
    try:
        return ImageTokens(token_id, make(config, read_json(path)))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{PROCESSOR_FILE} cannot be read: {error!r}") from None


def resolve_routing_image_token_id(model_id: str, model_dir: str) -> int | None:
    """Return the image placeholder of the model in a directory; None if its images cannot be counted.

    `model_id` is accepted for upstream's signature; the rule depends on the model's files only.
    """
    try:
        return rule_of(read_json(os.path.join(model_dir, "config.json")), [model_dir]).token_id
    except ConfigError:
        return None


def _qwen(config: dict[str, Any], processor: dict[str, Any]) -> Callable[[Size], int | None]:
    vision = config.get("vision_config") or {}
    patch = int(processor.get("patch_size") or vision["patch_size"])
    merge = int(processor.get("merge_size") or vision.get("spatial_merge_size") or 2)
    size = processor.get("size") or {}
    least = int(processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or QWEN_MIN)
    most = int(processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or QWEN_MAX)
    unit = patch * merge

    def count(image: Size) -> int | None:
        if max(image) > ASPECT_MAX * min(image):
            return None
        width, height = resized(image, unit, least, most)
        return (width // unit) * (height // unit)

    return count


def resized(image: Size, unit: int, least: int, most: int) -> Size:
    """Return the nearest size in whole `unit`s, with `least` to `most` pixels and about the same aspect ratio."""
    width, height = (max(unit, round(edge / unit) * unit) for edge in image)
    pixels = image[0] * image[1]
    if width * height > most:
        scale = math.sqrt(pixels / most)
        width, height = (max(unit, math.floor(edge / scale / unit) * unit) for edge in image)
    elif width * height < least:
        scale = math.sqrt(least / pixels)
        width, height = (math.ceil(edge * scale / unit) * unit for edge in image)
    return width, height


def _llava(config: dict[str, Any], _processor: dict[str, Any]) -> Callable[[Size], int | None]:
    vision = config["vision_config"]
    patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    if config.get("vision_feature_select_strategy") == "full":
        patches += 1
    return lambda _image: patches


_RULES: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Any]], Callable[[Size], int | None]]], ...] = (
    ("qwen2_vl", _qwen),
    ("qwen2_5_vl", _qwen),
    ("qwen3_vl", _qwen),
    ("llava", _llava),
)
_OTHERS = frozenset({"llava_next", "llava_onevision", "llava_next_video"})
"""Model types whose names begin like one above, but which cut images into tiles."""
