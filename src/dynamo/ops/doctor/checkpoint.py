"""Collector of a model's files: configuration, tokenizer, and whether the weights are complete."""

import difflib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dynamo.model_card.hub import HUB_NAME_PARTS_MAX
from dynamo.ops.doctor.facts import CheckpointFacts

INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
POINTER_BYTES_MAX = 1024
CONFIG_BYTES_MAX = 64 << 20
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json")


def checkpoint_facts(given: str, variables: Mapping[str, str]) -> CheckpointFacts:
    """Return the facts about a directory, or about a name on the Hugging Face hub."""
    path = os.path.expanduser(given)
    is_offline = variables.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    if os.path.isdir(path):
        return directory_facts_of(given, os.path.abspath(path))
    if os.path.exists(path):
        return CheckpointFacts(given=given, is_file=True)
    is_path = path.startswith((".", os.sep)) or path.count("/") >= HUB_NAME_PARTS_MAX
    cached = "" if is_path else cached_snapshot(given)
    if cached:
        return directory_facts_of(given, cached)
    return CheckpointFacts(
        given=given,
        is_name=not is_path,
        nearest=nearest_directory(path),
        is_offline=is_offline,
        has_token=bool(variables.get("HF_TOKEN")) or os.path.exists(os.path.join(hub_home(variables), "token")),
    )


def hub_home(variables: Mapping[str, str]) -> str:
    """Return the directory of the Hugging Face cache."""
    return os.path.expanduser(variables.get("HF_HOME") or os.path.join("~", ".cache", "huggingface"))


def cached_snapshot(name: str) -> str:
    """Return the directory of a model in the local cache; empty if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError, OSError):
        found = try_to_load_from_cache(name, "config.json")
        return os.path.dirname(found) if isinstance(found, str) else ""
    return ""


def nearest_directory(path: str) -> str:
    """Return the directory with the most similar name in the parent of a path that does not exist; empty without one."""
    parent, name = os.path.split(os.path.abspath(path))
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return nearest_directory(parent) if parent != os.path.dirname(parent) else ""
    near = difflib.get_close_matches(name, names, n=1)
    return os.path.join(parent, near[0]) if near else ""


def directory_facts_of(given: str, path: str) -> CheckpointFacts:
    """Return the facts about an existing directory."""
    config, error = _json(os.path.join(path, "config.json"))
    if not error and not isinstance(config, dict):
        error = "config.json: must be a JSON object"
    architectures = config.get("architectures") if isinstance(config, dict) else None
    missing, placeholders, size = weights_of(path)
    return CheckpointFacts(
        given=given,
        path=path,
        config_error=error,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        has_tokenizer=any(os.path.exists(os.path.join(path, name)) for name in TOKENIZERS),
        missing=missing,
        placeholders=placeholders,
        weights_bytes=size,
    )


def weights_of(path: str) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the missing files of the index, the files that are placeholders, and the size of all weights."""
    names = {name for name in os.listdir(path) if name.endswith(".safetensors")}
    index, error = _json(os.path.join(path, INDEX))
    indexed: set[str] = set()
    if not error and isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        indexed = {str(name) for name in index["weight_map"].values()}
    placeholders, size = [], 0
    for name in sorted(names):
        length = os.path.getsize(os.path.join(path, name)) if os.path.exists(os.path.join(path, name)) else 0
        size += length
        if length <= POINTER_BYTES_MAX and (length == 0 or _is_pointer(os.path.join(path, name))):
            placeholders.append(name)
    return tuple(sorted(indexed - names)), tuple(placeholders), size


def _is_pointer(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(POINTER)) == POINTER


def _json(path: str) -> tuple[Any, str]:
    """Return the value of a JSON file and an empty text, or None and the reason."""
    name = os.path.basename(path)
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(CONFIG_BYTES_MAX)), ""
    except FileNotFoundError:
        return None, f"no {name}"
    except OSError as error:
        return None, f"{name}: {error.strerror}"
    except ValueError as error:
        return None, f"{name}: no valid JSON: {error}"
