"""VllmConfig: the flags of `python -m dynamo.vllm` that vLLM does not define; all others are vLLM's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.waiting import WAITING as SHARED_WAITING
from dynamo.core.config import build_parser, environ, from_namespace, option, setting
from dynamo.core.errors import ConfigError
from dynamo.core.waiting import declared_flags, without_waiting
from dynamo.vllm.library import Library
from dynamo.vllm.waiting import WAITING

PROG = "python -m dynamo.vllm"
FORWARD_PASS_PORT = 20380
FORWARD_PASS_VARIABLE = "DYN_FORWARDPASS_METRIC_PORT"  # noqa: S105 - the name of a variable
SCHEDULER = "dynamo.vllm.scheduler.ReportingScheduler"


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
    kept = without_waiting((*SHARED_WAITING, *WAITING), argv, variables, declared_flags(VllmConfig))
    parser = build_parser(VllmConfig, variables=variables, prog=PROG)
    parser.usage = "%(prog)s [options] [vLLM's engine arguments]"
    namespace, rest = parser.parse_known_args(kept)
    return from_namespace(VllmConfig, namespace), rest


def read_engine_args(library: Library, rest: Sequence[str]) -> Any:
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
