"""Presets: planner configurations of a search, which scale the best deployment while the load changes. Pure."""

from collections.abc import Mapping

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import PlannerConfig, parse
from dynamo.profiler.search import Configuration
from dynamo.profiler.spec import LatencyTarget
from dynamo.replay.core_planner import CorePlanner
from dynamo.replay.engine import EngineArgs

PRESETS: Mapping[str, tuple[int | None, int | None]] = {
    "throughput_180_5": (180, None),
    "throughput_600_5": (600, None),
    "load_180_5": (None, 5),
    "load_180_10": (None, 10),
    "hybrid_180_5": (180, 5),
    "hybrid_600_5": (600, 5),
}
"""Intervals in seconds of throughput scaling and of load scaling, None where it is off, by upstream's name."""
LOAD_S_MIN = 600.0
"""Least seconds of a load for which presets are simulated: a few decisions of throughput scaling."""
GAIN_MIN = 1.05
"""By how much the goodput per GPU must exceed that without a planner: less is not worth another component."""


def preset_config(name: str, config: Configuration, latency: LatencyTarget, max_gpus: int) -> PlannerConfig:
    """Return the planner's configuration of a preset for a deployment."""
    prefill = config.prefill or config.decode
    throughput_s, load_s = PRESETS[name]
    return parse(
        {
            "enable_throughput_scaling": throughput_s is not None,
            "enable_load_scaling": load_s is not None,
            "throughput_adjustment_interval_seconds": throughput_s or 180,
            "load_adjustment_interval_seconds": load_s or 5,
            "mode": "agg" if config.prefill is None else "disagg",
            "optimization_target": "sla",
            "load_predictor": "kalman",
            "ttft_ms": latency.ttft_ms,
            "itl_ms": latency.itl_ms,
            "max_gpu_budget": max_gpus,
            "prefill_engine_num_gpu": prefill.parallel.num_gpus,
            "decode_engine_num_gpu": config.decode.parallel.num_gpus,
        }
    )


def simulated_planner(config: PlannerConfig, decode: EngineArgs, prefill: EngineArgs | None) -> CorePlanner:
    """Return the production planner with the performance data of simulated engines."""
    if prefill is None:
        return CorePlanner(config, {EngineRole.AGGREGATED: decode})
    return CorePlanner(config, {EngineRole.PREFILL: prefill, EngineRole.DECODE: decode})
