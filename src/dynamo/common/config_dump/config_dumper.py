"""Dump of a configuration as canonical JSON."""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from dynamo import __version__
from dynamo.common.config_dump.environment import get_environment_vars
from dynamo.common.config_dump.system_info import get_gpu_info, get_package_info, get_runtime_info, get_system_info

logger = logging.getLogger(__name__)

ENGINES = {"sglang_version": "sglang", "trtllm_version": "tensorrt-llm", "vllm_version": "vllm"}


def dump_config(dump_config_to: str | None, config: Any) -> None:
    """Write the dump to a file, or to the log if the file cannot be written. Without a file, log it at level DEBUG."""
    if not dump_config_to:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("CONFIG_DUMP: %s", get_config_dump(config))
        return
    text = get_config_dump(config)
    path = Path(dump_config_to).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
        logger.info("CONFIG_DUMP: %s", text)
        return
    logger.info("configuration written to %s", path)


def get_config_dump(config: Any, extra_info: dict[str, Any] | None = None) -> str:
    """Return a configuration with its surroundings as JSON; an object with `error` if it cannot be encoded."""
    content = {
        "config": config,
        "dynamo_version": __version__,
        "environment": get_environment_vars(),
        "gpu_info": get_gpu_info(),
        "installed_packages": get_package_info(),
        "runtime_info": get_runtime_info(),
        "system_info": get_system_info(),
    }
    for key, distribution in ENGINES.items():
        if version := _version(distribution):
            content[key] = version
    try:
        return canonical_json_encoder.encode(content | (extra_info or {}))
    except (TypeError, ValueError, RecursionError) as error:
        logger.error("cannot encode the configuration: %s", error)  # noqa: TRY400 -- the cause is in the message
        failure = {"error": f"cannot encode the configuration: {error}", "system_info": content["system_info"]}
        return canonical_json_encoder.encode(failure)


def add_config_dump_args(parser: argparse.ArgumentParser) -> None:
    """Add `--dump-config-to`."""
    help_text = "File to which the configuration is written; without, the log at level DEBUG"
    parser.add_argument("--dump-config-to", type=str, default=None, help=help_text)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.singledispatch
def _encode(obj: object) -> object:
    """Return something that JSON can represent."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return dataclasses.asdict(obj)
    model = try_process_pydantic(obj)
    if model is not None:
        return model
    return vars(obj) if hasattr(obj, "__dict__") else str(obj)


def try_process_pydantic(obj: Any) -> dict[str, Any] | None:
    """Return the fields of a pydantic model; None for other objects."""
    pydantic = sys.modules.get("pydantic")  # An object of a model exists only where pydantic is imported.
    if pydantic is None or not isinstance(obj, pydantic.BaseModel):
        return None
    fields: dict[str, Any] = obj.model_dump()
    return fields


def register_encoder(type_class: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of functions that convert objects of a type for the dump."""
    return _encode.register(type_class)


@register_encoder(set)
def _encode_set(obj: set[Any]) -> list[Any]:
    return sorted(obj)


@register_encoder(Enum)
def _encode_enum(obj: Enum) -> str:
    return str(obj)


canonical_json_encoder = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True, default=_encode
)
