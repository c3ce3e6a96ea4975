"""Pools: the choice of a pool of workers for a request, and of the next one after a failure. Pure.

The range of each dimension of a request (its length, its targets) is divided into buckets of equal width; the buckets
index the mapping, whose elements are pools. A rule for the request's priority overrides the mapping.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.core.codec import json_decoder
from dynamo.core.errors import ConfigError

Stage = Literal["prefill", "decode", "agg"]


class PriorityRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Route requests with these priorities (inclusive) to the target pool."""

    min_priority: int
    max_priority: int
    target_pool: int


class PrefillStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Selection by prompt length and target time to first token."""

    isl_min: float
    isl_max: float
    isl_resolution: int
    ttft_min_ms: float
    ttft_max_ms: float
    ttft_resolution: int
    prefill_pool_mapping: list[list[int]]
    priority_overrides: list[PriorityRule] = msgspec.field(default_factory=list)


class DecodeStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Selection by the number of tokens and the target time between tokens."""

    context_length_min: float
    context_length_max: float
    context_length_resolution: int
    itl_min_ms: float
    itl_max_ms: float
    itl_resolution: int
    decode_pool_mapping: list[list[int]]
    priority_overrides: list[PriorityRule] = msgspec.field(default_factory=list)


class AggStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Selection by both targets, and by prompt length if all three of its fields are set."""

    ttft_min_ms: float
    ttft_max_ms: float
    ttft_resolution: int
    itl_min_ms: float
    itl_max_ms: float
    itl_resolution: int
    agg_pool_mapping: list[Any]
    isl_min: float | None = None
    isl_max: float | None = None
    isl_resolution: int | None = None
    priority_overrides: list[PriorityRule] = msgspec.field(default_factory=list)


class PoolsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration file."""

    mode: Literal["disagg", "agg"] = "disagg"
    enable_priority_retry: bool = False
    num_prefill_pools: int | None = None
    num_decode_pools: int | None = None
    num_agg_pools: int | None = None
    prefill_pool_dynamo_namespaces: list[str] = msgspec.field(default_factory=list)
    decode_pool_dynamo_namespaces: list[str] = msgspec.field(default_factory=list)
    agg_pool_dynamo_namespaces: list[str] = msgspec.field(default_factory=list)
    prefill_pool_priorities: list[int] | None = None
    decode_pool_priorities: list[int] | None = None
    agg_pool_priorities: list[int] | None = None
    prefill_pool_selection_strategy: PrefillStrategy | None = None
    decode_pool_selection_strategy: DecodeStrategy | None = None
    agg_pool_selection_strategy: AggStrategy | None = None


@dataclass(frozen=True, slots=True)
class Dimension:
    """One measure of a request, divided into buckets."""

    name: str
    low: float
    high: float
    buckets: int

    def bucket(self, value: float) -> int:
        """Return the bucket of a value; values beyond either end belong to the outermost bucket."""
        step = (self.high - self.low) / self.buckets
        return min(self.buckets - 1, max(0, math.floor((value - self.low) / step)))

    @property
    def middle(self) -> float:
        """Return the value for requests without one."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Properties of a request that determine its pool."""

    tokens: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of one stage."""

    stage: Stage
    namespaces: Sequence[str]
    priorities: Sequence[int]
    """Priorities of the pools; lower is faster."""
    dimensions: Sequence[Dimension]
    mapping: Sequence[Any]
    rules: Sequence[PriorityRule]
    retries: bool

    def choose(self, wanted: Wanted) -> int:
        """Return the pool of a request."""
        if wanted.priority is not None:
            for rule in self.rules:
                if rule.min_priority <= wanted.priority <= rule.max_priority:
                    return rule.target_pool
        found: Any = self.mapping
        for dimension in self.dimensions:
            found = found[dimension.bucket(measure(dimension, wanted))]
        return int(found)

    def order(self, chosen: int) -> list[int]:
        """Return the chosen pool, followed by the faster ones if fallback is enabled, slowest first."""
        if not self.retries:
            return [chosen]
        faster = [pool for pool in range(len(self.namespaces)) if self.priorities[pool] < self.priorities[chosen]]
        return [chosen, *sorted(faster, key=lambda pool: -self.priorities[pool])]


def measure(dimension: Dimension, wanted: Wanted) -> float:
    """Return a request's value in a dimension."""
    value = {"ttft": wanted.ttft_ms, "itl": wanted.itl_ms}.get(dimension.name, float(wanted.tokens))
    return dimension.middle if value is None else value


