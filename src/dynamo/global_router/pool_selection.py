"""Pools: the configuration file, the choice of a pool of workers for a request, and of the next one after a failure.

The range of each dimension of a request (its length, its targets) is divided into buckets of equal width; the buckets
index the mapping, whose elements are pools. A rule for the request's priority overrides the mapping. Only `load_config`
reads a file; the rest is pure.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.core.errors import ConfigError

logger = logging.getLogger(__name__)

Stage = Literal["prefill", "decode", "agg"]
MODES: dict[str, tuple[Stage, ...]] = {"disagg": ("prefill", "decode"), "agg": ("agg",)}
"""The stages of each mode."""
DEPRECATED_FIELDS = {
    "ttft_min_ms": "ttft_min",
    "ttft_max_ms": "ttft_max",
    "itl_min_ms": "itl_min",
    "itl_max_ms": "itl_max",
}
"""Former names of a strategy's fields."""


@dataclass
class PriorityPoolOverride:
    """Route requests with these priorities (inclusive) to the target pool."""

    min_priority: int
    max_priority: int
    target_pool: int


@dataclass(frozen=True, slots=True)
class Dimension:
    """One measure of a request, divided into buckets. `unit` is the suffix of its fields' names."""

    name: str
    unit: str
    low: float
    high: float
    buckets: int

    def bucket(self, value: float | None) -> int:
        """Return the bucket of a value, by default of the middle; values beyond either end are in the outermost one."""
        if value is None:
            value = (self.low + self.high) / 2
        return min(self.buckets - 1, max(0, math.floor((value - self.low) / self.step)))

    @property
    def step(self) -> float:
        """Return the width of a bucket."""
        return (self.high - self.low) / self.buckets

    def check(self) -> None:
        """Raise `ConfigError` if the range is empty or has no buckets."""
        if self.buckets < 1:
            raise ConfigError(f"{self.name}_resolution must be positive, got {self.buckets}")
        if not self.low < self.high:
            low, high = f"{self.name}_min{self.unit}", f"{self.name}_max{self.unit}"
            raise ConfigError(f"{low} ({self.low:g}) must be less than {high} ({self.high:g})")


@dataclass
class PrefillPoolSelectionStrategy:
    """Selection by prompt length and target time to first token."""

    ttft_min_ms: float
    ttft_max_ms: float
    ttft_resolution: int
    isl_min: float
    isl_max: float
    isl_resolution: int
    prefill_pool_mapping: list[list[int]]
    priority_overrides: list[PriorityPoolOverride] = field(default_factory=list)

    @property
    def dimensions(self) -> list[Dimension]:
        """Return the dimensions of the mapping."""
        return [
            Dimension("isl", "", self.isl_min, self.isl_max, self.isl_resolution),
            Dimension("ttft", "_ms", self.ttft_min_ms, self.ttft_max_ms, self.ttft_resolution),
        ]

    @property
    def ttft_step_ms(self) -> float:
        """Return the width of a bucket of times to first token."""
        return self.dimensions[1].step

    @property
    def isl_step(self) -> float:
        """Return the width of a bucket of lengths."""
        return self.dimensions[0].step

    def select_pool(self, isl: int, ttft_target_ms: float | None = None, priority: int | None = None) -> int:
        """Return the pool for a prompt of `isl` tokens."""
        pool = mapped(self.prefill_pool_mapping, self.dimensions, (isl, ttft_target_ms))
        return _apply_priority_overrides(pool, priority, self.priority_overrides)


@dataclass
class DecodePoolSelectionStrategy:
    """Selection by the number of tokens and the target time between tokens."""

    itl_min_ms: float
    itl_max_ms: float
    itl_resolution: int
    context_length_min: float
    context_length_max: float
    context_length_resolution: int
    decode_pool_mapping: list[list[int]]
    priority_overrides: list[PriorityPoolOverride] = field(default_factory=list)

    @property
    def dimensions(self) -> list[Dimension]:
        """Return the dimensions of the mapping."""
        low, high = self.context_length_min, self.context_length_max
        return [
            Dimension("context_length", "", low, high, self.context_length_resolution),
            Dimension("itl", "_ms", self.itl_min_ms, self.itl_max_ms, self.itl_resolution),
        ]

    @property
    def itl_step_ms(self) -> float:
        """Return the width of a bucket of times between tokens."""
        return self.dimensions[1].step

    @property
    def context_length_step(self) -> float:
        """Return the width of a bucket of lengths."""
        return self.dimensions[0].step

    def select_pool(self, context_length: int, itl_target_ms: float | None = None, priority: int | None = None) -> int:
        """Return the pool for a request of `context_length` tokens."""
        pool = mapped(self.decode_pool_mapping, self.dimensions, (context_length, itl_target_ms))
        return _apply_priority_overrides(pool, priority, self.priority_overrides)


