"""Specification of a profiling run: reading of a DynamoGraphDeploymentRequest's `spec`, defaults and rules. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import yaml

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig, SweepMode
from dynamo.planner.config.planner_config import parse as parse_planner
from dynamo.profiler.perf.gpus import GpuSpec, gpu_spec
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ModelCache, RequestSpec

ISL, OSL = 4000, 1000
TTFT_MS, ITL_MS = 2000.0, 30.0
CACHE_PATH = "/opt/model-cache"
BACKENDS = ("vllm", "sglang", "trtllm")
SKU_HELP = "hardware.gpuSku: missing; must be a GPU such as h200_sxm (the operator discovers it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTarget:
    """Requests that the deployment serves."""

    isl: int = ISL
    """Prompt tokens."""
    osl: int = OSL
    """Answer tokens."""
    concurrency: float | None = None
    request_rate: float | None = None
    """Requests per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """Latency objectives in milliseconds: TTFT and ITL, or the latency of the whole request."""

    ttft_ms: float | None = TTFT_MS
    itl_ms: float | None = ITL_MS
    e2e_ms: float | None = None
    prefers_latency: bool = False
    """Whether the lowest latency is preferred to the highest throughput (`optimizationType`)."""
    is_explicit: bool = False
    """Whether the request gives TTFT or ITL: only then the planner takes them over."""

    def met_by(self, ttft_ms: float, itl_ms: float, osl: int) -> bool:
        """Return whether latencies are within the objectives."""
        if self.e2e_ms is not None:
            return ttft_ms + itl_ms * max(0, osl - 1) <= self.e2e_ms
        return ttft_ms <= (self.ttft_ms or 0.0) and itl_ms <= (self.itl_ms or 0.0)

    def text(self) -> str:
        """Return the objectives in words."""
        if self.e2e_ms is not None:
            return f"end-to-end latency {self.e2e_ms:g} ms"
        return f"TTFT {self.ttft_ms:g} ms, ITL {self.itl_ms:g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A checked request, with all defaults."""

    model: str
    backend: str = "auto"
    image: str
    gpu: GpuSpec
    sku: str
    """Value of `hardware.gpuSku`."""
    gpus_per_node: int
    total_gpus: int
    traffic: TrafficTarget = field(default_factory=TrafficTarget)
    latency: LatencyTarget = field(default_factory=LatencyTarget)
    planner: PlannerConfig | None = None
    planner_fields: frozenset[str] = frozenset()
    """Names of the planner's settings that the request gives."""
    uses_kv_router: bool = False
    uses_mocker: bool = False
    is_thorough: bool = False
    runtime_version: str | None = None
    model_cache: ModelCache | None = None
    graph_override: KubeObject | None = None
    tolerations: tuple[KubeObject, ...] = ()
    trusts_remote_code: bool = False

    @property
    def has_planner(self) -> bool:
        """Return whether a planner scales the deployment."""
        return self.planner is not None and (self.planner.enable_throughput_scaling or self.planner.enable_load_scaling)

    @property
    def picking_mode(self) -> str:
        """Return how a configuration is chosen: `autoscale` with a planner, `load_match` for a given load, or `default`."""
        if self.has_planner:
            return "autoscale"
        if self.traffic.request_rate is not None or self.traffic.concurrency is not None:
            return "load_match"
        return "default"

    @property
    def sweep_mode(self) -> SweepMode:
        """Return where performance data come from: the planner's setting, otherwise the search strategy."""
        if self.planner is not None:
            return self.planner.pre_deployment_sweeping_mode or SweepMode.NONE
        return SweepMode.THOROUGH if self.is_thorough else SweepMode.RAPID

    @property
    def needs_curves(self) -> bool:
        """Return whether the mocker or the planner reads performance data of prefill and decode engines."""
        if self.uses_mocker:
            return True
        return (
            self.planner is not None
            and self.planner.enable_throughput_scaling
            and self.sweep_mode is not SweepMode.NONE
        )

    def model_path(self) -> str | None:
        """Return the directory of the model in the cache volume; None without one."""
        cache = self.model_cache
        if cache is None or not cache.pvc_name or not cache.pvc_model_path:
            return None
        return path_in_cache(cache)


def path_in_cache(cache: ModelCache) -> str:
    """Return the path of the model in containers. A path that begins with the mount path is one already."""
    mount = (cache.pvc_mount_path or CACHE_PATH).rstrip("/")
    path = (cache.pvc_model_path or "").strip().rstrip("/")
    if not path or path == mount or path.startswith(f"{mount}/"):
        return path or mount
    return f"{mount}/{path.lstrip('/')}"


