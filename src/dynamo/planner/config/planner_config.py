"""PlannerConfig: every setting of the planner with its bounds, and the rules between settings."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import AicInterpolationSpec, AisPerfModelSpec
from dynamo.planner.config.plugins import PluginRegistrationConfig, SchedulingConfig
from dynamo.planner.config.reader import dump, read, setting_field

PROMETHEUS = "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local:9090"
TTFT_MS, ITL_MS = 500.0, 50.0
INTERVAL_TOLERANCE = 1e-6
"""Relative error of a multiple below which it is exact: intervals such as 0.1 s are not exact in binary."""


class DeployEnvironment(enum.StrEnum):
    """Where the workers run."""

    KUBERNETES = "kubernetes"
    VIRTUAL = "virtual"
    GLOBAL_PLANNER = "global-planner"


class Backend(enum.StrEnum):
    """Inference engine of the workers."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    MOCKER = "mocker"


class Mode(enum.StrEnum):
    """Roles that the planner scales."""

    DISAGG = "disagg"
    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"

    @property
    def scales_prefill(self) -> bool:
        """Return whether prefill workers are scaled."""
        return self in (Mode.DISAGG, Mode.PREFILL)

    @property
    def scales_decode(self) -> bool:
        """Return whether decode or aggregated workers are scaled."""
        return self is not Mode.PREFILL


class OptimizationTarget(enum.StrEnum):
    """What scaling optimizes: static thresholds of three kinds, or the latency objectives."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    LOAD = "load"
    SLA = "sla"


class SweepMode(enum.StrEnum):
    """Source of performance data from before the deployment."""

    NONE = "none"
    RAPID = "rapid"
    THOROUGH = "thorough"


class Predictor(enum.StrEnum):
    """Load predictor."""

    CONSTANT = "constant"
    ARIMA = "arima"
    PROPHET = "prophet"
    KALMAN = "kalman"


class ScalingPolicy(enum.StrEnum):
    """How replicas are chosen: upstream's load and throughput scaling, or from the distribution of the demand."""

    STANDARD = "standard"
    FORECAST = "forecast"


