"""The frontend's flags as an argparse group, for programs that extend it."""

import argparse
import math
import os
import pathlib
from typing import Any

from dynamo import __version__
from dynamo.backend.config import WorkerOptions
from dynamo.common.config_dump import register_encoder
from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.flags import Flag, add_flags, declared
from dynamo.common.configuration.groups.ais_perf_args import AisPerfArgGroup, AisPerfConfigBase
from dynamo.common.configuration.groups.kv_router_args import (
    CONDITIONAL_DISAGG_POLICY_CHOICES,
    CONDITIONAL_FLAG,
    KvRouterArgGroup,
    KvRouterConfigBase,
    check_indexer_and_model,
)
from dynamo.common.configuration.groups.router_args import RouterArgGroup, RouterConfigBase
from dynamo.common.configuration.groups.runtime_args import TLS_FLAGS, TRANSPORTS
from dynamo.common.configuration.utils import env_or_default, parse_bool
from dynamo.core.errors import ConfigError
from dynamo.frontend.config import FrontendConfig as OwnConfig
from dynamo.routing.settings import AFFINITY_TTL_MAX_S

U32_MAX = 2**32 - 1


def validate_model_name(value: str) -> str:
    """Return a model's name without blanks at its ends. Raise `argparse.ArgumentTypeError` if nothing is left."""
    name = (value or "").strip()
    if not name:
        raise argparse.ArgumentTypeError(f"model-name {value!r}: must not be blank")
    return name


def validate_model_path(value: str) -> str:
    """Return the path of a directory. Raise `argparse.ArgumentTypeError` for another path."""
    if os.path.isdir(value):
        return value
    raise argparse.ArgumentTypeError(f"model-path {value!r}: no such directory")


CHANGES: dict[str, dict[str, Any]] = {
    **TRANSPORTS,
    "--tls-cert-path": {"type": pathlib.Path},
    "--tls-key-path": {"type": pathlib.Path},
    "--tls-client-ca-cert-path": {"type": pathlib.Path},
    "--model-name": {"type": validate_model_name},
    "--model-path": {"type": validate_model_path},
    "--dyn-debug-perf": {"dest": "debug_perf"},
    "--dyn-preprocess-workers": {"dest": "preprocess_workers"},
    "--tokenizer": {"dest": "tokenizer_backend"},
    "--tokenizer-fallback": {"env_type": parse_bool},
    "--frontend-route-extension": {"default": [], "dest": "frontend_route_extensions", "extra": {"action": "append"}},
}
"""What differs from the declarations of `dynamo.frontend.config`."""
# fmt: off
FLAGS = (
    *declared(OwnConfig, [
        "--namespace", "--namespace-prefix", "--kv-cache-block-size", "--http-host", "--http-port", "--serve-indexer",
        "--tls-cert-path", "--tls-key-path", "--tls-client-ca-cert-path", *(flag.name for flag in TLS_FLAGS),
        "--migration-limit", "--migration-max-seq-len", "--model-name", "--model-path", "--metrics-prefix",
        "--kserve-grpc-server", "--grpc-metrics-port", "--dump-config-to", "--frontend-route-extension", *TRANSPORTS,
        "--request-plane", "--enable-anthropic-api", "--strip-anthropic-preamble", "--enable-streaming-tool-dispatch",
        "--enable-streaming-reasoning-dispatch", "--reasoning-field-name", "--dyn-debug-perf", "--dyn-preprocess-workers",
        "--tokenizer", "--tokenizer-fallback", "--trust-remote-code"], CHANGES),
    *declared(WorkerOptions, ["--exclude-tools-when-tool-choice-none"]),
    Flag("--dyn-chat-processor", "DYN_CHAT_PROCESSOR", "dynamo", "Renderer of chats and parser of responses",
        dest="chat_processor", choices=("dynamo", "vllm", "sglang")),
)
# fmt: on


