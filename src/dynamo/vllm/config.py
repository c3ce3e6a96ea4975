"""VllmConfig: the flags of `python -m dynamo.vllm` that vLLM does not define; all others are vLLM's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import build_parser, environ, from_namespace, option, setting
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported
from dynamo.vllm.library import VllmLibrary

PROG = "python -m dynamo.vllm"
FORWARD_PASS_PORT = 20380
FORWARD_PASS_VARIABLE = "DYN_FORWARDPASS_METRIC_PORT"  # noqa: S105 - the name of a variable
SCHEDULER = "dynamo.vllm.scheduler.ReportingScheduler"
UNSUPPORTED_FLAGS = (
    *UNSUPPORTED_WORKER_FLAGS,
    UnsupportedFlag("--use-vllm-tokenizer", "DYN_VLLM_USE_TOKENIZER", False),
    UnsupportedFlag("--route-to-encoder", "DYN_VLLM_ROUTE_TO_ENCODER", False),
    UnsupportedFlag("--mm-prompt-template", "DYN_VLLM_MM_PROMPT_TEMPLATE", "USER: <image>\n<prompt> ASSISTANT:"),
    UnsupportedFlag("--frontend-decoding", "DYN_VLLM_FRONTEND_DECODING", False),
    UnsupportedFlag("--custom-encoder-class", "DYN_CUSTOM_ENCODER_CLASS", ""),
    UnsupportedFlag("--embedding-transfer-mode", "DYN_VLLM_EMBEDDING_TRANSFER_MODE", "nixl-write"),
    UnsupportedFlag("--embedding-frontend-tokenization", "DYN_VLLM_EMBEDDING_FRONTEND_TOKENIZATION", False),
    UnsupportedFlag("--embedding-worker-processes", "DYN_VLLM_EMBEDDING_WORKER_PROCESSES", "1"),
    UnsupportedFlag("--realtime", "DYN_VLLM_REALTIME", False),
    UnsupportedFlag("--classify-worker", "DYN_VLLM_CLASSIFY_WORKER", False),
    UnsupportedFlag("--model-express-url", "MODEL_EXPRESS_URL", ""),
    UnsupportedFlag("--gms-shadow-mode", "DYN_VLLM_GMS_SHADOW_MODE", False),
    UnsupportedFlag("--benchmark-mode", "DYN_BENCHMARK_MODE", ""),
    UnsupportedFlag("--benchmark-points-file", "DYN_BENCHMARK_POINTS_FILE", ""),
    UnsupportedFlag("--prefill-max-new-token-samples", "DYN_PREFILL_MAX_NEW_TOKEN_SAMPLES", "64"),
    UnsupportedFlag("--prefill-max-kv-read-token-samples", "DYN_PREFILL_MAX_KV_READ_TOKEN_SAMPLES", "16"),
    UnsupportedFlag("--decode-max-kv-read-token-samples", "DYN_DECODE_MAX_KV_READ_TOKEN_SAMPLES", "128"),
    UnsupportedFlag("--decode-max-batch-size-samples", "DYN_DECODE_MAX_BATCH_SIZE_SAMPLES", "128"),
    UnsupportedFlag("--prefix-max-batch-size-samples", "DYN_PREFIX_MAX_BATCH_SIZE_SAMPLES", "3"),
    UnsupportedFlag("--benchmark-prefill-granularity", "DYN_BENCHMARK_PREFILL_GRANULARITY", ""),
    UnsupportedFlag("--benchmark-prefill-kv-read-granularity", "DYN_BENCHMARK_PREFILL_KV_READ_GRANULARITY", ""),
    UnsupportedFlag("--benchmark-prefill-batch-granularity", "DYN_BENCHMARK_PREFILL_BATCH_GRANULARITY", ""),
    UnsupportedFlag("--benchmark-decode-length-granularity", "DYN_BENCHMARK_DECODE_LENGTH_GRANULARITY", ""),
    UnsupportedFlag("--benchmark-decode-batch-granularity", "DYN_BENCHMARK_DECODE_BATCH_GRANULARITY", ""),
    UnsupportedFlag("--benchmark-randomize-kda-state", "DYN_BENCHMARK_RANDOMIZE_KDA_STATE", False),
    UnsupportedFlag("--benchmark-hybrid-live-state", "DYN_BENCHMARK_HYBRID_LIVE_STATE", False),
    UnsupportedFlag("--benchmark-warmup-iterations", "DYN_BENCHMARK_WARMUP_ITERATIONS", "5"),
    UnsupportedFlag("--benchmark-output-path", "DYN_BENCHMARK_OUTPUT_PATH", "/tmp/benchmark_results.json"),  # noqa: S108
    UnsupportedFlag("--benchmark-collect-imbalanced", "DYN_BENCHMARK_COLLECT_IMBALANCED", False),
    UnsupportedFlag("--benchmark-timeout", "DYN_BENCHMARK_TIMEOUT", "900"),
    UnsupportedFlag("--benchmark-max-batch-size", "DYN_BENCHMARK_MAX_BATCH_SIZE", ""),
)
"""Flags of upstream's vLLM worker that are refused unless they have their default value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(DisaggregatedOptions):
    """Options of a vLLM worker. All engine arguments of vLLM are accepted too: see `vllm serve --help=all`."""

    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        "DYN_VLLM_DISAGGREGATION_MODE",
        "Phase of requests that this worker computes: agg (both phases), prefill or decode",
        choices=("agg", "prefill", "decode"),
    )
    headless: bool = option(
        False,
        "--headless",
        "DYN_VLLM_HEADLESS",
        "Compute for a head node on another machine without serving an endpoint",
    )
    embedding_worker: bool = option(
        False, "--embedding-worker", "DYN_VLLM_EMBEDDING_WORKER", "Serve embeddings (/v1/embeddings) instead of text"
    )
    enable_multimodal: bool = option(
        False, "--enable-multimodal", "DYN_VLLM_ENABLE_MULTIMODAL", "Accept images, videos and audio clips by URL"
    )
    enable_rl: bool = option(
        False, "--enable-rl", "DYN_ENABLE_RL", "Enable the trainers' routes: pause, resume and weight updates"
    )

    def __post_init__(self) -> None:
        DisaggregatedOptions.__post_init__(self)
        if self.embedding_worker and self.role is not DisaggregationMode.AGGREGATED:
            raise ConfigError(f"--embedding-worker with --disaggregation-mode {self.role.value}: must be agg")


