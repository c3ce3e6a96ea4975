"""FrontendConfig: the flags, variables and defaults of the frontend."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import Struct

from dynamo.api.batches.limits import BYTES_MAX as BATCH_BYTES_MAX
from dynamo.api.batches.limits import FILES_MAX, StorageLimits
from dynamo.api.responses.store import BYTES_MAX, ENTRIES_MAX, UNUSED_S, StoreLimits
from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS, KEY_CHARS_MIN, keys_of_variable
from dynamo.core.config import NO_EFFECT, environ, option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag, load
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.server.cors import Cors
from dynamo.routing.policy_file import RouterPolicy, check_disaggregation
from dynamo.routing.settings import BusyOptions, DisaggregationOptions, KvRouterOptions, check_files, router_config
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.announcing import REASONING_FIELDS, AnswerOptions
from dynamo.serving.postprocessor import REASONING_FIELD
from dynamo.text.tokenizer.choices import CHOICES, backends_wanted

UNSUPPORTED_FLAGS = (
    UnsupportedFlag("--exclude-tools-when-tool-choice-none", "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", True),
    UnsupportedFlag("--dyn-chat-processor", "DYN_CHAT_PROCESSOR", "dynamo"),
    UnsupportedFlag(
        "LoRA allocation", "DYN_LORA_ALLOCATION_ENABLED", False, hint="load adapters at workers (docs/lora.md)"
    ),
)
"""Flags of upstream's frontend that are refused unless they have their default value."""


WORKERS_MAX = 256
INDEX_VARIABLE = "DYN_HTTP_WORKER_INDEX"
FOLDER_VARIABLE = "DYN_HTTP_WORKER_FOLDER"

