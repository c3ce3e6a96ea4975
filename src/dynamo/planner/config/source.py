"""Sources of planner settings: `--config` (file or inline JSON), environment variables and the flags of older releases."""

import argparse
import dataclasses
import json
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dynamo.core.config import ArgumentParser, environ
from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig, parse, warnings
from dynamo.planner.config.reader import FALSE, TRUE, unknown_fields

logger = logging.getLogger(__name__)

LEGACY_FLAGS: Mapping[str, str | None] = {
    "namespace": "namespace",
    "backend": "backend",
    "mode": "mode",
    "environment": "environment",
    "ttft": "ttft_ms",
    "itl": "itl_ms",
    "isl": None,
    "osl": None,
    "max-gpu-budget": "max_gpu_budget",
    "min-endpoint": "min_endpoint",
    "decode-engine-num-gpu": "decode_engine_num_gpu",
    "prefill-engine-num-gpu": "prefill_engine_num_gpu",
    "adjustment-interval": "throughput_adjustment_interval_seconds",
    "profile-results-dir": "profile_results_dir",
    "load-predictor": "load_predictor",
    "load-prediction-window-size": "prophet_window_size",
    "loadbased-adjustment-interval": "load_adjustment_interval_seconds",
    "loadbased-scaling-down-sensitivity": "load_scaling_down_sensitivity",
    "loadbased-metric-samples": None,
    "loadbased-min-observations": "load_min_observations",
    "metric-pulling-prometheus-endpoint": "metric_pulling_prometheus_endpoint",
    "metric-reporting-prometheus-port": "metric_reporting_prometheus_port",
}
"""Setting of each flag of releases before 1.1 that takes a value; None: the setting no longer exists."""
LEGACY_SWITCHES: Mapping[str, str | None] = {
    "no-operation": "advisory",
    "enable-throughput-scaling": "enable_throughput_scaling",
    "enable-loadbased-scaling": "enable_load_scaling",
    "no-correction": None,
}
SLA_FLAGS = frozenset({"ttft", "itl", "enable-throughput-scaling", "enable-loadbased-scaling", "adjustment-interval"})
"""Flags that only matter for latency objectives, which were the only target of those releases."""


def load_config(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> PlannerConfig:
    """Return the configuration of a command line. Raise `ConfigError` in one line."""
    parser = ArgumentParser(prog="python -m dynamo.planner", description="SLA planner", allow_abbrev=False)
    parser.add_argument("--config", help="JSON or YAML file, or inline JSON")
    for name in LEGACY_FLAGS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in LEGACY_SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=None, help=argparse.SUPPRESS)
    found = vars(parser.parse_args(list(argv)))
    argument = found.pop("config")
    raw = read_argument(argument) if argument is not None else {}
    legacy = legacy_settings(found)
    if argument is None and not legacy:
        raise ConfigError("--config: missing; must be a JSON or YAML file, or inline JSON")
    config = from_mapping({**legacy, **raw} if isinstance(raw, Mapping) else raw, variables)
    for line in warnings(config):
        logger.warning("%s", line)
    return config


def legacy_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of old flags, and log one deprecation line that names their replacements."""
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    if not given:
        return {}
    targets = {**LEGACY_FLAGS, **LEGACY_SWITCHES}
    settings = {setting: value for name, value in given.items() if (setting := targets[name]) is not None}
    unused = [f"--{name}" for name in given if targets[name] is None]
    logger.warning(
        "deprecated flags %s; set %s with --config%s",
        ", ".join(f"--{name}" for name in given),
        ", ".join(settings) or "nothing",
        f"; without effect: {', '.join(unused)}" if unused else "",
    )
    if SLA_FLAGS & given.keys():
        settings["optimization_target"] = "sla"
    return settings


def read_argument(argument: str) -> Any:
    """Return the value of `--config`: a path is tried first, then inline JSON. Raise `ConfigError`."""
    if os.path.isfile(argument):
        return _read_file(argument)
    try:
        return json.loads(argument)
    except ValueError as error:
        raise ConfigError(f"--config value is neither a valid file path nor valid JSON: {error}") from None


def _read_file(path: str) -> Any:
    kind = os.path.splitext(path)[1].lower()
    if kind not in {".json", ".yaml", ".yml"}:
        raise ConfigError(f"--config {path}: {kind or 'no suffix'}: must be a .json, .yaml or .yml file")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file) if kind == ".json" else yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from None


def from_mapping(raw: Any, variables: Mapping[str, str] | None = None) -> PlannerConfig:
    """Return the configuration of an object; fields that are absent come from the environment, then from defaults."""
    variables = environ() if variables is None else variables
    if isinstance(raw, Mapping):
        unknown = [name for name in unknown_fields(PlannerConfig, raw) if name != "aic_perf_model"]
        if unknown:
            logger.warning("configuration: unknown fields are ignored: %s", ", ".join(unknown))
        raw = {**from_environment(variables, raw), **raw}
    config = parse(raw)
    bundle = config.metric_pulling_prometheus_ca_bundle
    if bundle is not None and not os.path.isfile(bundle):
        raise ConfigError(
            f"metric_pulling_prometheus_ca_bundle: {bundle!r}: must be an existing file (PROMETHEUS_CA_BUNDLE)"
        )
    return config


def from_environment(variables: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that environment variables contain and `given` does not. Raise `ConfigError`."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(PlannerConfig):
        name = field.metadata.get("env")
        if name is None or name not in variables or field.name in given:
            continue
        text = variables[name]
        if field.name == "metric_pulling_prometheus_extra_query_params":
            found[field.name] = _query_parameters(name, text)
        elif field.type in (bool, "bool"):
            found[field.name] = text.lower() in ("1", "true", "yes")
            if text and text.lower() not in TRUE | FALSE:
                logger.warning("%s=%r is read as false; expected true or false", name, text)
        elif field.type in (int, "int", float, "float"):
            found[field.name] = _number(name, text, is_whole=field.type in (int, "int"))
        else:
            found[field.name] = text
    return found


def _number(name: str, text: str, *, is_whole: bool) -> float:
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: must be {'an integer' if is_whole else 'a number'}") from None


def _query_parameters(name: str, text: str) -> dict[str, str] | None:
    if not text:
        return None
    try:
        return dict(urllib.parse.parse_qsl(text, strict_parsing=True)) or None
    except ValueError:
        raise ConfigError(f"{name}={text!r}: must be a query string such as a=1&b=2") from None