def read_pools(path: str) -> dict[Stage, Pools]:
    """Return the pools of a configuration file, by stage. Raises `ConfigError` that names the file and the field."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    try:
        return pools_of(json_decoder(PoolsFile).decode(text))
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"--config {path}: {error}") from None


def pools_of(file: PoolsFile) -> dict[Stage, Pools]:
    """Return the pools of a parsed file. Raises `ConfigError`."""
    if file.mode == "agg":
        return {"agg": agg_pools(file)}
    prefill, decode = file.prefill_pool_selection_strategy, file.decode_pool_selection_strategy
    if prefill is None or decode is None:
        missing = "prefill" if prefill is None else "decode"
        raise ConfigError(f"{missing}_pool_selection_strategy is missing: mode is disagg")
    return {"prefill": prefill_pools(file, prefill), "decode": decode_pools(file, decode)}


def agg_pools(file: PoolsFile) -> Pools:
    """Return the pools that do both phases. Raises `ConfigError`."""
    strategy = file.agg_pool_selection_strategy
    if strategy is None:
        raise ConfigError("agg_pool_selection_strategy is missing: mode is agg")
    dimensions = [
        Dimension("ttft", strategy.ttft_min_ms, strategy.ttft_max_ms, strategy.ttft_resolution),
        Dimension("itl", strategy.itl_min_ms, strategy.itl_max_ms, strategy.itl_resolution),
    ]
    by_length = (strategy.isl_min, strategy.isl_max, strategy.isl_resolution)
    if strategy.isl_min is not None and strategy.isl_max is not None and strategy.isl_resolution is not None:
        dimensions.insert(0, Dimension("isl", strategy.isl_min, strategy.isl_max, strategy.isl_resolution))
    elif any(value is not None for value in by_length):
        raise ConfigError("isl_min, isl_max and isl_resolution must be given together")
    pools = Pools(
        "agg",
        file.agg_pool_dynamo_namespaces,
        priorities_of(file.agg_pool_priorities, file.agg_pool_dynamo_namespaces),
        dimensions,
        strategy.agg_pool_mapping,
        strategy.priority_overrides,
        file.enable_priority_retry,
    )
    return checked(pools, file.num_agg_pools)


def prefill_pools(file: PoolsFile, strategy: PrefillStrategy) -> Pools:
    """Return the pools of the prefill phase. Raises `ConfigError`."""
    pools = Pools(
        "prefill",
        file.prefill_pool_dynamo_namespaces,
        priorities_of(file.prefill_pool_priorities, file.prefill_pool_dynamo_namespaces),
        [
            Dimension("isl", strategy.isl_min, strategy.isl_max, strategy.isl_resolution),
            Dimension("ttft", strategy.ttft_min_ms, strategy.ttft_max_ms, strategy.ttft_resolution),
        ],
        strategy.prefill_pool_mapping,
        strategy.priority_overrides,
        file.enable_priority_retry,
    )
    return checked(pools, file.num_prefill_pools)


def decode_pools(file: PoolsFile, strategy: DecodeStrategy) -> Pools:
    """Return the pools of the decode phase. Raises `ConfigError`."""
    lengths = Dimension(
        "context_length",
        strategy.context_length_min,
        strategy.context_length_max,
        strategy.context_length_resolution,
    )
    pools = Pools(
        "decode",
        file.decode_pool_dynamo_namespaces,
        priorities_of(file.decode_pool_priorities, file.decode_pool_dynamo_namespaces),
        [lengths, Dimension("itl", strategy.itl_min_ms, strategy.itl_max_ms, strategy.itl_resolution)],
        strategy.decode_pool_mapping,
        strategy.priority_overrides,
        file.enable_priority_retry,
    )
    return checked(pools, file.num_decode_pools)


def priorities_of(given: Sequence[int] | None, namespaces: Sequence[str]) -> Sequence[int]:
    """Return the pools' priorities; by default their order."""
    return list(range(len(namespaces))) if given is None else given


def checked(pools: Pools, count: int | None) -> Pools:
    """Return the pools. Raises `ConfigError` if their fields are inconsistent."""
    stage, number = pools.stage, len(pools.namespaces)
    if not number:
        raise ConfigError(f"{stage}_pool_dynamo_namespaces: expected at least one")
    if count != number:
        raise ConfigError(f"num_{stage}_pools is {count}: {stage}_pool_dynamo_namespaces names {number}")
    if len(pools.priorities) != number:
        raise ConfigError(f"{stage}_pool_priorities: expected {number}, one for each pool")
    for dimension in pools.dimensions:
        if dimension.buckets < 1:
            raise ConfigError(f"{dimension.name}_resolution is {dimension.buckets}: expected at least 1")
        if not dimension.low < dimension.high:
            raise ConfigError(f"{dimension.name}: its minimum {dimension.low:g} must be less than {dimension.high:g}")
    check_mapping(pools.mapping, pools.dimensions, number, f"{stage}_pool_mapping")
    for rule in pools.rules:
        if rule.min_priority > rule.max_priority:
            raise ConfigError(f"priority_overrides: {rule.min_priority} to {rule.max_priority}: not a valid range")
        if not 0 <= rule.target_pool < number:
            raise ConfigError(f"priority_overrides: target_pool {rule.target_pool}: expected 0 to {number - 1}")
    return pools


def check_mapping(field: Any, dimensions: Sequence[Dimension], pools: int, where: str) -> None:
    """Raise `ConfigError` if the mapping's shape or one of its pools is invalid."""
    if not dimensions:
        if not isinstance(field, int) or isinstance(field, bool) or not 0 <= field < pools:
            raise ConfigError(f"{where} is {field!r}: expected a pool, 0 to {pools - 1}")
        return
    first = dimensions[0]
    if not isinstance(field, list) or len(field) != first.buckets:
        raise ConfigError(f"{where}: expected a list of {first.buckets}, one for each bucket of {first.name}")
    for number, one in enumerate(field):
        check_mapping(one, dimensions[1:], pools, f"{where}[{number}]")


def wanted_of(request: Mapping[str, Any], ttft_ms: float | None, itl_ms: float | None) -> Wanted:
    """Return the properties of a request in tokens; the targets are the defaults for requests without them."""
    targets: dict[str, Any] = {}
    for given in (request.get("extra_args"), request.get("router")):
        if isinstance(given, Mapping):
            targets |= {name: given[name] for name in ("ttft_target", "itl_target") if number(given.get(name))}
    routing = request.get("routing")
    priority = routing.get("priority") if isinstance(routing, Mapping) else None
    tokens = request.get("token_ids")
    return Wanted(
        tokens=len(tokens) if isinstance(tokens, list) else 0,
        ttft_ms=targets.get("ttft_target", ttft_ms),
        itl_ms=targets.get("itl_target", itl_ms),
        priority=priority if isinstance(priority, int) else None,
    )


def number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
