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
    """How a server is asked for tokens, and says which it answers with."""

    TOKEN_IDS = "token-ids"  # noqa: S105 - a way, no secret
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
    url: str | None = option(None, "--url", None, f"Where the server is, for example {EXAMPLE}; /v1 may follow")
    api_path: str = option("/v1", "--api-path", None, "Where its API begins below the URL")
    input: str = option(
        AUTO,
        "--input",
        None,
        "What the server is sent: text, as clients write it, or tokens, made by the frontend; auto: tokens with --model-path",
        choices=(TEXT, TOKENS, AUTO),
    )
    models: list[str] = option([], "--model", None, "Which of the server's models to serve; all that it lists")
    served_model_names: list[str] = option(
        [],
        "--served-model-name",
        None,
        "What each of them is called here, in their order; as there unless told",
        aliases=("--model-name",),
    )
    embedding_models: list[str] = option(
        [], "--embedding-model", None, "Which of them embed: they are served for /v1/embeddings"
    )
    model_path: str | None = option(
        None, "--model-path", None, "Tokenizer and chat template of the model, for tokens: a directory or a hub id"
    )
    token_api: str = option(
        AUTO,
        "--token-api",
        None,
        "How the server is asked for tokens; auto: by what it says it is",
        choices=(AUTO, *(one.value for one in TokenApi)),
    )
    context_length: int | None = option(
        None,
        "--context-length",
        None,
        "Tokens of prompt and output together; what the server says, or the model's files",
    )
    api_key_env: str | None = option(
        None, "--api-key-env", None, "Variable that holds the server's API key (sent as a bearer token)"
    )
    headers: list[str] = option([], "--header", None, "Further headers for the server, each NAME:VALUE")
    tls_ca: str | None = option(None, "--tls-ca", None, "File with the authorities of an https server; the system's")
    max_connections: int = option(
        256, "--max-connections", None, "Requests that the server is given at once; more are sent elsewhere or refused"
    )
    ready_timeout_s: float = option(
        600.0, "--ready-timeout-s", None, "How long to wait at the start for the server to answer"
    )
    connect_timeout_s: float = option(5.0, "--connect-timeout-s", None, "How long a connection may take")
    first_byte_timeout_s: float = option(
        600.0, "--first-byte-timeout-s", None, "How long the server may think before it answers"
    )
    stream_timeout_s: float = option(120.0, "--stream-timeout-s", None, "How long a stream may be silent")
    health_path: str | None = option(
        None, "--health-path", None, "Asked whether the server lives; /health where it has that, else its models"
    )
    health_interval_s: float = option(2.0, "--health-interval-s", None, "Time between two looks")
    metrics_path: str = option(
        "/metrics", "--metrics-path", None, "Where the server's Prometheus metrics are; empty: nowhere"
    )
    load_interval_s: float = option(1.0, "--load-interval-s", None, "Time between two looks at them")
    kv_events_endpoint: str | None = option(
        None,
        "--kv-events-endpoint",
        None,
        "ZMQ endpoint where vLLM or SGLang tells what its cache holds: tcp://host:port",
    )
    kv_events_replay_endpoint: str | None = option(
        None, "--kv-events-replay-endpoint", None, "ZMQ endpoint where it tells again what was missed"
    )
    kv_cache_block_size: int | None = option(
        None,
        "--kv-cache-block-size",
        None,
        "Tokens of a KV block; what the server says, or 16",
        aliases=("--block-size",),
    )
    total_kv_blocks: int | None = option(
        None, "--total-kv-blocks", None, "KV blocks of its cache; what the server says"
    )

    def __post_init__(self) -> None:
        DisaggregatedOptions.__post_init__(self)
        if not self.url:
            raise ConfigError(f"--url is missing: expected the server's, for example {EXAMPLE}")
        self._check_input()
        for flag, number in (
            ("--max-connections", self.max_connections),
            ("--context-length", self.context_length),
            ("--kv-cache-block-size", self.kv_cache_block_size),
            ("--total-kv-blocks", self.total_kv_blocks),
        ):
            if number is not None and number < 1:
                raise ConfigError(f"{flag} {number}: expected 1 or more")
        for flag, seconds in (
            ("--ready-timeout-s", self.ready_timeout_s),
            ("--connect-timeout-s", self.connect_timeout_s),
            ("--first-byte-timeout-s", self.first_byte_timeout_s),
            ("--stream-timeout-s", self.stream_timeout_s),
            ("--health-interval-s", self.health_interval_s),
            ("--load-interval-s", self.load_interval_s),
        ):
            if not seconds > 0:
                raise ConfigError(f"{flag} {seconds:g}: expected more than 0")
        self._check_endpoints()
        self.request_headers()

    def _check_input(self) -> None:
        if self.input == TOKENS and self.model_path is None:
            raise ConfigError("--input tokens needs --model-path: the tokenizer of the model that the server runs")
        if self.takes_text:
            for flag, value in (
                ("--kv-events-endpoint", self.kv_events_endpoint),
                ("--disaggregation-mode", None if self.role is DisaggregationMode.AGGREGATED else self.role.value),
                ("--dyn-tool-call-parser", self.tool_call_parser),
                ("--dyn-reasoning-parser", self.reasoning_parser),
                ("--custom-jinja-template", self.custom_jinja_template),
            ):
                if value is not None:
                    raise ConfigError(f"{flag} {value} needs --input tokens and --model-path")
        elif self.embedding_models:
            raise ConfigError("--embedding-model goes with --input text")
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
            raise ConfigError("--kv-events-replay-endpoint needs --kv-events-endpoint")

    @property
    def takes_text(self) -> bool:
        """Whether the server is sent text."""
        return self.input == TEXT or (self.input == AUTO and self.model_path is None)

    @property
    def base_url(self) -> str:
        """The URL without the API's path."""
        assert self.url is not None, "the options were judged"
        return self.url.rstrip("/").removesuffix(self.api_path.rstrip("/"))

    def api(self, path: str) -> str:
        """A path of its API."""
        return f"{self.api_path.rstrip('/')}{path}"

    def request_headers(self) -> dict[str, str]:
        """What every request to the server carries. Raises `ConfigError`."""
        found: dict[str, str] = {}
        if self.api_key_env is not None:
            key = environ().get(self.api_key_env, "").strip()
            if not key:
                raise ConfigError(f"--api-key-env {self.api_key_env}: no such variable, or it is empty")
            found["authorization"] = f"Bearer {key}"
        for one in self.headers:
            name, is_given, value = one.partition(":")
            if not is_given or not name.strip() or any(sign in one for sign in "\r\n"):
                raise ConfigError(f"--header {name.strip()!r}: expected NAME:VALUE")
            found[name.strip().lower()] = value.strip()
        return found
