"""Candidates: parallelizations of an engine that a model allows and that fit its GPUs' memory. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import MEMORY_SHARE, RUNTIME_BYTES, AnalyticEngine, Efficiency
from dynamo.profiler.perf.gpus import GIB, GpuSpec
from dynamo.profiler.perf.model_shape import ModelShape

EXPERT_NODES_MAX = 4
"""Nodes of one engine of a mixture of experts; other engines stay on one node unless the model does not fit."""
NODES_MAX = 8
TENSOR_PARALLEL_EXPERTS = frozenset({"Qwen3MoeForCausalLM", "Qwen3MoeForConditionalGeneration"})
"""Architectures whose experts are also measured with tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFamily:
    """Everything that the engines of one search have in common."""

    shape: ModelShape
    gpu: GpuSpec
    gpus_per_node: int
    efficiency: Efficiency = field(default_factory=Efficiency)

    def engine(self, parallel: PickedParallelConfig) -> AnalyticEngine:
        """Return the model of an engine."""
        return AnalyticEngine(
            shape=self.shape,
            gpu=self.gpu,
            parallel=parallel,
            efficiency=self.efficiency,
            gpus_per_node=self.gpus_per_node,
        )


def candidates(family: EngineFamily, max_gpus: int, context: int, *, is_measured: bool = False) -> list[AnalyticEngine]:
    """Return the engines of at most `max_gpus` GPUs whose cache has room for one sequence of `context` tokens, smallest first.

    `is_measured`: leave out what released sweeps do not deploy: copies of KV heads, and experts in tensor parallelism
    except for some architectures.
    """
    found = []
    for parallel in _parallelizations(family, max_gpus, is_measured=is_measured):
        engine = family.engine(parallel)
        if _divides(engine, is_strict=is_measured) and engine.kv_tokens() // parallel.dp >= context:
            found.append(engine)
    return found


def smallest_that_fits(family: EngineFamily, max_gpus: int) -> PickedParallelConfig | None:
    """Return the tensor parallelism with the fewest GPUs whose memory has room for the weights; None if none has.

    The naive choice: it ignores the cache and all rules of divisibility.
    """
    usable = family.gpu.memory_gib * GIB * MEMORY_SHARE - RUNTIME_BYTES
    for gpus in _powers(max_gpus):
        if family.shape.weight_bytes / gpus <= usable * 0.9:
            inside = min(gpus, family.gpus_per_node)
            return PickedParallelConfig(tp=inside, pp=gpus // inside)
    return None


def _parallelizations(family: EngineFamily, max_gpus: int, *, is_measured: bool) -> Iterator[PickedParallelConfig]:
    node = family.gpus_per_node
    if not family.shape.is_moe:
        for gpus in _powers(min(max_gpus, node * NODES_MAX)):
            inside = min(gpus, node)
            yield PickedParallelConfig(tp=inside, pp=gpus // inside)
        return
    allows_tensor = not is_measured or family.shape.architecture in TENSOR_PARALLEL_EXPERTS
    for gpus in _powers(min(max_gpus, node * EXPERT_NODES_MAX)):
        if gpus == 1:
            yield PickedParallelConfig()
            continue
        if gpus <= node:
            yield PickedParallelConfig(tp=gpus, moe_ep=gpus)
            if allows_tensor:
                yield PickedParallelConfig(tp=gpus, moe_tp=gpus)
        elif not is_measured:
            yield PickedParallelConfig(tp=node, pp=gpus // node, moe_ep=node)
        yield PickedParallelConfig(tp=1, dp=gpus, moe_ep=gpus)


def _divides(engine: AnalyticEngine, *, is_strict: bool) -> bool:
    """Return whether heads, experts and the width of the MLP can be divided; small models may have copies of KV heads."""
    shape, parallel = engine.shape, engine.parallel
    tp = parallel.tp
    if shape.heads % tp:
        return False
    if shape.latent is None and shape.kv_heads % tp and (is_strict or tp % shape.kv_heads):
        return False
    if shape.layers % parallel.pp and is_strict:
        return False
    if shape.experts is None:
        return _splits(shape.intermediate, tp, shape.quant_block)
    if parallel.moe_ep > 1:
        return shape.experts.count % parallel.moe_ep == 0
    return _splits(shape.experts.intermediate, max(tp, parallel.moe_tp), shape.quant_block)


def _splits(width: int, ways: int, block: int) -> bool:
    return width % ways == 0 and (ways == 1 or (width // ways) % block == 0)


def _powers(limit: int) -> Iterator[int]:
    gpus = 1
    while gpus <= limit:
        yield gpus
        gpus *= 2