@dataclass
class AggPoolSelectionStrategy:
    """Selection by both targets, and by prompt length if all three of its fields are set."""

    ttft_min_ms: float
    ttft_max_ms: float
    ttft_resolution: int
    itl_min_ms: float
    itl_max_ms: float
    itl_resolution: int
    agg_pool_mapping: list[Any]
    priority_overrides: list[PriorityPoolOverride] = field(default_factory=list)
    isl_min: float | None = None
    isl_max: float | None = None
    isl_resolution: int | None = None

    @property
    def dimensions(self) -> list[Dimension]:
        """Return the dimensions of the mapping. Raises `ConfigError` if the length has only some of its fields."""
        lengths: list[Dimension] = []
        if self.isl_min is not None and self.isl_max is not None and self.isl_resolution is not None:
            lengths.append(Dimension("isl", "", self.isl_min, self.isl_max, self.isl_resolution))
        elif (self.isl_min, self.isl_max, self.isl_resolution) != (None, None, None):
            raise ConfigError("isl_min, isl_max, and isl_resolution must be configured together")
        return [
            *lengths,
            Dimension("ttft", "_ms", self.ttft_min_ms, self.ttft_max_ms, self.ttft_resolution),
            Dimension("itl", "_ms", self.itl_min_ms, self.itl_max_ms, self.itl_resolution),
        ]

    @property
    def ttft_step_ms(self) -> float:
        """Return the width of a bucket of times to first token."""
        return self.dimensions[-2].step

    @property
    def itl_step_ms(self) -> float:
        """Return the width of a bucket of times between tokens."""
        return self.dimensions[-1].step

    def select_pool(
        self,
        ttft_target_ms: float | None = None,
        itl_target_ms: float | None = None,
        priority: int | None = None,
        isl: int | None = None,
    ) -> int:
        """Return the pool for a request. `isl` is ignored if the mapping does not use it."""
        dimensions = self.dimensions
        values = (isl, ttft_target_ms, itl_target_ms)[-len(dimensions) :]
        pool = mapped(self.agg_pool_mapping, dimensions, values)
        return _apply_priority_overrides(pool, priority, self.priority_overrides)


Strategy = PrefillPoolSelectionStrategy | DecodePoolSelectionStrategy | AggPoolSelectionStrategy


def mapped(mapping: Any, dimensions: Sequence[Dimension], values: Sequence[float | None]) -> int:
    """Return the element of a mapping at the buckets of these values."""
    for dimension, value in zip(dimensions, values, strict=True):
        mapping = mapping[dimension.bucket(value)]
    return int(mapping)


def _apply_priority_overrides(base_pool: int, priority: int | None, overrides: Sequence[PriorityPoolOverride]) -> int:
    """Return the target of the first rule that matches a priority, otherwise the pool itself."""
    if priority is not None:
        for rule in overrides:
            if rule.min_priority <= priority <= rule.max_priority:
                return rule.target_pool
    return base_pool


def get_priority_retry_order(
    selected_pool: int, pool_priorities: Sequence[int], enable_priority_retry: bool
) -> list[int]:
    """Return the selected pool, followed by the faster ones if fallback is enabled, slowest first.

    Lower priorities are faster. Raises `ValueError` if there is no such pool.
    """
    if not enable_priority_retry:
        return [selected_pool]
    if not 0 <= selected_pool < len(pool_priorities):
        raise ConfigError(f"selected_pool {selected_pool}: must be 0 to {len(pool_priorities) - 1}")
    own = pool_priorities[selected_pool]
    faster = [pool for pool, priority in enumerate(pool_priorities) if priority < own]
    return [selected_pool, *sorted(faster, key=lambda pool: -pool_priorities[pool])]


@dataclass(frozen=True, slots=True)
class StagePools:
    """The pools of one stage."""

    stage: Stage
    namespaces: Sequence[str]
    priorities: Sequence[int]
    strategy: Strategy

    def check(self) -> None:
        """Raise `ConfigError` if the strategy is inconsistent or names a pool that does not exist."""
        for dimension in self.strategy.dimensions:
            dimension.check()
        name = f"{self.stage}_pool_mapping"
        check_mapping(getattr(self.strategy, name), self.strategy.dimensions, len(self.namespaces), name)
        for index, rule in enumerate(self.strategy.priority_overrides):
            where = f"{self.stage} priority_overrides[{index}]"
            if rule.min_priority > rule.max_priority:
                low, high = rule.min_priority, rule.max_priority
                raise ConfigError(f"{where}: min_priority ({low}) must be <= max_priority ({high})")
            if not 0 <= rule.target_pool < len(self.namespaces):
                last = len(self.namespaces) - 1
                raise ConfigError(f"{where}: invalid target_pool {rule.target_pool} (must be 0 to {last})")


def check_mapping(rows: Any, dimensions: Sequence[Dimension], pools: int, where: str, row: str = "") -> None:
    """Raise `ConfigError` if the mapping's shape or one of its pools is invalid."""
    if not dimensions:
        if not isinstance(rows, int) or isinstance(rows, bool) or not 0 <= rows < pools:
            kind = where.partition("_")[0]
            raise ConfigError(f"Invalid {kind} pool index {rows!r} in {where}{row} (must be 0 to {pools - 1})")
        return
    first = dimensions[0]
    if not isinstance(rows, list) or len(rows) != first.buckets:
        found = len(rows) if isinstance(rows, list) else repr(rows)
        what = f"row {row} length" if row else "rows"
        raise ConfigError(f"{where} {what} ({found}) does not match {first.name}_resolution ({first.buckets})")
    for number, one in enumerate(rows):
        check_mapping(one, dimensions[1:], pools, where, f"{row}[{number}]")


