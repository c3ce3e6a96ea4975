"""Start of a planner: everything that its decisions depend on before the first tick, read once and recorded."""

import logging
from collections.abc import Mapping, Sequence

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import Mode, PlannerConfig, SweepMode
from dynamo.planner.core.pipeline import PluginSpec
from dynamo.planner.core.record import Start
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.profile_data import read_profile
from dynamo.planner.warm_up import read_warm_up
from dynamo.protocols.load import ForwardPassMetrics

logger = logging.getLogger(__name__)

Steps = Mapping[EngineRole, Sequence[ForwardPassMetrics]]


def prepare_start(
    config: PlannerConfig,
    capabilities: WorkerCapabilities,
    *,
    measured: Steps | None = None,
    plugins: Sequence[PluginSpec] = (),
    start_s: float = 0.0,
) -> Start:
    """Return what a planner of this configuration starts with; `Start.planner()` creates it.

    `measured` are steps that the workers themselves report (`get_perf_metrics`); a role without any takes its steps from
    the profile files. Raises `ConfigError` for a warm-up trace that cannot be read, and for profile files that are absent
    where no other source of performance data exists.
    """
    trace = config.load_predictor_warmup_trace
    warm_up = (
        read_warm_up(trace, float(config.throughput_adjustment_interval_seconds))
        if trace is not None and config.enable_throughput_scaling
        else []
    )
    return Start(
        config=config.as_json(),
        capabilities=capabilities,
        plugins=list(plugins),
        warm_up=warm_up,
        bootstrap={role: list(steps) for role, steps in _bootstrap(config, measured or {}).items()},
        start_s=start_s,
    )


def _bootstrap(config: PlannerConfig, measured: Steps) -> Steps:
    """Return the steps of each role from the first source that has any: the workers, then the profile files."""
    roles = _roles(config)
    found = {role: measured[role] for role in roles if measured.get(role)}
    missing = [role for role in roles if role not in found]
    if not missing or config.pre_deployment_sweeping_mode is not SweepMode.THOROUGH:
        return found
    try:
        profile = read_profile(config.profile_results_dir)
    except ConfigError as error:
        if config.enable_throughput_scaling and not config.enable_load_scaling:
            raise
        logger.warning("%s; performance models start empty and use live forward passes", error)
        return found
    return {**found, **{role: profile[role] for role in missing if profile.get(role)}}


def _roles(config: PlannerConfig) -> list[EngineRole]:
    if config.mode is Mode.AGG:
        return [EngineRole.AGGREGATED]
    roles = [EngineRole.PREFILL] if config.mode.scales_prefill else []
    return [*roles, EngineRole.DECODE] if config.mode.scales_decode else roles
