"""ProxyConfig: the flags of `python -m dynamo.openai_proxy`."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import environ, option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_events.engine_subscriber import check_endpoint

TEXT, TOKENS, AUTO = "text", "tokens", "auto"
EXAMPLE = "http://localhost:8000"


class TokenApi(Enum):
    """API by which tokens are sent to a server and received from it."""

    TOKEN_IDS = "token-ids"  # noqa: S105 - not a secret
    """`/v1/completions` with `return_token_ids`: vLLM from 0.10.2 on."""
    LOGPROBS = "logprobs"
    """`/v1/completions` with `return_tokens_as_token_ids`: older vLLM, and this project's frontend."""
    SGLANG = "sglang"
    """`/generate` with `input_ids`."""
    LLAMA_CPP = "llama.cpp"
    """`/completion` with `return_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(DisaggregatedOptions):
    """A running OpenAI-compatible server as a worker."""

    COMMON: ClassVar = (
        "--url",
        "--model",
        "--served-model-name",
        "--model-path",
        "--api-key-env",
        "--kv-events-endpoint",
        "--disaggregation-mode",
        "--dyn-tool-call-parser",
        "--dyn-reasoning-parser",
        "--discovery-backend",
        "--request-plane",
    )
    url: str | None = option(None, "--url", None, f"URL of the server, for example {EXAMPLE}; may end in /v1")
    api_path: str = option("/v1", "--api-path", None, "Path of the server's API below the URL")
    input: str = option(
        AUTO,
        "--input",
        None,
        "Form of the requests: text, or tokens made by the frontend; auto uses tokens if --model-path is given",
        choices=(TEXT, TOKENS, AUTO),
    )
    models: list[str] = option([], "--model", None, "Models of the server to serve; default: all that it lists")
    served_model_names: list[str] = option(
        [],
        "--served-model-name",
        None,
        "Names under which the models are served here, in the order of --model; default: the server's names",
        aliases=("--model-name",),
    )
    embedding_models: list[str] = option([], "--embedding-model", None, "Models to serve for /v1/embeddings")
    model_path: str | None = option(
        None,
        "--model-path",
        None,
        "Directory or Hugging Face id of the tokenizer and chat template, for --input tokens",
    )
    token_api: str = option(
        AUTO,
        "--token-api",
        None,
        "API for requests in tokens; auto detects it from the kind and version of the server",
        choices=(AUTO, *(one.value for one in TokenApi)),
    )
    context_length: int | None = option(
        None,
        "--context-length",
        None,
        "Maximum tokens of prompt and output; default: from the server or the model's files",
    )
    api_key_env: str | None = option(
        None, "--api-key-env", None, "Name of the variable with the server's API key (sent as a bearer token)"
    )
    headers: list[str] = option([], "--header", None, "Additional request headers, each NAME:VALUE")
    tls_ca: str | None = option(None, "--tls-ca", None, "CA file (PEM) for an https server; default: the system's CAs")
    max_connections: int = option(
        256,
        "--max-connections",
        None,
        "Maximum concurrent requests to the server; more go to other workers or are refused",
    )
    ready_timeout_s: float = option(
        600.0, "--ready-timeout-s", None, "Timeout for the server to become available at start, in seconds"
    )
    connect_timeout_s: float = option(5.0, "--connect-timeout-s", None, "Timeout of a connection attempt, in seconds")
    first_byte_timeout_s: float = option(
        600.0, "--first-byte-timeout-s", None, "Timeout from a request to the first byte of its response, in seconds"
    )
    stream_timeout_s: float = option(120.0, "--stream-timeout-s", None, "Timeout between parts of a stream, in seconds")
    health_path: str | None = option(
        None,
        "--health-path",
        None,
        "Path of the health check; default: /health if the server has it, else its model list",
    )
    health_interval_s: float = option(2.0, "--health-interval-s", None, "Interval of health checks, in seconds")
    metrics_path: str = option(
        "/metrics", "--metrics-path", None, "Path of the server's Prometheus metrics; empty disables reading them"
    )
    load_interval_s: float = option(1.0, "--load-interval-s", None, "Interval of reading the metrics, in seconds")
    kv_events_endpoint: str | None = option(
        None,
        "--kv-events-endpoint",
        None,
        "ZMQ endpoint of the KV events of vLLM or SGLang: tcp://host:port",
    )
    kv_events_replay_endpoint: str | None = option(
        None, "--kv-events-replay-endpoint", None, "ZMQ endpoint that repeats missed KV events"
    )
    kv_cache_block_size: int | None = option(
        None,
        "--kv-cache-block-size",
        None,
        "Tokens of a KV block; default: from the server, or 16",
        aliases=("--block-size",),
    )
    total_kv_blocks: int | None = option(
        None, "--total-kv-blocks", None, "Number of KV blocks of the server; default: from the server"
    )

    def __post_init__(self) -> None:
        DisaggregatedOptions.__post_init__(self)
        if not self.url:
            raise ConfigError(f"--url is missing: expected the server's URL, for example {EXAMPLE}")
        self._check_input()
        for flag, number in (
            ("--max-connections", self.max_connections),
            ("--context-length", self.context_length),
            ("--kv-cache-block-size", self.kv_cache_block_size),
            ("--total-kv-blocks", self.total_kv_blocks),
        ):
            if number is not None and number < 1:
                raise ConfigError(f"{flag} {number}: must be at least 1")
        for flag, seconds in (
            ("--ready-timeout-s", self.ready_timeout_s),
            ("--connect-timeout-s", self.connect_timeout_s),
            ("--first-byte-timeout-s", self.first_byte_timeout_s),
            ("--stream-timeout-s", self.stream_timeout_s),
            ("--health-interval-s", self.health_interval_s),
            ("--load-interval-s", self.load_interval_s),
        ):
            if not seconds > 0:
                raise ConfigError(f"{flag} {seconds:g}: must be greater than 0")
        self._check_endpoints()
        self.request_headers()

    def _check_input(self) -> None:
        if self.input == TOKENS and self.model_path is None:
            raise ConfigError("--input tokens: requires --model-path with the tokenizer of the server's model")
        if self.takes_text:
            for flag, value in (
                ("--kv-events-endpoint", self.kv_events_endpoint),
                ("--disaggregation-mode", None if self.role is DisaggregationMode.AGGREGATED else self.role.value),
                ("--dyn-tool-call-parser", self.tool_call_parser),
                ("--dyn-reasoning-parser", self.reasoning_parser),
                ("--custom-jinja-template", self.custom_jinja_template),
            ):
                if value is not None:
                    raise ConfigError(f"{flag} {value}: requires --input tokens and --model-path")
        elif self.embedding_models:
            raise ConfigError("--embedding-model: requires --input text")
        if self.role is DisaggregationMode.ENCODE:
            raise ConfigError("--disaggregation-mode encode: expected agg, prefill or decode")
        if self.served_model_names and self.models and len(self.served_model_names) != len(self.models):
            raise ConfigError(
                f"--served-model-name: {len(self.served_model_names)} names for {len(self.models)} models"
            )

    def _check_endpoints(self) -> None:
        for flag, endpoint in (
            ("--kv-events-endpoint", self.kv_events_endpoint),
            ("--kv-events-replay-endpoint", self.kv_events_replay_endpoint),
        ):
            if endpoint is not None:
                try:
                    check_endpoint(endpoint)
                except InvalidArgument as error:
                    raise ConfigError(f"{flag}: {error}") from None
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ConfigError("--kv-events-replay-endpoint: requires --kv-events-endpoint")

    @property
    def takes_text(self) -> bool:
        """Return whether the server receives text instead of tokens."""
        return self.input == TEXT or (self.input == AUTO and self.model_path is None)

    @property
    def base_url(self) -> str:
        """Return the URL without the API's path."""
        assert self.url is not None, "checked by __post_init__"
        return self.url.rstrip("/").removesuffix(self.api_path.rstrip("/"))

    def api(self, path: str) -> str:
        """Return a path of the server's API."""
        return f"{self.api_path.rstrip('/')}{path}"

    def request_headers(self) -> dict[str, str]:
        """Return the headers of every request to the server. Raises `ConfigError`."""
        found: dict[str, str] = {}
        if self.api_key_env is not None:
            key = environ().get(self.api_key_env, "").strip()
            if not key:
                raise ConfigError(f"--api-key-env {self.api_key_env}: the variable is not set or empty")
            found["authorization"] = f"Bearer {key}"
        for one in self.headers:
            name, is_given, value = one.partition(":")
            if not is_given or not name.strip() or any(sign in one for sign in "\r\n"):
                raise ConfigError(f"--header {name.strip()!r}: expected NAME:VALUE")
            found[name.strip().lower()] = value.strip()
        return found
