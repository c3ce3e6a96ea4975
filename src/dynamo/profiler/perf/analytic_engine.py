"""Engine model: duration of prefill and decode steps of one engine, from its GPUs, its model and its parallelism.

A roofline: each part of a step takes the longer of its arithmetic and its memory traffic, at a share of the peak rates.
Communication between GPUs and a constant time per layer are added:

    step = layers x layer_s + step_s + linear layers + attention + communication

    linear layers:  max(2 x weights used x tokens / flops, bytes of the weights read / bandwidth)
    attention:      max(4 x heads x head size x context x tokens / flops, bytes of the cache read / bandwidth)
    communication:  two all-reduces per layer of a tensor-parallel engine, two exchanges between experts

The shares of the peaks and the constant times (`Efficiency`) are fitted to published measurements
(`dynamo.profiler.perf.efficiencies`), and corrected by a user's own (`dynamo.profiler.perf.calibration`). At small batches
the constants dominate.
"""

from dataclasses import dataclass, field, replace

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.gpus import GIB, GpuSpec
from dynamo.profiler.perf.model_shape import ModelShape

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that an engine uses, as vLLM's `--gpu-memory-utilization`."""
RUNTIME_BYTES = 2.0 * GIB
"""CUDA context, graphs, communication buffers and activations of a step, per GPU."""
ALL_REDUCE_S = 6e-6
"""Latency of one collective between the GPUs of a node."""
NODE_LINK_GB_S = 50.0
"""Bandwidth per GPU and direction between nodes: one 400 Gbit/s adapter per GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peak rates, and the constant times."""

    compute: float = 0.62
    """Share of the peak arithmetic rate in large matrix products."""
    memory: float = 0.75
    """Share of the peak memory bandwidth."""
    layer_s: float = 28e-6
    """Constant seconds per layer and step: kernel launches and synchronization."""
    step_s: float = 1.2e-3
    """Constant seconds per step: scheduling, sampling, input preparation."""
    expert_layer_s: float = 45e-6
    """Further seconds per layer with experts: routing, permutation, grouped products."""
    request_s: float = 12e-6
    """Seconds per running sequence and step."""
    prompt_s: float = 8e-3
    """Seconds per request outside of the engine's steps: HTTP, tokenization, scheduling, first response."""
    closed_prompts: float = 1.5
    """Prompts that are computed together when requests end in groups, as in a closed loop of equal answers."""
    closed_start: float = 0.05
    """Prompts that a request waits for on average per concurrent one, because all of a closed loop start at once."""

    def slowed(self, factor: float) -> "Efficiency":
        """Return efficiencies with which arithmetic, memory traffic and constant times take longer by a factor."""
        shares = {name: getattr(self, name) / factor for name in ("compute", "memory")}
        times = ("layer_s", "step_s", "expert_layer_s", "request_s", "prompt_s")
        return replace(self, **shares, **{name: getattr(self, name) * factor for name in times})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticEngine:
    """One engine: the GPUs of one replica. It implements `dynamo.mocker.simulation.timing.StepTimes`."""

    shape: ModelShape
    gpu: GpuSpec
    parallel: PickedParallelConfig = field(default_factory=PickedParallelConfig)
    efficiency: Efficiency = field(default_factory=Efficiency)
    gpus_per_node: int = 8

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.parallel.num_gpus

    @property
    def kv_dtype(self) -> str:
        """Return the type of cached values: `fp8`, or `auto` for that of the model."""
        return "fp8" if self.shape.kv_bits == 8 else "auto"

    def weight_bytes_per_gpu(self) -> float:
        """Return the bytes of weights on the GPU that has the most."""
        shape, parallel = self.shape, self.parallel
        bytes_per = shape.weight_bits / 8
        dense = shape.dense_params * bytes_per / parallel.tp
        routed = shape.routed_params * bytes_per / self._expert_ways()
        embeddings = shape.hidden * shape.vocab * (1 if shape.ties_embeddings else 2) * 2 / parallel.tp
        return (dense + routed) / parallel.pp + embeddings

    def kv_tokens(self) -> int:
        """Return the tokens that the caches of all data-parallel ranks have room for; zero or less if weights do not fit."""
        free = self.gpu.memory_gib * GIB * MEMORY_SHARE - RUNTIME_BYTES - self.weight_bytes_per_gpu()
        return int(free * self.parallel.pp / self._kv_bytes_per_gpu()) * self.parallel.dp

    def prefill_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Return the milliseconds to compute `new_tokens` prompt tokens of one rank after `context_tokens` cached ones."""
        if new_tokens == 0:
            return 0.0
        mean_context = context_tokens + new_tokens / 2
        return 1000 * self._step_s(new_tokens, new_tokens * mean_context, new_tokens + context_tokens, sequences=1)

    def decode_ms(self, context_tokens: int, capacity_tokens: int, sequences: int) -> float:
        """Return the milliseconds for one more token of each sequence of one rank, given its cached tokens that are read."""
        if sequences == 0:
            return 0.0
        return 1000 * self._step_s(sequences, context_tokens, context_tokens, sequences=sequences)

    def request_ms(self) -> float:
        """Return the milliseconds of a request outside of the engine's steps."""
        return 1000 * self.efficiency.prompt_s

    def _step_s(self, tokens: float, attended: float, cached: float, *, sequences: int) -> float:
        """Return the seconds of a step of `tokens` per rank that attend to `attended` (query, key) pairs in all."""
        parts = self.efficiency
        constant = (
            self.shape.layers * parts.layer_s
            + self.shape.expert_layers * parts.expert_layer_s
            + parts.step_s
            + sequences * parts.request_s
        )
        return constant + self._linear_s(tokens) + self._attention_s(attended, cached) + self._communication_s(tokens)

    def _linear_s(self, tokens: float) -> float:
        """Return the seconds of all matrix products with weights; pipeline stages follow each other."""
        shape, tp = self.shape, self.parallel.tp
        bytes_per = shape.weight_bits / 8
        dense = self._roof(2 * shape.dense_params * tokens / tp, shape.dense_params * bytes_per / tp, shape.weight_bits)
        output_tokens = min(tokens, 512.0)  # Only the last token of a prompt is projected to the vocabulary.
        output = shape.hidden * shape.vocab / tp
        dense += self._roof(2 * output * output_tokens, output * 2, 16.0)
        if shape.experts is None:
            return dense
        ways = self._expert_ways()
        all_tokens = tokens * self.parallel.dp
        share = shape.experts.per_token / shape.experts.count
        used = shape.experts.count * (1 - (1 - share) ** all_tokens)
        layer_params = shape.expert_layers * shape.expert_params
        flops = 2 * layer_params * shape.experts.per_token * all_tokens / ways
        return dense + self._roof(flops, layer_params * used * bytes_per / ways, shape.weight_bits)

    def _attention_s(self, attended: float, cached: float) -> float:
        shape, tp = self.shape, self.parallel.tp
        width = shape.head_dim
        if shape.latent is not None:
            width = shape.latent.kv_rank + shape.latent.rope_dim if attended == cached else shape.latent.nope_dim + 64
        flops = 4 * shape.layers * shape.heads * width * attended / tp
        return self._roof(flops, cached * self._kv_bytes_per_gpu(), 16.0)

    def _communication_s(self, tokens: float) -> float:
        shape, parallel = self.shape, self.parallel
        volume = tokens * shape.hidden * 2
        seconds = 0.0
        if parallel.tp > 1:
            one = ALL_REDUCE_S + 2 * (parallel.tp - 1) / parallel.tp * volume / self._link(parallel.tp)
            seconds += (2 * shape.layers - shape.expert_layers * (parallel.moe_ep > 1)) * one
        if shape.experts is not None and parallel.moe_ep > 1:
            sent = volume * shape.experts.per_token * (1 - 1 / parallel.moe_ep)
            if parallel.dp == 1:
                sent /= parallel.tp
            seconds += 2 * shape.expert_layers * (ALL_REDUCE_S + sent / self._link(parallel.moe_ep))
        if parallel.pp > 1:
            seconds += (parallel.pp - 1) * (ALL_REDUCE_S + volume / self._link(parallel.num_gpus))
        return seconds

    def _roof(self, flops: float, moved: float, bits: float) -> float:
        compute = flops / (self.gpu.tflops(bits) * 1e12 * self.efficiency.compute)
        return max(compute, moved / (self.gpu.bandwidth_gb_s * 1e9 * self.efficiency.memory))

    def _link(self, ways: int) -> float:
        inside = ways <= self.gpus_per_node
        return (
            (self.gpu.link_gb_s if inside else min(NODE_LINK_GB_S, self.gpu.link_gb_s)) * 1e9 * self.efficiency.memory
        )

    def _expert_ways(self) -> int:
        ways = self.parallel.moe_tp * self.parallel.moe_ep
        return ways if ways > 1 else self.parallel.tp

    def _kv_bytes_per_gpu(self) -> float:
        """Return the bytes of a cached token on one GPU: heads are split between GPUs, at most one copy of each per GPU."""
        if self.shape.latent is not None:
            return self.shape.kv_bytes_per_token
        return self.shape.kv_bytes_per_token / min(self.parallel.tp, self.shape.kv_heads)
