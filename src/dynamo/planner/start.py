"""Start of a planner: everything that its decisions depend on before the first tick, read once and recorded."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    the profile files, whatever `pre_deployment_sweeping_mode` is. Raises `ConfigError` for a warm-up trace that cannot be
    read, and for absent profile files if the mode is `thorough` and no other source of performance data exists.
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
    if config.aic_interpolation is not None and not all(measured.get(role) for role in scaled_roles(config)):
        logger.error(
            "aic_interpolation: %s on %s: not supported by this release; performance models start from "
            "profile_results_dir or live forward passes",
            config.aic_interpolation.hf_id,
            config.aic_interpolation.system,
        )
    found: dict[EngineRole, Sequence[ForwardPassMetrics]] = {}
    for role in scaled_roles(config):
        steps = measured.get(role) or _profiled(config, role)
        if steps:
            found[role] = steps
    return found


def _profiled(config: PlannerConfig, role: EngineRole) -> Sequence[ForwardPassMetrics]:
    """Return the steps of the profile files; none, with the cause in the log, if they cannot be read."""
    is_expected = config.pre_deployment_sweeping_mode is SweepMode.THOROUGH
    if not is_expected and not Path(config.profile_results_dir).is_dir():
        return ()  # The default directory of a deployment that was not profiled.
    try:
        return read_profile(config.profile_results_dir, role)
    except ConfigError as error:
        if is_expected and config.enable_throughput_scaling and not config.enable_load_scaling:
            raise
        logger.warning("%s; the performance model of %s workers starts from live forward passes", error, role.value)
        return ()


def scaled_roles(config: PlannerConfig) -> list[EngineRole]:
    """Return the roles of the engines that the mode scales."""
    if config.mode is Mode.AGG:
        return [EngineRole.AGGREGATED]
    roles = [EngineRole.PREFILL] if config.mode.scales_prefill else []
    return [*roles, EngineRole.DECODE] if config.mode.scales_decode else roles
