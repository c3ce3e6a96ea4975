"""Modes: create the placement of a router mode and its settings."""

from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import BALANCED_QUEUE, CostWeights, RoutingConfig
from dynamo.replay.placement import KvPlacement, PlacementPolicy, SimplePlacement
from dynamo.replay.plan import Role
from dynamo.replay.preble import PreblePlacement
from dynamo.runtime.push_router import RouterMode

SIMPLE = {
    "round_robin": RouterMode.ROUND_ROBIN,
    "random": RouterMode.RANDOM,
    "least_loaded": RouterMode.LEAST_LOADED,
    "power_of_two": RouterMode.POWER_OF_TWO,
}
MODES = (*SIMPLE, "kv_router", "balanced", "preble")
ALIASES = {"kv": "kv_router"}
SETTINGS = {"temperature": "router_temperature", "router_queue_threshold": "queue_threshold", "router_policy": "policy"}
"""Aliases of settings."""


CACHE_AWARE = ("kv_router", "balanced", "preble")


def canonical(mode: str) -> str:
    """Return the canonical name of a mode."""
    return ALIASES.get(mode.replace("-", "_"), mode.replace("-", "_"))


def placement(
    mode: str, settings: dict[str, Any], block_tokens: int, seed: int, role: Role = Role.AGGREGATED
) -> PlacementPolicy:
    """Return the placement of a mode. Raise `ConfigError` for an unknown mode or setting.

    Placement of prefill workers does not count occupied blocks, because prompts occupy them only briefly.
    """
    mode = canonical(mode)
    if mode in SIMPLE:
        return SimplePlacement(SIMPLE[mode], seed)
    if mode == "preble":
        return PreblePlacement(seed)
    if mode not in MODES:
        raise ConfigError(f"--router-mode {mode}: expected one of {', '.join(MODES)}")
    if role is Role.PREFILL:
        settings = {**settings, "track_active_blocks": False}
    return KvPlacement(router_config(settings, block_tokens, is_balanced=mode == "balanced"), seed)


def router_config(settings: dict[str, Any], block_tokens: int, *, is_balanced: bool = False) -> RoutingConfig:
    """Return the router configuration: upstream's defaults with the given settings."""
    named = {SETTINGS.get(name, name): value for name, value in settings.items()}
    weights = {name: named.pop(name) for name in CostWeights.__struct_fields__ if name in named}
    if is_balanced:
        named["policy"] = "balanced"
    if named.get("policy") == "balanced":
        named = {**BALANCED_QUEUE, **named}
    unknown = set(named) - set(RoutingConfig.__struct_fields__)
    if unknown:
        raise ConfigError(f"--router-config: unknown setting {min(unknown)}")
    try:
        return msgspec.convert({"block_size": block_tokens, **named, "weights": weights}, RoutingConfig)
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise ConfigError(f"--router-config: {error}") from None
