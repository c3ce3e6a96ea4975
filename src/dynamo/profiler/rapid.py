"""Rapid strategy: the best configuration by the performance model, without GPUs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.planner.config.planner_config import Mode
from dynamo.profiler.candidates import NODES_MAX, EngineFamily, candidates, smallest_that_fits
from dynamo.profiler.curves import DecodeCurve, PrefillCurve
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.efficiencies import EFFICIENCIES, BackendEfficiency
from dynamo.profiler.perf.gpus import GIB
from dynamo.profiler.perf.model_shape import ModelShape, UnsupportedModel, model_shape
from dynamo.profiler.search import Configuration, EngineChoice, SearchResult, search
from dynamo.profiler.spec import BACKENDS, ProfileSpec

DEFAULT_BACKEND = "vllm"
"""Backend of `auto` where the choice cannot be made by an estimate: vLLM serves the most models."""
OTHER_BACKEND_MARGIN = 1.15
"""By how much another backend must exceed the default one: smaller differences are within the error of the estimates."""
NAIVE_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedDeployment:
    """Result of a strategy."""

    config: Configuration
    backend: str
    prefill_engine: AnalyticEngine | None = None
    """Performance model of the picked engines; None if the model is not covered."""
    decode_engine: AnalyticEngine | None = None
    max_context: int
    is_met: bool = True
    """Whether the estimate is within the objectives."""
    warnings: tuple[str, ...] = ()
    curves: tuple[PrefillCurve, DecodeCurve] | None = None
    """Measured performance of the picked engines."""
    accuracy: BackendEfficiency | None = None
    """Error and origin of the estimate."""
    alternatives: tuple[Configuration, ...] = ()


def rapid(spec: ProfileSpec, config: Mapping[str, Any], stored_bytes: int | None = None) -> PickedDeployment:
    """Return the best deployment of a model given its `config.json`. Raise `ConfigError` if no allowed number of GPUs suffices.

    `stored_bytes`: the size of the model's weight files, for models that the performance model does not cover.
    """
    try:
        shape = model_shape(config, spec.model)
    except UnsupportedModel as error:
        backend = DEFAULT_BACKEND if spec.backend == "auto" else spec.backend
        return naive(spec, backend, str(error), stored_bytes)
    context = spec.traffic.isl + spec.traffic.osl
    if shape.max_context and context > shape.max_context:
        raise ConfigError(
            f"workload: isl {spec.traffic.isl} and osl {spec.traffic.osl}: must be at most "
            f"{shape.max_context} tokens together, the context of {spec.model}"
        )
    found = [_searched(spec, shape, backend) for backend in _backends(spec)]
    return max(found, key=lambda one: _preference(one, spec))


def _backends(spec: ProfileSpec) -> tuple[str, ...]:
    """Return the backends to search: all for `auto`, unless a planner is going to scale the deployment."""
    if spec.backend != "auto":
        return (spec.backend,)
    return (DEFAULT_BACKEND,) if spec.has_planner else BACKENDS


def _preference(one: PickedDeployment, spec: ProfileSpec) -> tuple[float, ...]:
    """Return the rank of a backend: objectives met, GPUs that a given load needs, and throughput with a margin of doubt."""
    margin = 1.0 if one.backend == DEFAULT_BACKEND else 1 / OTHER_BACKEND_MARGIN
    excess_gpus = max(0, one.config.gpus_needed - spec.total_gpus)
    used = one.config.gpus if spec.picking_mode == "load_match" else 0
    return (one.is_met, -excess_gpus, -used * (2 - margin), one.config.tokens_per_gpu * margin)


def _searched(spec: ProfileSpec, shape: ModelShape, backend: str) -> PickedDeployment:
    """Return the best deployment on one backend."""
    accuracy = EFFICIENCIES[backend]
    family = EngineFamily(shape=shape, gpu=spec.gpu, gpus_per_node=spec.gpus_per_node, efficiency=accuracy.efficiency)
    context = spec.traffic.isl + spec.traffic.osl
    engines = candidates(family, spec.total_gpus, context)
    is_aggregated_only = spec.planner is not None and spec.has_planner and spec.planner.mode is Mode.AGG
    found = search(
        engines,
        spec.traffic,
        spec.latency,
        spec.total_gpus,
        mode="default" if is_aggregated_only else spec.picking_mode,
        kinds=_kinds(spec, is_aggregated_only=is_aggregated_only),
    )
    if found is None:
        raise ConfigError(_does_not_fit(spec, family, context, engines))
    best = _one_of_each(found.best) if is_aggregated_only else found.best
    by_parallel = {engine.parallel: engine for engine in engines}
    decode = by_parallel[best.decode.parallel]
    return PickedDeployment(
        config=best,
        backend=backend,
        prefill_engine=decode if best.prefill is None else by_parallel[best.prefill.parallel],
        decode_engine=decode,
        max_context=shape.max_context or 2 * spec.traffic.isl,
        is_met=found.is_met,
        warnings=tuple(_warnings(spec, found)),
        alternatives=found.others,
        accuracy=accuracy,
    )


def naive(spec: ProfileSpec, backend: str, reason: str, stored_bytes: int | None) -> PickedDeployment:
    """Return aggregated engines on the fewest GPUs that have room for the weights; nothing is known about latencies."""
    if stored_bytes is None:
        raise ConfigError(f"model: {reason}; without weight files their size is unknown: give a directory or a volume")
    gpus = _gpus_for(spec, stored_bytes)
    if gpus is None or gpus > spec.total_gpus:
        raise ConfigError(
            f"hardware.totalGpus: {spec.total_gpus}: too few for {stored_bytes / GIB:.0f} GiB of weights on GPUs of "
            f"{spec.gpu.memory_gib:g} GiB"
        )
    inside = min(gpus, spec.gpus_per_node)
    parallel = PickedParallelConfig(tp=inside, pp=gpus // inside)
    replicas = max(1, spec.total_gpus // gpus)
    choice = EngineChoice(parallel=parallel, replicas=replicas, batch=NAIVE_BATCH)
    config = Configuration(prefill=None, decode=choice, ttft_ms=0.0, itl_ms=0.0, request_rate=0.0, osl=spec.traffic.osl)
    text = f"{reason}: tensor parallelism by memory only; {spec.latency.text()} is not verified"
    return PickedDeployment(config=config, backend=backend, max_context=2 * spec.traffic.isl, warnings=(text,))


def _gpus_for(spec: ProfileSpec, stored_bytes: int) -> int | None:
    gpus = 1
    while gpus <= spec.gpus_per_node * NODES_MAX:
        if stored_bytes / gpus <= spec.gpu.memory_gib * GIB * 0.8:
            return gpus
        gpus *= 2
    return None


def _kinds(spec: ProfileSpec, *, is_aggregated_only: bool) -> frozenset[bool]:
    """Return which kinds of deployment to consider: True is disaggregated."""
    if is_aggregated_only:
        return frozenset({False})
    return frozenset({True}) if spec.picking_mode == "autoscale" else frozenset({False, True})


def _one_of_each(one: Configuration) -> Configuration:
    rate = one.request_rate / one.decode.replicas
    return replace(one, decode=replace(one.decode, replicas=1), request_rate=rate)


def _warnings(spec: ProfileSpec, found: SearchResult) -> list[str]:
    best, lines = found.best, []
    if not found.is_met:
        nearest = f"TTFT {best.ttft_ms:.0f} ms, ITL {best.itl_ms:.1f} ms, end-to-end {best.e2e_ms:.0f} ms"
        lines.append(f"sla: {spec.latency.text()} is not attainable by the estimate; the nearest is {nearest}")
    if best.gpus_needed > spec.total_gpus:
        lines.append(
            f"hardware.totalGpus: {spec.total_gpus}: the load needs {best.gpus_needed} GPUs; {best.gpus} GPUs serve "
            f"{best.request_rate:.2f} requests/s"
        )
    return lines


def _does_not_fit(spec: ProfileSpec, family: EngineFamily, context: int, engines: list[AnalyticEngine]) -> str:
    gib = family.shape.weight_bytes / GIB
    what = f"{spec.model} has {gib:.0f} GiB of weights, and a request up to {context} tokens of cache"
    if engines:
        least = 2 * engines[0].gpus
        return f"hardware.totalGpus: {spec.total_gpus}: must be {least} or more for one prefill and one decode engine: {what}"
    larger = candidates(family, spec.gpus_per_node * NODES_MAX, context)
    if larger:
        return f"hardware.totalGpus: {spec.total_gpus}: must be {larger[0].gpus} or more on {spec.sku}: {what}"
    least_naive = smallest_that_fits(family, spec.gpus_per_node * NODES_MAX)
    hint = f"; {least_naive.num_gpus} GPUs have room for the weights alone" if least_naive else ""
    return f"hardware.gpuSku: {spec.sku}: no engine of up to {NODES_MAX} nodes fits: {what}{hint}; use a quantized model or other GPUs"