def read_command_line(argv: Sequence[str]) -> tuple[VllmConfig, list[str]]:
    """Return the parsed options and the remaining arguments, which are vLLM's. Raise `ConfigError`."""
    variables = environ()
    kept = drop_unsupported(UNSUPPORTED_FLAGS, argv, variables, declared_flags(VllmConfig))
    parser = build_parser(VllmConfig, variables=variables, prog=PROG)
    parser.usage = "%(prog)s [options] [vLLM's engine arguments]"
    namespace, rest = parser.parse_known_args(kept)
    return from_namespace(VllmConfig, namespace), rest


def read_engine_args(library: VllmLibrary, rest: Sequence[str]) -> Any:
    """Return vLLM's `AsyncEngineArgs`. Raise `ConfigError` with vLLM's error text."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(message.split())} (vLLM engine argument; other flags: {PROG} --help)")

    parser = library.FlexibleArgumentParser(prog=PROG, add_help=False)
    parser = library.AsyncEngineArgs.add_cli_args(parser)
    parser.error = refuse
    return library.AsyncEngineArgs.from_cli_args(parser.parse_args(list(rest)))


def wants_forward_passes(variables: Mapping[str, str]) -> bool:
    """Return whether the scheduler must publish its steps, which is enabled by setting the port."""
    return bool(variables.get(FORWARD_PASS_VARIABLE))


def forward_pass_port() -> int:
    """Return the port at which the scheduler of rank 0 publishes its steps; other ranks use the following ports."""
    return setting(FORWARD_PASS_VARIABLE, FORWARD_PASS_PORT, int)
