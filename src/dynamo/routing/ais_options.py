"""AisOptions: engine description for estimated prefill times (`--router-prefill-load-model ais`).

The flags and keys are those of AISimulate, NVIDIA's simulator of inference engines. Its measured tables are not part of
this package. The first estimate uses the model's config.json (if the model path is a directory on this machine), the
published peak throughput of the system, and the tensor-parallel size; the step times that workers report then correct
it (`kv_router.prefill_model`). The other keys are accepted and have no effect, because prefill times are learned, not
looked up.

    seconds = base + 2 x parameters / rate x tokens + 4 x layers x attention width / rate x pairs of tokens
    rate    = half of the system's dense BF16 peak x tensor-parallel size
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decode, json_encode
from dynamo.core.config import NO_EFFECT, option
from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import ESTIMATE

logger = logging.getLogger(__name__)

PEAKS = {
    "a100": 312e12,
    "h20": 148e12,
    "h100": 989e12,
    "h200": 989e12,
    "gh200": 989e12,
    "l40s": 362e12,
    "b200": 2250e12,
    "b300": 2250e12,
    "gb200": 2500e12,
    "gb300": 2500e12,
}
"""Dense BF16 operations per second, from data sheets, by the first word of a system's name (`h200_sxm`)."""
EFFICIENCY = 0.5
REQUIRED = ("backend", "system", "model", "worker_type")

WITH = "With --router-prefill-load-model ais: "

Estimate = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of the routers.
class AisOptions:
    """Engine performance model."""

    # fmt: off
    ais_perf_config: str | None = option(None, "--ais-perf-config", "DYN_AIS_PERF_CONFIG",
        f"{WITH}AISimulate configuration of the engine: JSON, or a JSON or YAML file; replaces the other --ais- flags")
    ais_backend: str | None = option(None, "--ais-backend", "DYN_AIS_BACKEND",
        f"{NO_EFFECT}; --router-prefill-load-model ais requires it: vllm, sglang or trtllm", aliases=["--aic-backend"])
    ais_system: str | None = option(None, "--ais-system", "DYN_AIS_SYSTEM", f"{WITH}type of machine, such as h200_sxm",
        aliases=["--aic-system"])
    ais_backend_version: str | None = option(None, "--ais-backend-version", "DYN_AIS_BACKEND_VERSION",
        f"{NO_EFFECT}: engine version", aliases=["--aic-backend-version"])
    ais_tp_size: int | None = option(None, "--ais-tp-size", "DYN_AIS_TP_SIZE", f"{WITH}tensor-parallel size",
        aliases=["--aic-tp-size"])
    ais_model_path: str | None = option(None, "--ais-model-path", "DYN_AIS_MODEL_PATH",
        f"{WITH}model; a directory with a config.json provides the first estimate", aliases=["--aic-model-path"])
    ais_moe_tp_size: int | None = option(None, "--ais-moe-tp-size", "DYN_AIS_MOE_TP_SIZE",
        f"{NO_EFFECT}: tensor-parallel size of the experts", aliases=["--aic-moe-tp-size"])
    ais_moe_ep_size: int | None = option(None, "--ais-moe-ep-size", "DYN_AIS_MOE_EP_SIZE",
        f"{NO_EFFECT}: expert-parallel size", aliases=["--aic-moe-ep-size"])
    ais_attention_dp_size: int | None = option(None, "--ais-attention-dp-size", "DYN_AIS_ATTENTION_DP_SIZE",
        f"{NO_EFFECT}: data-parallel size; every rank is counted separately", aliases=["--aic-attention-dp-size"])
    ais_nextn: int | None = option(None, "--ais-nextn", "DYN_AIS_NEXTN", f"{NO_EFFECT}: number of draft tokens",
        aliases=["--aic-nextn"])
    ais_nextn_accept_rates: str | None = option(None, "--ais-nextn-accept-rates", "DYN_AIS_NEXTN_ACCEPT_RATES",
        f"{NO_EFFECT}: acceptance rates of draft tokens", aliases=["--aic-nextn-accept-rates"])
    ais_mtp_seed: int = option(42, "--ais-mtp-seed", "DYN_AIS_MTP_SEED",
        f"{NO_EFFECT}: seed of the simulation of draft tokens", aliases=["--aic-mtp-seed"])
    # fmt: on

    def ais_config(self) -> dict[str, Any]:
        """Return the engine description. Raises `ConfigError` if it is incomplete or given twice."""
        flat = {
            "backend": self.ais_backend,
            "system": self.ais_system,
            "backend_version": self.ais_backend_version,
            "tp": self.ais_tp_size,
            "model": self.ais_model_path,
            "moe_tp_size": self.ais_moe_tp_size,
            "moe_ep_size": self.ais_moe_ep_size,
            "attention_dp": self.ais_attention_dp_size,
            "nextn": self.ais_nextn,
        }
        given = {name: value for name, value in flat.items() if value is not None}
        if self.ais_perf_config is not None:
            if given:
                raise ConfigError("--ais-perf-config and the other --ais- flags are mutually exclusive")
            return checked(read_perf_config(self.ais_perf_config))
        return checked({"worker_type": "aggregated", **given})

    def prefill_estimate(self) -> Estimate:
        """Return the estimate of prefill times to use before any were measured."""
        return estimate_of(self.ais_config())