def parse_text(text: str, name: str) -> Any:
    """Return the data of a JSON or YAML document. Raise `ConfigError`."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {name}: {' '.join(str(error).split())}") from None


def profile_spec(raw: Any) -> ProfileSpec:
    """Return the checked specification. Raise `ConfigError` in one line that names the field, its value and what is allowed."""
    if not isinstance(raw, Mapping):
        raise ConfigError("--config: must be an object, the `spec` of a DynamoGraphDeploymentRequest")
    if "spec" in raw and "model" not in raw:
        raise ConfigError("--config: is a whole resource; pass the object below its `spec`")
    _check_sku(raw)
    try:
        spec = msgspec.convert(raw, RequestSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--config: {error}") from None
    hardware = spec.hardware
    if not spec.image:
        raise ConfigError("image: missing; must be the profiler's image, from which the others are derived")
    if hardware is None or not hardware.gpu_sku:
        raise ConfigError(SKU_HELP)
    if not hardware.num_gpus_per_node or hardware.num_gpus_per_node <= 0:
        raise ConfigError(f"hardware.numGpusPerNode: {hardware.num_gpus_per_node}: must be a positive integer")
    total = hardware.total_gpus if hardware.total_gpus is not None else hardware.num_gpus_per_node
    if total <= 0:
        raise ConfigError(f"hardware.totalGpus: {total}: must be a positive integer")
    if hardware.vram_mb is not None and hardware.vram_mb <= 0:
        raise ConfigError(f"hardware.vramMb: {hardware.vram_mb:g}: must be positive, or null")
    features, overrides = spec.features, spec.overrides
    planner_raw = features.planner if features is not None else None
    found = ProfileSpec(
        model=spec.model,
        backend=spec.backend or "auto",
        image=spec.image,
        gpu=gpu_spec(hardware.gpu_sku, hardware.vram_mb),
        sku=hardware.gpu_sku,
        gpus_per_node=hardware.num_gpus_per_node,
        total_gpus=total,
        traffic=_traffic(spec),
        latency=_latency(raw.get("sla"), spec),
        planner=None if planner_raw is None else _planner(planner_raw),
        planner_fields=frozenset(planner_raw or ()),
        uses_kv_router=bool(features and features.kv_router and features.kv_router.enabled),
        uses_mocker=bool(features and features.mocker and features.mocker.enabled),
        is_thorough=spec.search_strategy == "thorough",
        runtime_version=spec.runtime_version_override,
        model_cache=spec.model_cache,
        graph_override=overrides.dgd if overrides else None,
        tolerations=_tolerations(overrides.profiling_job if overrides else None),
        trusts_remote_code=bool(overrides and overrides.trust_remote_code),
    )
    _check(found)
    return found


def _check_sku(raw: Mapping[str, Any]) -> None:
    hardware = raw.get("hardware")
    if isinstance(hardware, Mapping) and isinstance(hardware.get("gpuSku"), str):
        gpu_spec(hardware["gpuSku"])  # Its error lists the values.


def _planner(raw: KubeObject) -> PlannerConfig:
    try:
        return parse_planner(raw)
    except ConfigError as error:
        raise ConfigError(f"features.planner.{error}") from None


def _traffic(spec: RequestSpec) -> TrafficTarget:
    given = spec.workload
    if given is None:
        return TrafficTarget()
    if given.concurrency is not None and given.request_rate is not None:
        raise ConfigError(
            f"workload: concurrency {given.concurrency:g} and requestRate {given.request_rate:g}: only one of them is allowed"
        )
    found = TrafficTarget(
        isl=ISL if given.isl is None else given.isl,
        osl=OSL if given.osl is None else given.osl,
        concurrency=given.concurrency,
        request_rate=given.request_rate,
    )
    for name, value in (
        ("isl", found.isl),
        ("osl", found.osl),
        ("concurrency", found.concurrency),
        ("requestRate", found.request_rate),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"workload.{name}: {value:g}: must be positive")
    return found


def _latency(raw: Any, spec: RequestSpec) -> LatencyTarget:
    given = spec.sla
    if given is None:
        return LatencyTarget()
    fields = raw if isinstance(raw, Mapping) else {}
    prefers_latency = given.optimization_type == "latency"
    for name, value in (("ttft", given.ttft), ("itl", given.itl), ("e2eLatency", given.e2e_latency)):
        if value is not None and not value > 0:
            raise ConfigError(f"sla.{name}: {value:g}: must be positive milliseconds")
    if given.e2e_latency is not None:
        if given.ttft is not None or given.itl is not None:
            others = [
                f"{name} {value:g}" for name, value in (("ttft", given.ttft), ("itl", given.itl)) if value is not None
            ]
            raise ConfigError(
                f"sla: e2eLatency {given.e2e_latency:g} and {' and '.join(others)} are mutually exclusive; remove one of them"
            )
        return LatencyTarget(ttft_ms=None, itl_ms=None, e2e_ms=given.e2e_latency, prefers_latency=prefers_latency)
    ttft_ms = given.ttft if "ttft" in fields else TTFT_MS
    itl_ms = given.itl if "itl" in fields else ITL_MS
    if ttft_ms is None or itl_ms is None:
        raise ConfigError("sla: needs both ttft and itl, or e2eLatency")
    is_explicit = "ttft" in fields or "itl" in fields
    return LatencyTarget(ttft_ms=ttft_ms, itl_ms=itl_ms, prefers_latency=prefers_latency, is_explicit=is_explicit)


def _tolerations(job: KubeObject | None) -> tuple[KubeObject, ...]:
    """Return the tolerations of the profiling job, which the generated pods get too."""
    found: Any = job
    for name in ("template", "spec", "tolerations"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return tuple(one for one in found if isinstance(one, dict)) if isinstance(found, list) else ()


def _check(spec: ProfileSpec) -> None:
    if spec.is_thorough and spec.backend == "auto":
        raise ConfigError(
            f"backend: auto: must be {', '.join(BACKENDS)} with searchStrategy=thorough, which measures one engine"
        )
    if spec.uses_mocker and spec.planner is not None and spec.sweep_mode is SweepMode.NONE:
        raise ConfigError(
            "features.planner.pre_deployment_sweeping_mode: none: must be rapid or thorough with features.mocker, whose "
            "workers simulate the profiled engine"
        )
