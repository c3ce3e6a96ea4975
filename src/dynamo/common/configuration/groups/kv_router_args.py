"""Flags of the KV router, and the router settings of a policy file.

The flags are those of `dynamo.routing.settings`; here they have the names, types and deprecations of upstream's argparse groups.
"""

import argparse
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import yaml

from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.flags import Flag, add_flags, declared
from dynamo.common.configuration.utils import Deprecated, nullable_float
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.llm import KvRouterConfig
from dynamo.routing.settings import LOAD_AWARE, DisaggregationOptions, KvRouterSettings

logger = logging.getLogger(__name__)

CONDITIONAL_DISAGG_POLICY_CHOICES: tuple[str, ...] = ("isl_bounding", "prefill_load", "isl_or_load")
LOAD_AWARE_CONDITIONAL_DISAGG_POLICIES: frozenset[str] = frozenset({"prefill_load", "isl_or_load"})
CONDITIONAL_FLAG = "--router-conditional-disagg-config"
POLICY_FLAG = "--router-policy-config"
REMOVED_IN = "v1.7"

POLICY_PARAMETERS = tuple(one for one in fields(KvRouterSettings) if one.metadata.get("yaml") == "parameters")
FILE_SETTINGS = tuple(one.name for one in fields(KvRouterSettings) if one.metadata.get("yaml") == "router")
"""Settings that the `router` section of a policy file may contain."""
MOVED = {one.metadata["flag"]: f"{one.name} of the policy parameters" for one in POLICY_PARAMETERS} | {
    "--load-aware": "the load-only policy and the tracking settings",
    "--router-kv-overlap-score-weight": "prefill_load_scale of the policy parameters",
    "--router-queue-threshold": "prefill_busy_threshold_frac of a policy class",
    "--router-queue-policy": "queue_policy of a policy class",
    "--router-prefill-policy": "worker_selection.prefill",
    "--router-decode-policy": "worker_selection.decode",
}
"""Flags that upstream removes, and what replaces them in a policy file."""