def read_perf_config(text: str) -> dict[str, Any]:
    """Parse JSON, or the content of a JSON or YAML file. Raises `ConfigError`."""
    import yaml

    if text.lstrip().startswith("{"):
        try:
            found = json_decode(text)
        except UNREADABLE as error:
            raise ConfigError(f"--ais-perf-config: must be valid JSON: {error}") from None
    else:
        try:
            found = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--ais-perf-config {text}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError("--ais-perf-config: expected an object")
    return found


def perf_config_text(given: Any) -> str | None:
    """Return the flag's value for a Python value: an object with `to_dict`, a mapping, JSON or a path.

    Raises `ValueError`.
    """
    if given is None or isinstance(given, str):
        return given
    shown = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(shown, Mapping):
        raise ValueError(f"ais_perf_config {given!r}: expected a mapping, JSON or a path")  # noqa: TRY004 — upstream's.
    return json_encode(dict(shown)).decode()


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` unchanged. Raises `ConfigError` if a required key is missing or invalid."""
    missing = [name for name in REQUIRED if not config.get(name)]
    if missing:
        raise ConfigError(
            f"--router-prefill-load-model ais requires {', '.join(missing)} (--ais-perf-config, or --ais-backend, "
            "--ais-system and --ais-model-path)"
        )
    ranks = config.get("tp", 1)
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"--ais-tp-size {ranks!r}: must be at least 1")
    return config


def estimate_of(config: Mapping[str, Any]) -> Estimate:
    """Return the estimated prefill times of an engine; the default if its model or system is unknown."""
    system, model = str(config["system"]), str(config["model"])
    peak = PEAKS.get(system.lower().replace("-", "_").partition("_")[0])
    shape = _shape(Path(model))
    if peak is None or shape is None:
        _warn_unknown(f"system {system}" if peak is None else f"model {model} (no local config.json)")
        return ESTIMATE
    parameters, width = shape
    rate = peak * EFFICIENCY * config.get("tp", 1)
    return ESTIMATE[0], 2 * parameters / rate, 4 * width / rate


@functools.cache
def _warn_unknown(what: str) -> None:
    """Log that the default estimate is used; cached, because the options are read in several places."""
    logger.warning("unknown %s; using the prefill times of a mid-sized model until step times arrive", what)


def _shape(model: Path) -> tuple[float, float] | None:
    """Return the parameters used per token and the attention width of all layers; None if the model is not local."""
    try:
        config = json_decode((model / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        return None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        experts = int(config.get("num_experts_per_tok") or 0)
        inner = int(config.get("moe_intermediate_size") or 0) * experts or int(config["intermediate_size"]) * max(
            1, experts
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    return float(layers * (attention + 3 * hidden * inner)), float(layers * heads * head)
