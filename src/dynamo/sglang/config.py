"""SglangConfig: the flags of `python -m dynamo.sglang` that SGLang does not define; all others are SGLang's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, WorkerOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import build_parser, environ, from_namespace, option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported
from dynamo.sglang.controls import read_engine_route

PROG = "python -m dynamo.sglang"
MODES = {
    "null": DisaggregationMode.AGGREGATED,
    "agg": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}
FORWARD_PASS_VARIABLE = "DYN_FORWARDPASS_METRIC_PORT"  # noqa: S105 - the name of a variable
STORE_EVENTS_VARIABLE = "DYN_MOONCAKE_KV_EVENTS_ENDPOINT"
UNSUPPORTED_FLAGS = (
    *UNSUPPORTED_WORKER_FLAGS,
    UnsupportedFlag("--use-sglang-tokenizer", "DYN_SGL_USE_TOKENIZER", False),
    UnsupportedFlag("--gateway-workers", "DYN_SGL_GATEWAY_WORKERS", ""),
    UnsupportedFlag("--dedicated-mm-encoder", "DYN_SGL_DEDICATED_MM_ENCODER", False),
    UnsupportedFlag("--embedding-transfer-mode", "DYN_SGL_EMBEDDING_TRANSFER_MODE", "nixl-write"),
    UnsupportedFlag("--embedding-worker", "DYN_SGL_EMBEDDING_WORKER", False),
    UnsupportedFlag("--rerank-worker", "DYN_SGL_RERANK_WORKER", False),
    UnsupportedFlag("--image-diffusion-worker", "DYN_SGL_IMAGE_DIFFUSION_WORKER", False),
    UnsupportedFlag("--disagg-config", "DYN_SGL_DISAGG_CONFIG", ""),
    UnsupportedFlag("--disagg-config-key", "DYN_SGL_DISAGG_CONFIG_KEY", ""),
    UnsupportedFlag("--video-generation-worker", "DYN_SGL_VIDEO_GENERATION_WORKER", False),
    UnsupportedFlag("--frontend-decoding", "DYN_SGL_FRONTEND_DECODING", False),
    UnsupportedFlag("--sglang-trace-level", "SGLANG_TRACE_LEVEL", "2"),
)
"""Flags of upstream's SGLang worker that are refused unless they have their default value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig(WorkerOptions):
    """Options of an SGLang worker. All server arguments of SGLang are accepted too: see `sglang serve --help`."""

    disaggregation_mode: str | None = option(
        None,
        "--disaggregation-mode",
        None,
        "Phase of requests that this worker computes: null (both phases), prefill or decode",
        choices=tuple(MODES),
    )
    enable_multimodal: bool = option(
        False, "--enable-multimodal", "DYN_SGL_ENABLE_MULTIMODAL", "Accept images, videos and audio clips by URL"
    )
    enable_rl: bool = option(
        False, "--enable-rl", "DYN_SGL_ENABLE_RL", "Enable the trainers' routes: pause, resume and weight updates"
    )
    engine_routes: list[str] = option(
        [],
        "--engine-route",
        "DYN_SGLANG_ENGINE_ROUTES",
        "Method of SGLang to be called by POST /engine/<path>: <path>[=<method>][:engine|tm]",
    )

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        for text in self.engine_routes:
            try:
                read_engine_route(text)
            except InvalidArgument as error:
                raise ConfigError(f"--engine-route {text}: {error}") from None

    @property
    def role(self) -> DisaggregationMode:
        return MODES[self.disaggregation_mode or "null"]


def read_command_line(argv: Sequence[str]) -> tuple[SglangConfig, list[str]]:
    """Return the parsed options and the remaining arguments, which are SGLang's. Raise `ConfigError`."""
    variables = environ()
    kept = drop_unsupported(UNSUPPORTED_FLAGS, argv, variables, declared_flags(SglangConfig))
    parser = build_parser(SglangConfig, variables=variables, prog=PROG)
    parser.usage = "%(prog)s [options] [SGLang's server arguments]"
    namespace, rest = parser.parse_known_args(kept)
    return from_namespace(SglangConfig, namespace), rest


def engine_arguments(config: SglangConfig, rest: Sequence[str]) -> list[str]:
    """Return SGLang's command line: the given arguments, and the role, which SGLang and the worker both need."""
    role = config.role
    role_flags = [] if role is DisaggregationMode.AGGREGATED else ["--disaggregation-mode", role.value]
    return [*rest, *role_flags]


def wants_forward_passes(variables: Mapping[str, str]) -> bool:
    """Return whether the engine must publish its steps, which is enabled by setting the port, as for every engine."""
    return bool(variables.get(FORWARD_PASS_VARIABLE))
