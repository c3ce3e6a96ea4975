"""Settings of `dynamo recommend`."""

from dataclasses import dataclass
from pathlib import Path

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.profiler.perf.gpus import GpuSpec, gpu_spec
from dynamo.profiler.recommend.points import parallel_of
from dynamo.profiler.spec import BACKENDS, LatencyTarget
from dynamo.replay.load import ReplaySession
from dynamo.replay.synthetic import Shape, sessions
from dynamo.replay.trace import read

KV_DTYPES = ("auto", "fp8", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendConfig:
    """Recommends a deployment of a model for a workload and latency objectives, by simulation."""

    model: str | None = option(None, "model", None, "Directory of the model, or its name on the Hugging Face hub")
    gpu: str | None = option(None, "--gpu", None, "GPU, such as h200_sxm (required)")
    gpus: int = option(8, "--gpus", None, "Number of GPUs that may be used")
    gpus_per_node: int | None = option(
        None, "--gpus-per-node", None, "GPUs of one node; default: that of the GPU's usual server"
    )
    backend: str = option("vllm", "--backend", None, "Engine", choices=BACKENDS)
    isl: int = option(3000, "--isl", None, "Prompt tokens of generated requests")
    osl: int = option(300, "--osl", None, "Answer tokens of generated requests")
    request_rate: float | None = option(None, "--request-rate", None, "Generated requests per second, at random times")
    prefix_share: float = option(
        0.0, "--prefix-share", None, "Share of a generated prompt that it has in common with its group, 0 to 1"
    )
    prefix_groups: int = option(8, "--prefix-groups", None, "Groups of generated prompts with a common beginning")
    trace: str | None = option(None, "--trace", None, "Mooncake trace (JSONL, also gzip) instead of generated requests")
    requests: int = option(1000, "--requests", None, "Requests to simulate, the first ones of a trace")
    ttft: float = option(2000.0, "--ttft", None, "Objective: time to first token in milliseconds")
    itl: float = option(30.0, "--itl", None, "Objective: inter-token latency in milliseconds")
    sla_share: float = option(0.95, "--sla-share", None, "Share of requests that must meet both objectives, 0 to 1")
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        None,
        "Type of cached values: the model's, fp8 (answers may change), or search: both",
        choices=KV_DTYPES,
    )
    planner_presets: bool = option(
        True, "--planner-presets", None, "Simulate a planner too, if the load lasts 10 minutes or longer"
    )
    startup_time: float = option(120.0, "--startup-time", None, "Seconds until an engine that a planner adds is ready")
    points: list[str] = option(
        [],
        "--points",
        None,
        "Measurements that correct the estimate: closed loops as JSON, an export of aiperf or its directory, or a forward-pass trace",
        metavar="FILE",
    )
    points_parallel: str = option(
        "",
        "--points-parallel",
        None,
        "Parallelism of the measured engine, such as tp=4,pp=2, for files that do not contain it",
        metavar="AXIS=N",
    )
    image: str = option(
        "nvcr.io/nvidia/ai-dynamo/dynamo-planner:1.6.1",
        "--image",
        None,
        "Image from which those of the graph are derived",
    )
    output_dir: str = option("recommendation", "--output-dir", None, "Folder of results")
    seed: int = option(42, "--seed", None, "Seed of generated requests")

    def __post_init__(self) -> None:
        if self.model is None:
            raise ConfigError("model is missing: pass its directory or its name on the Hugging Face hub")
        if self.gpu is None:
            raise ConfigError("--gpu: missing; must be a GPU such as h200_sxm")
        gpu = gpu_of(self.gpu)
        if self.kv_cache_dtype != "auto" and gpu.tflops_8 is None:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}: must be auto: {gpu.sku} has no 8-bit arithmetic"
            )
        if self.trace is None and self.request_rate is None:
            raise ConfigError("--request-rate: missing; pass it, or --trace with a recorded load")
        if self.trace is not None and self.request_rate is not None:
            raise ConfigError(
                f"--request-rate {self.request_rate:g}: not allowed with --trace, which has its own times"
            )
        for flag, value in (
            ("--gpus", self.gpus),
            ("--isl", self.isl),
            ("--osl", self.osl),
            ("--requests", self.requests),
            ("--request-rate", self.request_rate),
            ("--ttft", self.ttft),
            ("--itl", self.itl),
            ("--gpus-per-node", self.gpus_per_node),
            ("--startup-time", self.startup_time),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} {value:g}: must be more than 0")
        parallel_of(self.points_parallel, "--points-parallel")
        for flag, share in (("--sla-share", self.sla_share), ("--prefix-share", self.prefix_share)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{flag} {share:g}: must be from 0 to 1")

    @property
    def latency(self) -> LatencyTarget:
        """Return the objectives."""
        return LatencyTarget(ttft_ms=self.ttft, itl_ms=self.itl)

    def load(self) -> list[ReplaySession]:
        """Return the requests to simulate. Raise `ConfigError` for a trace that cannot be read."""
        if self.trace is not None:
            if not Path(self.trace).is_file():
                raise ConfigError(f"--trace {self.trace}: no such file")
            return read([self.trace])[: self.requests]
        shape = Shape(
            input_tokens=self.isl,
            output_tokens=self.osl,
            requests=self.requests,
            request_rate=self.request_rate,
            shared_prefix_ratio=self.prefix_share,
            prefix_groups=self.prefix_groups if self.prefix_share else 0,
            seed=self.seed,
        )
        return sessions(shape)


def gpu_of(sku: str) -> GpuSpec:
    """Return a GPU's specification. Raise `ConfigError` for an unknown one."""
    try:
        return gpu_spec(sku)
    except ConfigError as error:
        raise ConfigError(str(error).replace("hardware.gpuSku:", "--gpu", 1)) from None
