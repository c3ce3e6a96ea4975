"""Frontend options: the flags, variables and defaults of serving-plane.md §1.1 that this release honours."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from dynamo.api.batches.store import BYTES_MAX as BATCH_BYTES_MAX
from dynamo.api.batches.store import FILES_MAX, StorageLimits
from dynamo.api.responses.store import BYTES_MAX, ENTRIES_MAX, UNUSED_S, StoreLimits
from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS, KEY_CHARS_MIN, keys_of_variable
from dynamo.core.config import NO_EFFECT, environ, load, option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.frontend.waiting import without_waiting
from dynamo.frontend.workers import WORKERS_MAX
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.server.cors import Cors
from dynamo.routing.busy import Thresholds
from dynamo.routing.options import KvRouterOptions, check_files, router_config
from dynamo.routing.policy_file import RouterPolicy
from dynamo.routing.prefill_options import DisaggregationOptions
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.announcing import REASONING_FIELDS, AnswerOptions
from dynamo.serving.postprocessor import REASONING_FIELD
from dynamo.text.tokenizer.tokenizer import CHOICES, backends_wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(RuntimeOptions, KvRouterOptions, DisaggregationOptions):
    """OpenAI-compatible HTTP frontend: finds the workers, chooses one for each request, streams the answer."""

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
    http_port: int = option(8000, "--http-port", "DYN_HTTP_PORT", "Port to listen on; 0 lets the system choose")
    router_mode: str = option(
        "round-robin",
        "--router-mode",
        "DYN_ROUTER_MODE",
        "How a worker is chosen",
        choices=[mode.value for mode in RouterMode],
    )
    migration_limit: int = option(
        0, "--migration-limit", "DYN_MIGRATION_LIMIT", "How often a stream that has begun may move to another worker"
    )
    migration_max_seq_len: int | None = option(
        None, "--migration-max-seq-len", "DYN_MIGRATION_MAX_SEQ_LEN", "Longest prompt and output that is still moved"
    )
    min_initial_workers: int = option(
        0,
        "--router-min-initial-workers",
        "DYN_ROUTER_MIN_INITIAL_WORKERS",
        "A model is served once so many of its workers have come, and from then on with fewer",
    )
    active_decode_blocks_threshold: float | None = option(
        None,
        "--active-decode-blocks-threshold",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        "A worker is busy above this share of its KV blocks, 0 to 1; when all are, requests get a 529",
    )
    active_prefill_tokens_threshold: int | None = option(
        None,
        "--active-prefill-tokens-threshold",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        "A worker is busy above so many prompt tokens that wait or are being computed",
    )
    active_prefill_tokens_threshold_frac: float | None = option(
        None,
        "--active-prefill-tokens-threshold-frac",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        "The same as a multiple of the worker's --max-num-batched-tokens",
    )
    namespace: str | None = option(None, "--namespace", "DYN_NAMESPACE", "Serve only models of this namespace")
    namespace_prefix: str | None = option(
        None, "--namespace-prefix", "DYN_NAMESPACE_PREFIX", "Serve only models of namespaces with this prefix"
    )
    metrics_prefix: str | None = option(
        None, "--metrics-prefix", "DYN_METRICS_PREFIX", "Replaces dynamo_frontend in metric names"
    )
    tls_cert_path: str | None = option(
        None, "--tls-cert-path", "DYN_TLS_CERT_PATH", "Serve HTTPS with this certificate"
    )
    tls_key_path: str | None = option(None, "--tls-key-path", "DYN_TLS_KEY_PATH", "The certificate's key")
    tls_client_ca_cert_path: str | None = option(
        None,
        "--tls-client-ca-cert-path",
        "DYN_TLS_CLIENT_CA_CERT_PATH",
        "Demand client certificates of this CA",
        allows_blank=False,
    )
    enable_anthropic_api: bool = option(
        False, "--enable-anthropic-api", "DYN_ENABLE_ANTHROPIC_API", "Serve Anthropic's /v1/messages too"
    )
    strip_anthropic_preamble: bool = option(
        True,
        "--strip-anthropic-preamble",
        "DYN_STRIP_ANTHROPIC_PREAMBLE",
        "Leave out the billing line that clients put before their system prompt: it changes with every request",
    )
    responses_store: str = option(
        "memory",
        "--responses-store",
        "DYN_RESPONSES_STORE",
        "Where /v1/responses keeps answers for later requests: memory, none, or a directory that frontends may share",
    )
    responses_store_entries: int = option(
        ENTRIES_MAX, "--responses-store-entries", "DYN_RESPONSES_STORE_ENTRIES", "How many it keeps at most"
    )
    responses_store_bytes: int = option(
        BYTES_MAX, "--responses-store-bytes", "DYN_RESPONSES_STORE_BYTES", "And how many bytes of them"
    )
    responses_store_unused_s: float = option(
        UNUSED_S,
        "--responses-store-unused-s",
        "DYN_RESPONSES_STORE_UNUSED_S",
        "How long it keeps an answer that nobody asks for",
    )
    batch_dir: str | None = option(
        None,
        "--batch-dir",
        "DYN_BATCH_DIR",
        "Serve /v1/files and /v1/batches, and keep them in this directory, which frontends of one machine may share",
    )
    batch_concurrency: int = option(
        8,
        "--batch-concurrency",
        "DYN_BATCH_CONCURRENCY",
        "Lines of batches that are asked at a time; one fewer for each request of a client, and never none",
    )
    batch_storage_bytes: int = option(
        BATCH_BYTES_MAX, "--batch-storage-bytes", "DYN_BATCH_STORAGE_BYTES", "How much --batch-dir may hold"
    )
    batch_files: int = option(FILES_MAX, "--batch-files", "DYN_BATCH_FILES", "And how many files")
    http_workers: int = option(
        1, "--http-workers", "DYN_HTTP_WORKERS", "Processes that share the port; each does all that one alone would do"
    )
    api_key: list[str] = option(
        [],
        "--api-key",
        None,
        "Require this API key (401 without one); may be repeated [also DYN_API_KEYS, hidden from process lists]",
        metavar="KEY",
        is_secret=True,
    )
    admin_api_key: list[str] = option(
        [],
        "--admin-api-key",
        None,
        "API key that may also use the admin routes; may be repeated [also DYN_ADMIN_API_KEYS]",
        metavar="KEY",
        is_secret=True,
    )
    api_keys_file: str | None = option(
        None,
        "--api-keys-file",
        "DYN_API_KEYS_FILE",
        "TOML file of API keys with their limits; read again when it changes",
        allows_blank=False,
    )
    cors_origins: list[str] = option(
        [], "--cors-origins", "DYN_CORS_ORIGINS", "Origins whose web pages may call this frontend; * for all"
    )
    request_template: str | None = option(
        None,
        "--request-template",
        "DYN_REQUEST_TEMPLATE",
        "JSON file with the model, temperature and max_completion_tokens of requests that do not name them",
    )
    frontend_route_extension: list[str] = option(
        [],
        "--frontend-route-extension",
        "DYN_FRONTEND_ROUTE_EXTENSIONS",
        "Adds the routes of an entry point of dynamo.frontend.routes, or of a module:function",
    )
    reasoning_field_name: str = option(
        REASONING_FIELD,
        "--reasoning-field-name",
        "DYN_REASONING_FIELD_NAME",
        "The field of a chat's message that shows the model's thoughts",
        choices=REASONING_FIELDS,
    )
    enable_streaming_tool_dispatch: bool = option(
        False,
        "--enable-streaming-tool-dispatch",
        "DYN_ENABLE_STREAMING_TOOL_DISPATCH",
        "Chat streams say in an event of its own when a tool call is complete",
    )
    enable_streaming_reasoning_dispatch: bool = option(
        False,
        "--enable-streaming-reasoning-dispatch",
        "DYN_ENABLE_STREAMING_REASONING_DISPATCH",
        "Chat streams say in an event of its own when the thoughts are complete",
    )
    tokenizer: str = option(
        "default",
        "--tokenizer",
        "DYN_TOKENIZER",
        "Who turns text into tokens; the default is whatever is fastest and agrees with the tokenizers library",
        choices=CHOICES,
    )
    tokenizer_fallback: bool = option(
        True,
        "--tokenizer-fallback",
        "DYN_TOKENIZER_FALLBACK",
        "Use the default where the chosen tokenizer is not there or does not take a model",
    )
    kserve_grpc_server: bool = option(
        False, "--kserve-grpc-server", "DYN_KSERVE_GRPC_SERVER", "Serve KServe v2 over gRPC on --http-port, not HTTP"
    )
    grpc_metrics_port: int = option(
        8788, "--grpc-metrics-port", "DYN_GRPC_METRICS_PORT", "With --kserve-grpc-server: port of /metrics and /health"
    )
    interactive: bool = option(
        False, "--interactive", "DYN_INTERACTIVE", "Talk to a model in this terminal", aliases=["-i"]
    )
    model_name: str | None = option(
        None,
        "--model-name",
        "DYN_MODEL_NAME",
        "The model that --interactive talks to; without it, the first one served",
    )
    model_path: str | None = option(
        None, "--model-path", "DYN_MODEL_PATH", f"{NO_EFFECT}: models come from their workers"
    )
    dump_config_to: str | None = option(
        None, "--dump-config-to", "DYN_DUMP_CONFIG_TO", "Write the configuration to this file as JSON"
    )

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The tokenizers to try for every model."""
        return backends_wanted(self.tokenizer, falls_back=self.tokenizer_fallback)

    @property
    def answers(self) -> AnswerOptions:
        """What chats look like."""
        return AnswerOptions(
            reasoning_field=self.reasoning_field_name,
            announces_calls=self.enable_streaming_tool_dispatch,
            announces_thoughts=self.enable_streaming_reasoning_dispatch,
        )

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not 0 <= self.http_port <= 65535:
            raise ConfigError(f"--http-port {self.http_port}: expected a port from 0 to 65535")
        try:
            self.thresholds.check()
        except InvalidArgument as error:
            raise ConfigError(f"--{str(error).replace('_', '-')}") from None
        if not 0 <= self.migration_limit < 1 << 32:
            raise ConfigError(f"--migration-limit {self.migration_limit}: expected 0 to 4294967295")
        if self.migration_max_seq_len is not None and not 1 <= self.migration_max_seq_len < 1 << 32:
            raise ConfigError(f"--migration-max-seq-len {self.migration_max_seq_len}: expected 1 to 4294967295")
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ConfigError("--tls-cert-path and --tls-key-path must be given together")
        if not 1 <= self.http_workers <= WORKERS_MAX:
            raise ConfigError(f"--http-workers {self.http_workers}: expected 1 to {WORKERS_MAX}")
        if self.interactive and self.frontend_route_extension:
            raise ConfigError("--interactive and --frontend-route-extension do not go together")
        if self.interactive and self.http_workers > 1:
            raise ConfigError("--interactive and --http-workers do not go together")
        if not 0 <= self.grpc_metrics_port <= 65535:
            raise ConfigError(f"--grpc-metrics-port {self.grpc_metrics_port}: expected a port from 0 to 65535")
        others = {
            "--interactive": self.interactive,
            "--http-workers": self.http_workers > 1,
            "--batch-dir": self.batch_dir,
        }
        for flag in [flag for flag, is_given in others.items() if is_given and self.kserve_grpc_server]:
            raise ConfigError(f"--kserve-grpc-server and {flag} do not go together")
        if self.http_workers > 1 and self.discovery_backend == "mem":
            raise ConfigError("--http-workers: processes do not share --discovery-backend mem")
        Cors.of(self.cors_origins)
        backends_wanted(self.tokenizer, falls_back=self.tokenizer_fallback)
        policy = None if self.policy_config is None else RouterPolicy.read(self.policy_config)
        self.check_disaggregation(self.mode, router_config(self, 1), policy)
        check_files(router_config(self, 1) if policy is None else policy.applied(router_config(self, 1)))
        if self.serve_indexer and self.mode != RouterMode.KV.value:
            raise ConfigError("--serve-indexer needs --router-mode kv")
        if self.min_initial_workers < 0:
            raise ConfigError(f"--router-min-initial-workers {self.min_initial_workers}: expected 0 or more")
        if min(self.batch_concurrency, self.batch_storage_bytes, self.batch_files) <= 0:
            raise ConfigError("--batch-concurrency, --batch-storage-bytes and --batch-files: expected numbers above 0")
        if min(self.responses_store_entries, self.responses_store_bytes, self.responses_store_unused_s) <= 0:
            raise ConfigError("--responses-store-entries, -bytes and -unused-s: expected numbers above 0")

    @property
    def mode(self) -> str:
        """How a worker is chosen, with what other flags say of it."""
        return RouterMode.KV.value if self.load_aware else self.router_mode

    @property
    def apis(self) -> ApiOptions:
        """What is served beside chats and completions."""
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
        """The route extensions; upstream's variable separates them by spaces."""
        return [name for words in self.frontend_route_extension for name in words.split()]

    @property
    def shown(self) -> "FrontendConfig":
        """Return the same configuration without secrets, for `--dump-config-to`."""
        hidden = "***"
        return replace(self, api_key=[hidden] * len(self.api_key), admin_api_key=[hidden] * len(self.admin_api_key))

    @property
    def thresholds(self) -> Thresholds:
        """The busy thresholds that every model begins with."""
        return Thresholds(
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
        )


def read(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> FrontendConfig:
    """A command line of `python -m dynamo.frontend`. Raises `ConfigError`."""
    given = environ() if variables is None else variables
    declared = {field.metadata["flag"] for field in fields(FrontendConfig)}
    return load(FrontendConfig, without_waiting(argv, given, declared), given, prog="python -m dynamo.frontend")


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """API keys of the command line and the environment; those of `--api-keys-file` are not among them."""

    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"GivenKeys({len(self.keys)} keys, {len(self.admin_keys)} admin keys)"

    @property
    def variables(self) -> dict[str, str]:
        """The environment that hands these keys to a child process, which gets none on its command line."""
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