class MetricsSource(enum.StrEnum):
    """Component whose metrics report the traffic."""

    FRONTEND = "frontend"
    ROUTER = "router"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of one planner. `load` reads them; the constructor takes the values after all rules."""

    environment: DeployEnvironment = DeployEnvironment.KUBERNETES
    namespace: str = setting_field("dynamo", env="DYN_NAMESPACE", is_dumped=False)
    backend: Backend = Backend.VLLM
    mode: Mode = Mode.DISAGG
    optimization_target: OptimizationTarget = OptimizationTarget.THROUGHPUT
    scaling_policy: ScalingPolicy = ScalingPolicy.STANDARD
    """Not upstream's; `forecast` requires the target sla and replaces load and throughput scaling."""
    log_dir: str | None = None
    pre_deployment_sweeping_mode: SweepMode | None = SweepMode.RAPID

    enable_throughput_scaling: bool = True
    enable_load_scaling: bool = False
    throughput_adjustment_interval_seconds: int = setting_field(180, gt=0, aliases=("throughput_adjustment_interval",))
    load_adjustment_interval_seconds: int = setting_field(5, gt=0, aliases=("load_adjustment_interval",))
    max_throughput_scaling_replicas: int = setting_field(8, gt=0)
    """Largest change of a role's replicas by one throughput decision."""

    max_gpu_budget: int = 8
    """Negative: no limit."""
    min_gpu_budget: int = -1
    """Negative: no limit."""
    min_endpoint: int = setting_field(1, ge=0)
    prefill_min_endpoint: int | None = setting_field(None, ge=1)
    decode_min_endpoint: int | None = setting_field(None, ge=1)
    control_api_port: int = setting_field(9086, ge=0, le=65535)
    prefill_engine_num_gpu: int | None = None
    decode_engine_num_gpu: int | None = None

    profile_results_dir: str = "profiling_results"
    aic_interpolation: AicInterpolationSpec | None = None
    ais_perf_model: AisPerfModelSpec | None = None
    ttft_ms: float = setting_field(TTFT_MS, aliases=("ttft",))
    itl_ms: float = setting_field(ITL_MS, aliases=("itl",))

    load_predictor: Predictor = Predictor.ARIMA
    load_predictor_log1p: bool = False
    prophet_window_size: int = setting_field(50, gt=0)
    load_predictor_warmup_trace: str | None = None
    kalman_q_level: float = 1.0
    kalman_q_trend: float = 0.1
    kalman_r: float = 10.0
    kalman_min_points: int = 5

    metric_pulling_prometheus_endpoint: str = setting_field(PROMETHEUS, env="PROMETHEUS_ENDPOINT", is_dumped=False)
    metric_pulling_prometheus_token: str | None = setting_field(
        None, env="PROMETHEUS_TOKEN", is_secret=True, is_dumped=False
    )
    metric_pulling_prometheus_token_file: str | None = setting_field(None, env="PROMETHEUS_TOKEN_FILE", is_dumped=False)
    metric_pulling_prometheus_ssl_verify: bool = setting_field(False, env="PROMETHEUS_SSL_VERIFY", is_dumped=False)
    metric_pulling_prometheus_extra_query_params: dict[str, str] | None = setting_field(
        None, env="PROMETHEUS_EXTRA_QUERY_PARAMS", is_dumped=False
    )
    metric_pulling_prometheus_ca_bundle: str | None = setting_field(None, env="PROMETHEUS_CA_BUNDLE", is_dumped=False)
    metric_pulling_prometheus_request_timeout_seconds: float = setting_field(
        10.0, gt=0, env="DYN_PLANNER_PROMETHEUS_REQUEST_TIMEOUT_SECONDS", is_dumped=False
    )
    metric_reporting_prometheus_port: int = setting_field(0, env="PLANNER_PROMETHEUS_PORT")
    throughput_metrics_source: MetricsSource = MetricsSource.FRONTEND
    model_name: str | None = None
    global_planner_namespace: str | None = None

    max_num_fpm_samples: int = setting_field(64, gt=0)
    fpm_sample_bucket_size: int = setting_field(16, gt=0)
    """Number of buckets of the samples, a perfect square."""
    load_scaling_down_sensitivity: int = setting_field(80, ge=0, le=100)
    load_min_observations: int = 5
    prefill_scale_up_queue_tokens: int | None = setting_field(None, ge=0)
    prefill_scale_down_queue_tokens: int | None = setting_field(None, ge=0)
    decode_scale_up_kv_rate: float | None = setting_field(None, ge=0, le=100)
    """Percent of the KV cache."""
    decode_scale_down_kv_rate: float | None = setting_field(None, ge=0, le=100)
    speculative_nextn: int = setting_field(0, ge=0)
    """Speculative tokens per step, where the workers report none."""

    advisory: bool = False
    """Decide and report, but never scale."""
    enable_power_awareness: bool = False
    total_gpu_power_limit: int | None = setting_field(None, ge=1)
    """Watts."""

    report_interval_hours: float | None = 24.0
    report_output_dir: str = "./planner_reports"
    report_filename: str | None = None
    report_write_gzip_log: bool = True
    live_dashboard_port: int = 8080

    scheduling: SchedulingConfig = dataclasses.field(default_factory=SchedulingConfig)
    plugin_registration: PluginRegistrationConfig = dataclasses.field(default_factory=PluginRegistrationConfig)

    @property
    def prefill_floor(self) -> int:
        """Minimum number of prefill workers."""
        return self.min_endpoint if self.prefill_min_endpoint is None else self.prefill_min_endpoint

    @property
    def decode_floor(self) -> int:
        """Minimum number of decode or aggregated workers."""
        return self.min_endpoint if self.decode_min_endpoint is None else self.decode_min_endpoint

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, which `parse` accepts; without addresses and credentials of Prometheus."""
        return dump(self)


def parse(raw: Any) -> PlannerConfig:
    """Return the configuration of a JSON object, with all rules applied. Raise `ConfigError` in one line."""
    if isinstance(raw, PlannerConfig):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"configuration: {raw!r}: must be an object with named fields")
    if "aic_perf_model" in raw:
        raise ConfigError("aic_perf_model: no longer supported; use ais_perf_model.roles")
    given = dict(raw)
    scheduling = given.get("scheduling") or {}
    if "scheduling" in given and given["scheduling"] is None:
        del given["scheduling"]
    config = _with_target(read(PlannerConfig, given, allows_unknown=True))
    has_cadence = isinstance(scheduling, SchedulingConfig) or "scale_interval_seconds" in scheduling
    if not has_cadence:
        cadence = dataclasses.replace(config.scheduling, scale_interval_seconds=base_interval_s(config))
        config = dataclasses.replace(config, scheduling=cadence)
    check(config)
    return config


def _with_target(config: PlannerConfig) -> PlannerConfig:
    """Return the configuration with the scaling methods of its target: static thresholds allow load scaling only."""
    if config.scaling_policy is ScalingPolicy.FORECAST:
        return dataclasses.replace(config, enable_throughput_scaling=False, enable_load_scaling=True)
    if config.optimization_target is OptimizationTarget.SLA:
        return config
    return dataclasses.replace(config, enable_throughput_scaling=False, enable_load_scaling=True)


def adjustment_intervals_s(config: PlannerConfig) -> list[int]:
    """Return the intervals of the enabled scaling methods, in seconds."""
    load = [config.load_adjustment_interval_seconds] if config.enable_load_scaling else []
    throughput = [config.throughput_adjustment_interval_seconds] if config.enable_throughput_scaling else []
    return load + throughput


def base_interval_s(config: PlannerConfig) -> float:
    """Return the longest tick interval that divides the load interval and, if throughput scaling is on, its interval."""
    throughput = [config.throughput_adjustment_interval_seconds] if config.enable_throughput_scaling else []
    return float(math.gcd(config.load_adjustment_interval_seconds, *throughput))


def warnings(config: PlannerConfig) -> list[str]:
    """Return one line for each setting that has no effect or is probably a mistake."""
    found = []
    if config.optimization_target is not OptimizationTarget.SLA and (config.ttft_ms, config.itl_ms) != (
        TTFT_MS,
        ITL_MS,
    ):
        found.append(
            f"ttft_ms and itl_ms are ignored with optimization_target={config.optimization_target.value}; "
            "set optimization_target to sla to use them"
        )
    if config.enable_throughput_scaling and config.pre_deployment_sweeping_mode in (None, SweepMode.NONE):
        found.append(
            "enable_throughput_scaling without pre_deployment_sweeping_mode: no throughput decision is made until "
            "live forward passes suffice for a performance model"
        )
    if 0 <= config.max_gpu_budget < config.min_gpu_budget:
        found.append(
            f"min_gpu_budget {config.min_gpu_budget} exceeds max_gpu_budget {config.max_gpu_budget}: "
            "the maximum has precedence"
        )
    return found


def check(config: PlannerConfig) -> None:
    """Raise `ConfigError` for settings that contradict each other."""
    if config.scaling_policy is ScalingPolicy.FORECAST and config.optimization_target is not OptimizationTarget.SLA:
        raise ConfigError(
            f"optimization_target: {config.optimization_target.value}: must be sla with scaling_policy=forecast"
        )
    if not config.ttft_ms > 0:
        raise ConfigError(f"ttft_ms: {config.ttft_ms}: must be greater than 0")
    buckets = config.fpm_sample_bucket_size
    if math.isqrt(buckets) ** 2 != buckets:
        raise ConfigError(f"fpm_sample_bucket_size: {buckets}: must be a perfect square, such as 16")
    hours = config.report_interval_hours
    if hours is not None and not (math.isfinite(hours) and hours > 0):
        raise ConfigError(f"report_interval_hours: {hours}: must be a positive finite number, or null for no reports")
    if config.environment is DeployEnvironment.GLOBAL_PLANNER and not config.global_planner_namespace:
        raise ConfigError("global_planner_namespace: missing; required with environment=global-planner")
    _check_floors(config)
    _check_power(config)
    _check_models(config)
    _check_thresholds(config)
    _check_intervals(config)


def _check_floors(config: PlannerConfig) -> None:
    for name, value, allowed in (
        ("prefill_min_endpoint", config.prefill_min_endpoint, config.mode.scales_prefill),
        ("decode_min_endpoint", config.decode_min_endpoint, config.mode in (Mode.DISAGG, Mode.DECODE)),
    ):
        if value is not None and not allowed:
            raise ConfigError(f"{name}: {value}: must be null with mode={config.mode.value}; use min_endpoint")


def _check_power(config: PlannerConfig) -> None:
    if not config.enable_power_awareness:
        return
    if config.total_gpu_power_limit is None:
        raise ConfigError(
            "total_gpu_power_limit: missing; must be the watts of all GPUs with enable_power_awareness=true"
        )
    if config.environment is not DeployEnvironment.KUBERNETES:
        raise ConfigError(
            f"enable_power_awareness: true: must be false with environment={config.environment.value}; "
            "only kubernetes reports power limits"
        )
    if config.mode is Mode.AGG:
        raise ConfigError("enable_power_awareness: true: must be false with mode=agg")


def _check_models(config: PlannerConfig) -> None:
    if config.ais_perf_model is None:
        return
    required = {
        Mode.DISAGG: ("prefill", "decode"),
        Mode.AGG: ("aggregated",),
        Mode.PREFILL: ("prefill",),
        Mode.DECODE: ("decode",),
    }[config.mode]
    for role in required:
        if role not in {one.value for one in config.ais_perf_model.roles}:
            raise ConfigError(f"ais_perf_model.roles.{role}: missing; required with mode={config.mode.value}")


def _check_thresholds(config: PlannerConfig) -> None:
    if config.optimization_target is not OptimizationTarget.LOAD:
        return
    pairs = (
        (config.mode.scales_prefill, "prefill_scale_up_queue_tokens", "prefill_scale_down_queue_tokens"),
        (config.mode.scales_decode, "decode_scale_up_kv_rate", "decode_scale_down_kv_rate"),
    )
    for is_scaled, up_name, down_name in pairs:
        if not is_scaled:
            continue
        up, down = getattr(config, up_name), getattr(config, down_name)
        if up is None or down is None:
            missing = up_name if up is None else down_name
            raise ConfigError(f"{missing}: missing; optimization_target=load requires {up_name} and {down_name}")
        if up <= down:
            raise ConfigError(f"{up_name}: {up}: must be greater than {down_name} ({down})")


def _check_intervals(config: PlannerConfig) -> None:
    if not (config.enable_throughput_scaling or config.enable_load_scaling):
        raise ConfigError(
            "enable_throughput_scaling: false: must be true unless enable_load_scaling is; no scaling is enabled"
        )
    load, throughput = config.load_adjustment_interval_seconds, config.throughput_adjustment_interval_seconds
    if config.enable_throughput_scaling and config.enable_load_scaling and load >= throughput:
        raise ConfigError(
            f"load_adjustment_interval_seconds: {load}: must be less than "
            f"throughput_adjustment_interval_seconds ({throughput})"
        )
    base = config.scheduling.scale_interval_seconds
    for name, interval, is_used in (
        ("load_adjustment_interval_seconds", load, True),
        ("throughput_adjustment_interval_seconds", throughput, config.enable_throughput_scaling),
    ):
        if is_used and not is_multiple(interval, base):
            raise ConfigError(f"scheduling.scale_interval_seconds: {base:g}: must divide {name} ({interval}) evenly")


def is_multiple(value: float, base: float) -> bool:
    """Return whether `value` is a whole multiple of `base`, within the rounding of decimal intervals."""
    if not math.isfinite(base):
        return False
    ratio = Fraction(value) / Fraction(base)
    nearest = round(ratio)
    return nearest >= 1 and abs(ratio - nearest) <= INTERVAL_TOLERANCE * nearest
