"""Modes: create the placement of a router mode and its settings."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.kv_router.queue import QUEUE_TIMEOUT_S
from dynamo.replay.placement import KvPlacement, PlacementPolicy, SimplePlacement
from dynamo.replay.plan import Role
from dynamo.replay.preble import PreblePlacement
from dynamo.replay.router_settings import ALIASES, canonical_names, router_settings, without_effect
from dynamo.runtime.push_router import RouterMode

SIMPLE = {
    "round_robin": RouterMode.ROUND_ROBIN,
    "random": RouterMode.RANDOM,
    "least_loaded": RouterMode.LEAST_LOADED,
    "power_of_two": RouterMode.POWER_OF_TWO,
}
MODES = (*SIMPLE, "kv_router", "balanced", "preble")
MODE_ALIASES = {"kv": "kv_router"}
CACHE_AWARE = ("kv_router", "balanced", "preble")
CONFIGURABLE = ("kv_router", "balanced")


def canonical(mode: str) -> str:
    """Return the canonical name of a mode."""
    return MODE_ALIASES.get(mode.replace("-", "_"), mode.replace("-", "_"))


def placement(
    mode: str, settings: Mapping[str, Any], block_tokens: int, seed: int, role: Role = Role.AGGREGATED
) -> PlacementPolicy:
    """Return the placement of a mode. Raise `ConfigError` for an unknown mode or setting, or one without effect.

    Placement of prefill workers does not count occupied blocks, because prompts occupy them only briefly.
    """
    mode = canonical(mode)
    if mode not in MODES:
        raise ConfigError(f"--router-mode {mode}: expected one of {', '.join(MODES)}")
    if mode in SIMPLE or mode == "preble":
        if settings:
            raise ConfigError(
                f"--router-config: {min(settings)}: router mode {mode} has no settings; kv_router and balanced have"
            )
        return PreblePlacement(seed) if mode == "preble" else SimplePlacement(SIMPLE[mode], seed)
    found = router_settings(settings, block_tokens, is_balanced=mode == "balanced")
    config = found.config
    if role is Role.PREFILL:
        config = msgspec.structs.replace(config, track_active_blocks=False)
    return KvPlacement(config, seed, found.rules)


def queue_timeout_s(mode: str, settings: Mapping[str, Any]) -> float:
    """Return the maximum wait in the queue of a mode's router."""
    if canonical(mode) not in CONFIGURABLE:
        return QUEUE_TIMEOUT_S
    return router_settings(settings, 1, is_balanced=canonical(mode) == "balanced").rules.queue_timeout_s


def shared_settings(
    shared: Mapping[str, Any], runs: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return the settings of each run: its own, and those of the shared ones that have an effect on its mode.

    A shared setting without effect on any run stays with the first, which reports it (`placement`).
    """
    found: dict[str, dict[str, Any]] = {}
    used: set[str] = set()
    for name, (mode, own) in runs.items():
        found[name] = dict(own)
        if canonical(mode) in CONFIGURABLE:
            is_balanced = canonical(mode) == "balanced"
            merged = canonical_names({**shared, **own})
            without = without_effect(merged, is_balanced=is_balanced).keys() - canonical_names(own).keys()
            found[name] = {key: value for key, value in merged.items() if key not in without}
            used |= found[name].keys()
    first = next(iter(runs))
    unused = {key: value for key, value in shared.items() if ALIASES.get(key, key) not in used}
    found[first] = {**unused, **found[first]}
    return found