@dataclass
class GlobalRouterConfig:
    """The configuration file. The fields of the other mode's stages are not used."""

    mode: str = "disagg"
    enable_priority_retry: bool = False
    num_prefill_pools: int | None = None
    num_decode_pools: int | None = None
    prefill_pool_dynamo_namespaces: list[str] | None = None
    decode_pool_dynamo_namespaces: list[str] | None = None
    prefill_pool_priorities: list[int] | None = None
    decode_pool_priorities: list[int] | None = None
    prefill_pool_selection_strategy: PrefillPoolSelectionStrategy | None = None
    decode_pool_selection_strategy: DecodePoolSelectionStrategy | None = None
    num_agg_pools: int | None = None
    agg_pool_dynamo_namespaces: list[str] | None = None
    agg_pool_priorities: list[int] | None = None
    agg_pool_selection_strategy: AggPoolSelectionStrategy | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the mode. Raises `ConfigError`."""
        if self.mode not in MODES:
            raise ConfigError(f"Unknown mode {self.mode!r}: must be disagg or agg")
        return MODES[self.mode]

    def pools(self, stage: Stage) -> StagePools:
        """Return the pools of a stage of the mode, whose priorities are by default their order. Raises `ConfigError`."""
        number = self._required(f"num_{stage}_pools")
        namespaces = self._required(f"{stage}_pool_dynamo_namespaces")
        strategy = self._required(f"{stage}_pool_selection_strategy")
        if len(namespaces) != number:
            found = f"{stage}_pool_dynamo_namespaces length ({len(namespaces)})"
            raise ConfigError(f"num_{stage}_pools ({number}) does not match {found}")
        if not namespaces:
            raise ConfigError(f"num_{stage}_pools is 0: expected at least one pool")
        field_name = f"{stage}_pool_priorities"
        return StagePools(stage, namespaces, priorities_of(getattr(self, field_name), number, field_name), strategy)

    def validate(self) -> None:
        """Raise `ConfigError` if fields are missing or inconsistent, and fill in the default priorities."""
        if not isinstance(self.enable_priority_retry, bool):
            raise ConfigError(f"enable_priority_retry must be a boolean, got {self.enable_priority_retry!r}")
        for stage in self.stages:
            pools = self.pools(stage)
            pools.check()
            setattr(self, f"{stage}_pool_priorities", list(pools.priorities))

    def _required(self, name: str) -> Any:
        """Return a field that the mode needs. Raises `ConfigError`."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"{name} required for {self.mode} mode")
        return value


def priorities_of(given: list[int] | None, number: int, field_name: str) -> list[int]:
    """Return the pools' priorities; by default their order. Raises `ConfigError`."""
    if given is None:
        return list(range(number))
    if len(given) != number:
        raise ConfigError(f"{field_name} length ({len(given)}) does not match number of pools ({number})")
    for index, priority in enumerate(given):
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError(f"{field_name}[{index}] must be an integer, got {priority!r}")
    return given


# The file


def load_config(config_path: str | Path) -> GlobalRouterConfig:
    """Return the settings of a JSON file. Raises `OSError`, and `ConfigError` that names the file and the field."""
    path = Path(config_path)
    try:
        data = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = read_config(data)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def read_config(data: Mapping[str, Any]) -> GlobalRouterConfig:
    """Return the settings of a parsed file. Raises `ConfigError`, `msgspec.ValidationError`."""
    data = dict(data)
    check_known(data, GlobalRouterConfig, "")
    for stage, kind in STRATEGIES.items():
        name = f"{stage}_pool_selection_strategy"
        if isinstance(data.get(name), Mapping):
            data[name] = renamed(data[name])
            check_known(data[name], kind, f"{name}.")
    config = msgspec.convert(data, GlobalRouterConfig)
    config.validate()
    return config


STRATEGIES: dict[Stage, type[Strategy]] = {
    "prefill": PrefillPoolSelectionStrategy,
    "decode": DecodePoolSelectionStrategy,
    "agg": AggPoolSelectionStrategy,
}


def renamed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's fields under their present names."""
    data = dict(data)
    for name, former in DEPRECATED_FIELDS.items():
        if former in data:
            logger.warning("configuration key %s is deprecated; use %s", former, name)
            value = data.pop(former)
            data.setdefault(name, value)
    return data


def check_known(data: Mapping[str, Any], kind: type[GlobalRouterConfig] | type[Strategy], where: str) -> None:
    """Raise `ConfigError` for a field that does not exist."""
    unknown = sorted(data.keys() - {one.name for one in fields(kind)})
    if unknown:
        raise ConfigError(f"unknown field {where}{unknown[0]}")
