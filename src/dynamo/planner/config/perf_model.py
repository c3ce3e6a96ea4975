"""Settings of performance models from before the deployment: interpolation and simulator specifications."""

import dataclasses
import enum
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.planner.config.reader import setting_field


class AicBackend(enum.StrEnum):
    """Engines that the performance database describes."""

    TRTLLM = "trtllm"
    VLLM = "vllm"
    SGLANG = "sglang"


class EngineRole(enum.StrEnum):
    """Role of an engine in a performance model."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AicInterpolationSpec:
    """Sweep of the performance database: model, system, lengths in tokens, and numbers of points."""

    hf_id: str
    system: str
    backend: AicBackend
    isl: int = setting_field(gt=0)
    osl: int = setting_field(gt=0)
    sweep_max_context_length: int = setting_field(gt=0)
    prefill_interpolation_granularity: int = setting_field(gt=0)
    decode_interpolation_granularity: int = setting_field(gt=0)
    prefill_pick: PickedParallelConfig
    decode_pick: PickedParallelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AisPerfModelSpec:
    """Configurations of the simulator's forward-pass models by role, passed on unread."""

    roles: dict[EngineRole, dict[str, Any]]

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the configuration of a role names another one."""
        for role, config in self.roles.items():
            named = config.get("worker_type", role.value)
            if named != role.value:
                raise ConfigError(f"ais_perf_model.roles.{role.value}.worker_type: {named!r}: must be {role.value}")