PER_PROCESS_DISCOVERY = {
    "mem": "which processes cannot share",
    "kubernetes": "where all processes of a pod would have one record; add replicas instead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(RuntimeOptions, BusyOptions, KvRouterOptions, DisaggregationOptions):
    """OpenAI-compatible HTTP frontend: discovers workers, routes requests to them and streams the responses."""

    COMMON: ClassVar = (
        "--http-host",
        "--http-port",
        "--router-mode",
        "--discovery-backend",
        "--request-plane",
        "--api-keys-file",
        "--tls-cert-path",
        "--tls-key-path",
        "--http-workers",
        "--migration-limit",
        "--enable-anthropic-api",
        "--batch-dir",
    )
    http_host: str = option("0.0.0.0", "--http-host", "DYN_HTTP_HOST", "Address to listen on")  # noqa: S104
    http_port: int = option(8000, "--http-port", "DYN_HTTP_PORT", "Port to listen on; 0 chooses a free one")
    router_mode: str = option(
        "round-robin",
        "--router-mode",
        "DYN_ROUTER_MODE",
        "Routing of requests to workers; kv considers cached blocks and load",
        choices=[mode.value for mode in RouterMode],
    )
    migration_limit: int = option(
        0, "--migration-limit", "DYN_MIGRATION_LIMIT", "Maximum migrations of a started stream to another worker"
    )
    migration_max_seq_len: int | None = option(
        None,
        "--migration-max-seq-len",
        "DYN_MIGRATION_MAX_SEQ_LEN",
        "Maximum tokens of prompt and output for a migration",
    )
    min_initial_workers: int = option(
        0,
        "--router-min-initial-workers",
        "DYN_ROUTER_MIN_INITIAL_WORKERS",
        "Number of workers that must have registered before a model is served; fewer suffice later",
    )
    namespace: str | None = option(None, "--namespace", "DYN_NAMESPACE", "Serve only models of this namespace")
    namespace_prefix: str | None = option(
        None, "--namespace-prefix", "DYN_NAMESPACE_PREFIX", "Serve only models of namespaces with this prefix"
    )
    metrics_prefix: str | None = option(
        None, "--metrics-prefix", "DYN_METRICS_PREFIX", "Prefix of metric names, instead of dynamo_frontend"
    )
    tls_cert_path: str | None = option(
        None, "--tls-cert-path", "DYN_TLS_CERT_PATH", "Certificate file (PEM); serves HTTPS instead of HTTP"
    )
    tls_key_path: str | None = option(
        None, "--tls-key-path", "DYN_TLS_KEY_PATH", "Private key file of the certificate (PEM)"
    )
    tls_client_ca_cert_path: str | None = option(
        None,
        "--tls-client-ca-cert-path",
        "DYN_TLS_CLIENT_CA_CERT_PATH",
        "CA file (PEM); only clients with a certificate of this CA are accepted",
        allows_blank=False,
    )
    enable_anthropic_api: bool = option(
        False,
        "--enable-anthropic-api",
        "DYN_ENABLE_ANTHROPIC_API",
        "Also serve the Anthropic Messages API (/v1/messages)",
    )
    strip_anthropic_preamble: bool = option(
        True,
        "--strip-anthropic-preamble",
        "DYN_STRIP_ANTHROPIC_PREAMBLE",
        "Remove the billing line, which changes with every request, from the start of system prompts",
    )
    responses_store: str = option(
        "memory",
        "--responses-store",
        "DYN_RESPONSES_STORE",
        "Storage of /v1/responses for later requests: memory, none, or a directory that frontends may share",
    )
    responses_store_entries: int = option(
        ENTRIES_MAX, "--responses-store-entries", "DYN_RESPONSES_STORE_ENTRIES", "Maximum number of stored responses"
    )
    responses_store_bytes: int = option(
        BYTES_MAX,
        "--responses-store-bytes",
        "DYN_RESPONSES_STORE_BYTES",
        "Maximum total size of stored responses, in bytes",
    )
    responses_store_unused_s: float = option(
        UNUSED_S,
        "--responses-store-unused-s",
        "DYN_RESPONSES_STORE_UNUSED_S",
        "Time after its last use until a stored response is deleted, in seconds",
    )
    batch_dir: str | None = option(
        None,
        "--batch-dir",
        "DYN_BATCH_DIR",
        "Directory of /v1/files and /v1/batches, which are served if it is set; frontends of one machine may share it",
    )
    batch_concurrency: int = option(
        8,
        "--batch-concurrency",
        "DYN_BATCH_CONCURRENCY",
        "Maximum concurrent batch lines; reduced by one per client request, but at least one",
    )
    batch_storage_bytes: int = option(
        BATCH_BYTES_MAX, "--batch-storage-bytes", "DYN_BATCH_STORAGE_BYTES", "Maximum size of --batch-dir, in bytes"
    )
    batch_files: int = option(FILES_MAX, "--batch-files", "DYN_BATCH_FILES", "Maximum number of files in --batch-dir")
    http_workers: int = option(
        1, "--http-workers", "DYN_HTTP_WORKERS", "Number of frontend processes that share the port"
    )
    api_key: list[str] = option(
        [],
        "--api-key",
        None,
        "API key to require (401 without a valid one); repeatable [also DYN_API_KEYS, hidden from process lists]",
        metavar="KEY",
        is_secret=True,
    )
    admin_api_key: list[str] = option(
        [],
        "--admin-api-key",
        None,
        "API key that is also valid for the admin routes; repeatable [also DYN_ADMIN_API_KEYS]",
        metavar="KEY",
        is_secret=True,
    )
    api_keys_file: str | None = option(
        None,
        "--api-keys-file",
        "DYN_API_KEYS_FILE",
        "TOML file of API keys with their limits; reloaded when it changes",
        allows_blank=False,
    )
    cors_origins: list[str] = option(
        [], "--cors-origins", "DYN_CORS_ORIGINS", "Origins of web pages that may call this frontend; * for all"
    )
    request_template: str | None = option(
        None,
        "--request-template",
        "DYN_REQUEST_TEMPLATE",
        "JSON file with default values of model, temperature and max_completion_tokens for requests without them",
    )
    frontend_route_extension: list[str] = option(
        [],
        "--frontend-route-extension",
        "DYN_FRONTEND_ROUTE_EXTENSIONS",
        "Entry point in dynamo.frontend.routes, or module:function, whose routes are added",
    )
    reasoning_field_name: str = option(
        REASONING_FIELD,
        "--reasoning-field-name",
        "DYN_REASONING_FIELD_NAME",
        "Name of the message field with the model's reasoning",
        choices=REASONING_FIELDS,
    )
    enable_streaming_tool_dispatch: bool = option(
        False,
        "--enable-streaming-tool-dispatch",
        "DYN_ENABLE_STREAMING_TOOL_DISPATCH",
        "Send an extra event in chat streams when a tool call is complete",
    )
    enable_streaming_reasoning_dispatch: bool = option(
        False,
        "--enable-streaming-reasoning-dispatch",
        "DYN_ENABLE_STREAMING_REASONING_DISPATCH",
        "Send an extra event in chat streams when the reasoning is complete",
    )
    tokenizer: str = option(
        "default",
        "--tokenizer",
        "DYN_TOKENIZER",
        "Tokenizer implementation; default: the fastest one whose results equal the tokenizers library's",
        choices=CHOICES,
    )
    tokenizer_fallback: bool = option(
        True,
        "--tokenizer-fallback",
        "DYN_TOKENIZER_FALLBACK",
        "Use the default implementation if the chosen one is not installed or does not support a model",
    )
    kserve_grpc_server: bool = option(
        False,
        "--kserve-grpc-server",
        "DYN_KSERVE_GRPC_SERVER",
        "Serve KServe v2 over gRPC on --http-port instead of HTTP",
    )
    grpc_metrics_port: int = option(
        8788, "--grpc-metrics-port", "DYN_GRPC_METRICS_PORT", "Port of /metrics and /health with --kserve-grpc-server"
    )
    interactive: bool = option(
        False, "--interactive", "DYN_INTERACTIVE", "Chat with a model in this terminal", aliases=["-i"]
    )
    model_name: str | None = option(
        None,
        "--model-name",
        "DYN_MODEL_NAME",
        "Model for --interactive; default: the first one served",
    )
    model_path: str | None = option(
        None, "--model-path", "DYN_MODEL_PATH", f"{NO_EFFECT}: workers publish their models"
    )
    kv_cache_block_size: int | None = option(
        None, "--kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE", f"{NO_EFFECT}: workers publish their block size"
    )
    admission_control: str | None = option(
        None,
        "--admission-control",
        None,
        f"{NO_EFFECT}: --active-*-threshold enable the rejection of requests",
        choices=("token-capacity", "none"),
    )
    dyn_debug_perf: bool = option(
        False,
        "--dyn-debug-perf",
        "DYN_DEBUG_PERF",
        f"{NO_EFFECT}: only the chat processors vllm and sglang log timings",
    )
    preprocess_workers: int = option(
        0,
        "--dyn-preprocess-workers",
        "DYN_PREPROCESS_WORKERS",
        f"{NO_EFFECT}: only the chat processors vllm and sglang use worker processes",
    )
    trust_remote_code: bool = option(
        False,
        "--trust-remote-code",
        "DYN_TRUST_REMOTE_CODE",
        f"{NO_EFFECT}: only the chat processors vllm and sglang run code of a model",
    )
    dump_config_to: str | None = option(
        None, "--dump-config-to", "DYN_DUMP_CONFIG_TO", "File to write the configuration to, as JSON without keys"
    )

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """Return the tokenizer implementations to try for every model, in order."""
        return backends_wanted(self.tokenizer, falls_back=self.tokenizer_fallback)

    @property
    def answers(self) -> AnswerOptions:
        """Return the options of chat responses."""
        return AnswerOptions(
            reasoning_field=self.reasoning_field_name,
            announces_calls=self.enable_streaming_tool_dispatch,
            announces_thoughts=self.enable_streaming_reasoning_dispatch,
        )

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid value or combination."""
        if not 0 <= self.http_port <= 65535:
            raise ConfigError(f"--http-port {self.http_port}: must be from 0 to 65535")
        try:
            self.thresholds.check()
        except InvalidArgument as error:
            raise ConfigError(f"--{str(error).replace('_', '-')}") from None
        if not 0 <= self.migration_limit < 1 << 32:
            raise ConfigError(f"--migration-limit {self.migration_limit}: must be from 0 to 4294967295")
        if self.migration_max_seq_len is not None and not 1 <= self.migration_max_seq_len < 1 << 32:
            raise ConfigError(f"--migration-max-seq-len {self.migration_max_seq_len}: must be from 1 to 4294967295")
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ConfigError("--tls-cert-path and --tls-key-path must be given together")
        if not 1 <= self.http_workers <= WORKERS_MAX:
            raise ConfigError(f"--http-workers {self.http_workers}: must be from 1 to {WORKERS_MAX}")
        if self.interactive and self.frontend_route_extension:
            raise ConfigError("--interactive and --frontend-route-extension are mutually exclusive")
        if self.interactive and self.http_workers > 1:
            raise ConfigError("--interactive and --http-workers are mutually exclusive")
        if not 0 <= self.grpc_metrics_port <= 65535:
            raise ConfigError(f"--grpc-metrics-port {self.grpc_metrics_port}: must be from 0 to 65535")
        others = {
            "--interactive": self.interactive,
            "--http-workers": self.http_workers > 1,
            "--batch-dir": self.batch_dir,
        }
        for flag in [flag for flag, is_given in others.items() if is_given and self.kserve_grpc_server]:
            raise ConfigError(f"--kserve-grpc-server and {flag} are mutually exclusive")
        if self.http_workers > 1 and self.discovery_backend in PER_PROCESS_DISCOVERY:
            raise ConfigError(
                f"--http-workers: not supported with --discovery-backend {self.discovery_backend}, "
                f"{PER_PROCESS_DISCOVERY[self.discovery_backend]}"
            )
        Cors.of(self.cors_origins)
        backends_wanted(self.tokenizer, falls_back=self.tokenizer_fallback)
        policy = None if self.router_policy_config is None else RouterPolicy.read(self.router_policy_config)
        check_disaggregation(self, self.mode, router_config(self, 1), policy)
        check_files(router_config(self, 1) if policy is None else policy.applied(router_config(self, 1)))
        if self.serve_indexer and self.mode != RouterMode.KV.value:
            raise ConfigError("--serve-indexer: requires --router-mode kv")
        if self.min_initial_workers < 0:
            raise ConfigError(f"--router-min-initial-workers {self.min_initial_workers}: must be at least 0")
        if min(self.batch_concurrency, self.batch_storage_bytes, self.batch_files) <= 0:
            raise ConfigError("--batch-concurrency, --batch-storage-bytes and --batch-files: must be greater than 0")
        if min(self.responses_store_entries, self.responses_store_bytes, self.responses_store_unused_s) <= 0:
            raise ConfigError("--responses-store-entries, -bytes and -unused-s: must be greater than 0")

    @property
    def mode(self) -> str:
        """Return the routing mode, with the effect of other flags on it."""
        return RouterMode.KV.value if self.load_aware else self.router_mode

    @property
    def apis(self) -> ApiOptions:
        """Return the options of the APIs other than chat and text completions."""
        return ApiOptions(
            enable_anthropic=self.enable_anthropic_api,
            strip_anthropic_preamble=self.strip_anthropic_preamble,
            responses_store=self.responses_store,
            responses_limits=StoreLimits(
                self.responses_store_entries, self.responses_store_bytes, self.responses_store_unused_s
            ),
            batch_dir=self.batch_dir,
            batch_concurrency=self.batch_concurrency,
            batch_limits=StorageLimits(self.batch_storage_bytes, self.batch_files),
        )

    @property
    def extensions(self) -> list[str]:
        """Return the route extensions; upstream's variable separates them by spaces."""
        return [name for words in self.frontend_route_extension for name in words.split()]

    @property
    def shown(self) -> "FrontendConfig":
        """Return the same configuration without secrets, for `--dump-config-to`."""
        hidden = "***"
        return replace(self, api_key=[hidden] * len(self.api_key), admin_api_key=[hidden] * len(self.admin_api_key))


def read(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> FrontendConfig:
    """Parse a command line of `python -m dynamo.frontend`. Raises `ConfigError`."""
    return load(FrontendConfig, argv, UNSUPPORTED_FLAGS, prog="python -m dynamo.frontend", variables=variables)


class GivenKeys(Struct, frozen=True):
    """API keys of the command line and the environment, without those of `--api-keys-file`."""

    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"GivenKeys({len(self.keys)} keys, {len(self.admin_keys)} admin keys)"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment that passes these keys to a child process, whose command line has none."""
        given = {API_KEYS: self.keys, ADMIN_API_KEYS: self.admin_keys}
        return {name: json.dumps(keys) for name, keys in given.items() if keys}


def api_keys(config: FrontendConfig, variables: Mapping[str, str] | None = None) -> GivenKeys:
    """Return the keys of the flags, then those of the variables. Raises `ConfigError` for an option without a key."""
    given = environ() if variables is None else variables
    for flag, keys in (("--api-key", config.api_key), ("--admin-api-key", config.admin_api_key)):
        if any(len(key) < KEY_CHARS_MIN for key in keys):
            raise ConfigError(f"{flag}: expected an API key of at least {KEY_CHARS_MIN} characters")
    return GivenKeys(
        (*config.api_key, *keys_of_variable(API_KEYS, given)),
        (*config.admin_api_key, *keys_of_variable(ADMIN_API_KEYS, given)),
    )


def check_platform() -> None:
    """Raise `ConfigError` on systems where processes cannot share a port."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("--http-workers: not supported on this system, which cannot share a port between processes")
