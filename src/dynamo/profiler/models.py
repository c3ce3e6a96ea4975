"""Models: the `config.json` of a request's model, from the cache volume, a directory, a table or the hub."""

import json
import logging
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.model_card.hub import resolve_model
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.spec import ProfileSpec

logger = logging.getLogger(__name__)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


def model_directory(spec: ProfileSpec) -> Path | None:
    """Return the model's directory: in the cache volume if it has a `config.json`, or that which `model` names."""
    cached = spec.model_path()
    if cached is not None and (Path(cached) / CONFIG).is_file():
        return Path(cached)
    path = Path(spec.model).expanduser()
    return path if path.is_dir() else None


def model_config(spec: ProfileSpec) -> dict[str, Any]:
    """Return the model's configuration. Raise `ConfigError` if there is none. Blocks for a download from the hub."""
    directory = model_directory(spec)
    if directory is None:
        known = known_config(spec.model)
        if known is not None:
            return known
        try:
            directory = Path(resolve_model(spec.model, weights=False))
        except ConfigError as error:
            remedy = "give a directory, set modelCache to a volume with the model, or allow access to the hub"
            raise ConfigError(f"model: {str(error).removeprefix('model ')}; {remedy}") from None
    path = directory / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"model: {spec.model!r}: has no {CONFIG}; give a directory in Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {spec.model!r}: cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model: {spec.model!r}: {path}: must be a JSON object")
    return config


def stored_bytes(directory: Path | None) -> int | None:
    """Return the bytes of a model's weight files; None if there are none."""
    if directory is None:
        return None
    try:
        total = json.loads((directory / INDEX).read_bytes())["metadata"]["total_size"]
        return int(total)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # A model in one file has no index.
    found = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return found or None