def _conditional_disagg_config_arg(text: str) -> dict[str, Any]:
    """Parse the JSON object of conditional disaggregation. Raise `argparse.ArgumentTypeError`."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f"{CONDITIONAL_FLAG} {text}: must be a JSON object") from None
    number = ("a number", (int, float))
    kinds: dict[str, tuple[str, tuple[type, ...]]] = {
        "policy": ("a string", (str,)),
        "eff_isl_threshold": ("an integer", (int,)),
        "eff_isl_ratio_threshold": number,
        "prefill_busy_threshold": number,
        "decode_busy_threshold": number,
    }
    for name, value in given.items():
        if name not in kinds:
            raise argparse.ArgumentTypeError(f"{CONDITIONAL_FLAG}: unknown field {name}; expected {', '.join(kinds)}")
        expected, types = kinds[name]
        is_null = value is None and name.endswith("busy_threshold")
        if not is_null and type(value) not in types:
            raise argparse.ArgumentTypeError(f"{CONDITIONAL_FLAG}: {name} must be {expected}, not {value!r}")
    return given


def _changes() -> dict[str, dict[str, Any]]:
    """Return what differs from the declarations of `dynamo.routing.settings`."""
    stage = "Process-local routing policy for the pool of {} that this router process has"
    changes: dict[str, dict[str, Any]] = {
        "--router-prefill-load-model": {"choices": ("none", "ais"), "type": lambda text: text.replace("aic", "ais")},
        "--router-queue-policy": {"default": "fcfs"},
        "--router-queue-threshold": {"type": nullable_float},
        "--router-conditional-disagg": {"dest": "conditional_disagg_enabled"},
        CONDITIONAL_FLAG: {"type": _conditional_disagg_config_arg},
        "--router-prefill-policy": {"help": stage.format("disaggregated prefill workers")},
        "--router-decode-policy": {"help": stage.format("decode workers")},
        "--router-kv-overlap-score-weight": {"help": argparse.SUPPRESS},
    }
    for name, replacement in MOVED.items():
        changes.setdefault(name, {})["deprecated"] = Deprecated(f"{replacement} in {POLICY_FLAG}", REMOVED_IN)
    return changes


def _flags() -> tuple[Flag, ...]:
    """Return the flags; those of frontends alone are in their own group."""
    changes = _changes()
    weight = "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT"  # The newer of two variables.
    if weight in environ():
        changes["--router-kv-overlap-score-weight"]["env"] = weight
    own = [one.metadata["flag"] for one in fields(KvRouterSettings) if one.name != "serve_indexer"]
    disaggregation = [one.metadata["flag"] for one in fields(DisaggregationOptions) if one.name != "enforce_disagg"]
    help_text = "Route by load alone: no credit for cached blocks, no KV events, no reuse"
    load_aware = Flag("--load-aware", "DYN_ROUTER_LOAD_AWARE", False, help_text, **changes["--load-aware"])
    return (
        load_aware,
        *declared(KvRouterSettings, own, changes),
        *declared(DisaggregationOptions, disaggregation, changes),
    )


class KvRouterConfigBase(ConfigBase):
    """Settings of the KV router."""

    overlap_score_weight: float | None = None
    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    decode_active_request_weight: float
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    router_temperature: float
    use_kv_events: bool
    router_replica_sync: bool
    router_track_active_blocks: bool
    router_track_output_blocks: bool
    router_assume_kv_reuse: bool
    router_track_prefill_tokens: bool
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None
    router_prefill_load_model: str
    router_ttl_secs: float
    router_approximate_cache_policy: str = "ttl"
    router_queue_threshold: float | None
    router_policy_config: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_event_threads: int
    router_queue_policy: str
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    enable_session_prefix_index: bool = False
    shared_cache_multiplier: float | None = None
    shared_cache_type: str = "none"
    conditional_disagg_enabled: bool = False
    conditional_disagg_config: dict[str, Any] | None = None
    conditional_disagg_policy: str = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    router_predicted_ttl_secs: float | None = None
    load_aware: bool = False
    _file_settings: Mapping[str, Any] | None = None

    def apply_router_config(self) -> None:
        """Apply the presets, then the policy file, whose settings have precedence."""
        self.apply_load_aware_preset()
        self.apply_conditional_disagg_config()
        if self._file_settings is None:  # The file is read once: it may change while the process runs.
            self._file_settings = {} if self.router_policy_config is None else _read(self.router_policy_config)
        vars(self).update(self._file_settings)

    def apply_load_aware_preset(self) -> None:
        """Set the values of `--load-aware`."""
        if self.load_aware:
            vars(self).update(LOAD_AWARE, serve_indexer=False, shared_cache_multiplier=0.0)

    def apply_conditional_disagg_config(self) -> None:
        """Set the fields of the JSON object. Raise `ValueError` if a threshold that its policy needs is missing."""
        given = self.conditional_disagg_config or {}
        if given and not self.conditional_disagg_enabled:
            raise ConfigError(f"{CONDITIONAL_FLAG} has no effect without --router-conditional-disagg")
        vars(self).update({f"conditional_disagg_{name}": value for name, value in given.items()})
        needs_load = self.conditional_disagg_policy in LOAD_AWARE_CONDITIONAL_DISAGG_POLICIES
        if self.conditional_disagg_enabled and needs_load and self.conditional_disagg_prefill_busy_threshold is None:
            self._default_busy_threshold()

    def _default_busy_threshold(self) -> None:
        threshold = self.router_queue_threshold
        if threshold is None:
            message = (
                f"policy {self.conditional_disagg_policy} needs prefill_busy_threshold or --router-queue-threshold"
            )
            raise ConfigError(f"{CONDITIONAL_FLAG}: {message}")
        logger.info("conditional_disagg prefill_busy_threshold defaults to --router-queue-threshold=%s", threshold)
        self.conditional_disagg_prefill_busy_threshold = threshold

    def kv_router_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `KvRouterConfig`."""
        self.apply_router_config()
        return {name: getattr(self, name) for name in inspect.signature(KvRouterConfig).parameters}


def _read(path: str) -> dict[str, Any]:
    """Return the settings in the `router` section of a policy file. Raise `ConfigError`."""
    if not os.path.isfile(path):
        raise ConfigError(f"{POLICY_FLAG} {path}: no such file")
    hints = inspect.get_annotations(KvRouterConfigBase)
    rows: list[tuple[str, Any, Any]] = [
        (name, hints[name] | msgspec.UnsetType, msgspec.UNSET) for name in FILE_SETTINGS
    ]
    section = msgspec.defstruct("RouterSection", rows, forbid_unknown_fields=True, omit_defaults=True)
    file = msgspec.defstruct("PolicyFile", [("router", section | None, None)])
    try:
        with open(path, encoding="utf-8") as text:
            router = msgspec.convert(yaml.safe_load(text), file).router  # type: ignore[attr-defined]
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{POLICY_FLAG} {path}: {' '.join(str(error).split())}") from None
    given = {} if router is None else msgspec.structs.asdict(router)
    return {name: value for name, value in given.items() if value is not msgspec.UNSET}


def check_indexer_and_model(config: Any) -> None:
    """Raise `ConfigError` for two sources of the index, and for a performance model that is incomplete or not used."""
    if config.serve_indexer and config.use_remote_indexer:
        raise ConfigError("--serve-indexer and --use-remote-indexer are mutually exclusive")
    if config.router_prefill_load_model == "ais":
        if not config.router_track_prefill_tokens:
            raise ConfigError("--router-prefill-load-model ais requires --router-track-prefill-tokens")
        config.ais_perf_kwargs()
    elif config.ais_perf_config is not None:
        raise ConfigError("--ais-perf-config has no effect without --router-prefill-load-model ais")


class KvRouterArgGroup(ArgGroup):
    """Flags of the KV router."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        add_flags(parser, "KV Router Options", _flags())