class FrontendConfig(RouterConfigBase, KvRouterConfigBase, AisPerfConfigBase):
    """Settings of the frontend."""

    interactive: bool
    kv_cache_block_size: int | None
    http_host: str
    http_port: int
    tls_cert_path: pathlib.Path | None
    tls_key_path: pathlib.Path | None
    tls_client_ca_cert_path: pathlib.Path | None
    tcp_tls_cert_path: str | None = None
    tcp_tls_key_path: str | None = None
    tcp_tls_ca_cert_path: str | None = None
    tcp_tls_client_cert_path: str | None = None
    tcp_tls_client_key_path: str | None = None
    tcp_tls_client_ca_cert_path: str | None = None
    nats_tls_ca_cert_path: str | None = None
    nats_tls_insecure: bool = False
    nats_tls_client_cert_path: str | None = None
    nats_tls_client_key_path: str | None = None
    namespace: str | None = None
    namespace_prefix: str | None = None
    migration_limit: int
    migration_max_seq_len: int | None
    model_name: str | None
    model_path: str | None
    metrics_prefix: str | None = None
    kserve_grpc_server: bool
    grpc_metrics_port: int
    dump_config_to: str | None
    discovery_backend: str
    request_plane: str
    response_plane: str = "tcp"
    event_plane: str | None = None
    chat_processor: str
    enable_anthropic_api: bool
    strip_anthropic_preamble: bool
    debug_perf: bool
    enable_streaming_tool_dispatch: bool
    enable_streaming_reasoning_dispatch: bool
    reasoning_field_name: str
    exclude_tools_when_tool_choice_none: bool
    preprocess_workers: int
    tokenizer_backend: str
    tokenizer_fallback: bool
    trust_remote_code: bool
    frontend_route_extensions: list[str]

    def validate(self) -> None:
        """Apply the presets and raise `ValueError` for a value out of range or flags that contradict each other."""
        if self.load_aware:
            self.router_mode = "kv"
        self.apply_router_config()
        self._validate_server()
        self._validate_ranges()
        self._validate_router()
        self._validate_conditional_disagg()
        self.validate_rejection_thresholds()
        self.log_rejection_thresholds()

    def _validate_server(self) -> None:
        pair = (self.tls_cert_path, self.tls_key_path)
        if None in pair:
            if pair != (None, None):
                raise ConfigError("--tls-cert-path and --tls-key-path: set both or none")
            if self.tls_client_ca_cert_path is not None:
                raise ConfigError("--tls-client-ca-cert-path requires --tls-cert-path and --tls-key-path")
        for flag, is_set in (("--interactive", self.interactive), ("--kserve-grpc-server", self.kserve_grpc_server)):
            if is_set and self.frontend_route_extensions:
                raise ConfigError(f"--frontend-route-extension requires the HTTP server, which {flag} replaces")
        tokenizers = next(flag.choices for flag in FLAGS if flag.name == "--tokenizer") or ()
        if self.tokenizer_backend not in tokenizers:  # A variable is not checked by argparse.
            raise ConfigError(f"--tokenizer {self.tokenizer_backend}: expected {' or '.join(tokenizers)}")

    def _validate_ranges(self) -> None:
        ranges = {
            "--migration-limit": (self.migration_limit, 0, U32_MAX),
            "--migration-max-seq-len": (self.migration_max_seq_len, 1, U32_MAX),
            "--router-session-affinity-ttl-secs": (self.session_affinity_ttl_secs, 1, AFFINITY_TTL_MAX_S),
            "--router-min-initial-workers": (self.min_initial_workers, 0, U32_MAX),
        }
        for flag, (value, low, high) in ranges.items():
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} {value}: must be between {low} and {high}")

    def _validate_router(self) -> None:
        """Check the settings that belong to one mode or to one model of prefill times."""
        if self.router_mode != "kv":
            for flag, is_set in {
                "--serve-indexer": self.serve_indexer,
                "--router-conditional-disagg": self.conditional_disagg_enabled,
                "--router-prefill-load-model ais": self.router_prefill_load_model == "ais",
            }.items():
                if is_set:
                    raise ConfigError(f"{flag} requires --router-mode=kv")
        if self.conditional_disagg_enabled and not self.use_kv_events:
            raise ConfigError("--router-conditional-disagg requires --router-kv-events")
        if self.router_prefill_load_model == "ais" and self.chat_processor != "dynamo":
            raise ConfigError("--router-prefill-load-model ais requires --dyn-chat-processor dynamo")
        check_indexer_and_model(self)

    def _validate_conditional_disagg(self) -> None:
        if self.conditional_disagg_policy not in CONDITIONAL_DISAGG_POLICY_CHOICES:
            expected = ", ".join(CONDITIONAL_DISAGG_POLICY_CHOICES)
            raise ConfigError(f"{CONDITIONAL_FLAG}: policy {self.conditional_disagg_policy} must be one of {expected}")
        maxima = {"eff_isl_ratio_threshold": 1.0} | dict.fromkeys(
            ("eff_isl_threshold", "prefill_busy_threshold", "decode_busy_threshold"), math.inf
        )
        for name, maximum in maxima.items():
            value = getattr(self, f"conditional_disagg_{name}")
            if value is not None and not 0 <= value <= maximum:
                raise ConfigError(f"{CONDITIONAL_FLAG}: {name} {value} must be between 0 and {maximum:g}")


@register_encoder(FrontendConfig)
def _encode_config(config: FrontendConfig) -> dict[str, Any]:
    return vars(config)


class FrontendArgGroup(ArgGroup):
    """Flags of the frontend."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        parser.add_argument("--version", action="version", version=f"Dynamo Frontend {__version__}")
        parser.add_argument(
            "-i",
            "--interactive",
            action=argparse.BooleanOptionalAction,
            default=env_or_default("DYN_INTERACTIVE", False),
            help="Chat in the terminal [DYN_INTERACTIVE]",
        )
        add_flags(parser, "Dynamo Frontend Options", FLAGS)
        RouterArgGroup(default_router_mode="round-robin", include_frontend_only=True).add_arguments(parser)
        KvRouterArgGroup().add_arguments(parser)
        AisPerfArgGroup().add_arguments(parser)
