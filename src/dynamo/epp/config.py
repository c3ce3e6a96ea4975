"""EppOptions: the flags, variables and defaults of the endpoint picker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from dynamo.core.config import environ, load, option, read_bool, setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.routing.settings import BusyOptions, DisaggregationOptions, KvRouterOptions, router_config
from dynamo.runtime.config import RuntimeOptions

DYNAMO, STANDALONE = "dynamo", "standalone"
RENDER_PROTOCOLS = ("vllm-render", "sglang-renderer")
FORMER_KV_EVENTS = "DYN_USE_KV_EVENTS"
"""Variable of the picker before 1.5; the router's own variable has precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EppOptions(RuntimeOptions, BusyOptions, KvRouterOptions, DisaggregationOptions):
    """Endpoint picker for the Gateway API inference extension: chooses the worker of each request of a gateway."""

    mode: str = option(
        DYNAMO, "--mode", "DYN_EPP_MODE",
        "Workers to choose from: dynamo (of a Dynamo runtime), or standalone (engine pods of an InferencePool)",
        choices=[DYNAMO, STANDALONE],
    )  # fmt: skip
    host: str = option("0.0.0.0", "--host", None, "Address to listen on")  # noqa: S104 - gateways are other hosts
    grpc_port: int = option(9002, "--grpc-port", None, "Port of ext_proc; 0 chooses a free one")
    grpc_health_port: int = option(9003, "--grpc-health-port", None, "Port of the gRPC health service, without TLS")
    metrics_port: int = option(
        9090, "--metrics-port", "DYN_EPP_METRICS_PORT", "Port of /metrics, /health and /live; 0 disables it"
    )
    secure_serving: bool = option(
        True, "--secure-serving", "DYN_SECURE_SERVING",
        "Serve ext_proc with TLS; without --tls-cert-path with a self-signed certificate",
    )  # fmt: skip
    tls_cert_path: str | None = option(None, "--tls-cert-path", "DYN_TLS_CERT_PATH", "Certificate file (PEM)")
    tls_key_path: str | None = option(
        None, "--tls-key-path", "DYN_TLS_KEY_PATH", "Private key file of the certificate (PEM)"
    )
    namespace: str | None = option(None, "--namespace", "DYN_NAMESPACE", "Serve only models of this namespace")
    namespace_prefix: str | None = option(
        None, "--namespace-prefix", "DYN_NAMESPACE_PREFIX", "Serve only models of namespaces with this prefix"
    )
    target_port: int = option(
        8000, "--target-port", "DYN_EPP_TARGET_PORT",
        "Port of workers that are not pods; pods serve at their container port named http",
    )  # fmt: skip
    pod_namespace: str = option("", "--pool-namespace", "POD_NAMESPACE", "Kubernetes namespace of the worker pods")
    max_inflight_requests: int = option(
        1024, "--max-inflight-requests", "DYN_EPP_MAX_INFLIGHT_REQUESTS",
        "Maximum requests whose worker is being chosen; further ones get status 429",
    )  # fmt: skip
    body_bytes: int = option(
        32 << 20, "--max-body-bytes", "DYN_EPP_MAX_BODY_BYTES", "Maximum size of a request's body, in bytes"
    )
    body_deadline_s: float = option(
        60.0, "--body-deadline-secs", "DYN_EPP_BODY_DEADLINE_SECS",
        "Maximum time for a request's body to arrive, in seconds",
    )  # fmt: skip
    propagation_s: float = option(
        5.0, "--graceful-shutdown-propagation-secs", "DYN_EPP_GRACEFUL_SHUTDOWN_PROPAGATION_SECS",
        "Time between reporting NOT_SERVING and refusing streams at the end, in seconds",
    )  # fmt: skip
    pool_name: str | None = option(
        None, "--pool-name", "DYN_EPP_INFERENCE_POOL_NAME", "InferencePool whose pods are chosen (standalone)"
    )
    model_name: str | None = option(None, "--model-name", "DYN_MODEL_NAME", "Model that the pods serve (standalone)")
    block_size: int | None = option(
        None, "--kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE",
        "Tokens per KV block of the engines (standalone); other workers publish it",
    )  # fmt: skip
    tokenizer_url: str | None = option(
        None, "--tokenizer-service-url", "DYN_EPP_TOKENIZER_SERVICE_URL",
        "Base URL of the server that renders and tokenizes requests (standalone)",
    )  # fmt: skip
    tokenizer_protocol: str | None = option(
        None, "--tokenizer-protocol", "DYN_EPP_TOKENIZER_PROTOCOL", "Protocol of that server (standalone)",
        choices=RENDER_PROTOCOLS,
    )  # fmt: skip
    tokenization_timeout_ms: int = option(
        5000, "--tokenization-timeout-ms", "DYN_EPP_TOKENIZATION_TIMEOUT_MS",
        "Maximum time of a tokenization, in milliseconds (standalone)",
    )  # fmt: skip
    tokenizer_response_bytes: int = option(
        16 << 20, "--tokenizer-max-response-bytes", "DYN_EPP_TOKENIZER_MAX_RESPONSE_BYTES",
        "Maximum size of a tokenizer response, in bytes (standalone)",
    )  # fmt: skip
    kv_event_port: int = option(
        5557, "--kv-event-port", "DYN_EPP_KV_EVENT_PORT", "Port of the engines' KV events (standalone)"
    )
    kv_event_replay_port: int | None = option(
        None, "--kv-event-replay-port", "DYN_EPP_KV_EVENT_REPLAY_PORT",
        "Port at which the engines repeat missed KV events (standalone)",
    )  # fmt: skip
    total_kv_blocks: int | None = option(
        None, "--total-kv-blocks", "DYN_EPP_TOTAL_KV_BLOCKS", "KV blocks of each engine (standalone)"
    )
    batched_tokens: int | None = option(
        None, "--max-num-batched-tokens", "DYN_EPP_MAX_NUM_BATCHED_TOKENS",
        "Largest batch of each engine, in tokens (standalone)",
    )  # fmt: skip
    peer_service: str | None = option(
        None, "--peer-service", "DYN_EPP_PEER_SERVICE",
        "Service of the picker's replicas, which exchange active requests (standalone)",
    )  # fmt: skip
    replica_sync_port: int = option(
        9092, "--replica-sync-port", "DYN_EPP_REPLICA_SYNC_PORT", "Port of that exchange (standalone)"
    )
    pod_ip: str | None = option(
        None, "--pod-ip", "POD_IP", "Address of this pod, excluded from the replicas (standalone)"
    )

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid value or combination."""
        for flag, port in (
            ("--grpc-port", self.grpc_port),
            ("--grpc-health-port", self.grpc_health_port),
            ("--metrics-port", self.metrics_port),
            ("--target-port", self.target_port),
        ):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{flag} {port}: must be from 0 to 65535")
        for flag, value in (
            ("--max-inflight-requests", self.max_inflight_requests),
            ("--max-body-bytes", self.body_bytes),
            ("--body-deadline-secs", self.body_deadline_s),
            ("--tokenization-timeout-ms", self.tokenization_timeout_ms),
            ("--tokenizer-max-response-bytes", self.tokenizer_response_bytes),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: must be greater than 0")
        if self.propagation_s < 0:
            raise ConfigError(f"--graceful-shutdown-propagation-secs {self.propagation_s:g}: must be at least 0")
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ConfigError("--tls-cert-path and --tls-key-path must be given together")
        if self.tls_cert_path is not None and not self.secure_serving:
            raise ConfigError("--no-secure-serving and --tls-cert-path are mutually exclusive")
        try:
            self.thresholds.check()
        except InvalidArgument as error:
            raise ConfigError(f"--{str(error).replace('_', '-')}") from None
        router_config(self, 1)
        if self.mode == STANDALONE:
            self._check_standalone()

    def _check_standalone(self) -> None:
        required = {
            "--pool-name (DYN_EPP_INFERENCE_POOL_NAME)": self.pool_name,
            "--pool-namespace (POD_NAMESPACE)": self.pod_namespace,
            "--model-name (DYN_MODEL_NAME)": self.model_name,
            "--tokenizer-service-url (DYN_EPP_TOKENIZER_SERVICE_URL)": self.tokenizer_url,
            "--tokenizer-protocol (DYN_EPP_TOKENIZER_PROTOCOL)": self.tokenizer_protocol,
            "--kv-cache-block-size (DYN_KV_CACHE_BLOCK_SIZE)": self.block_size,
        }
        for name, value in required.items():
            if not value:
                raise ConfigError(f"{name}: required by DYN_EPP_MODE=standalone")
        url = urlsplit(self.tokenizer_url or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--tokenizer-service-url {self.tokenizer_url}: expected http://host:port")
        if self.peer_service and not self.pod_ip:
            raise ConfigError("--peer-service requires --pod-ip (POD_IP from the field status.podIP)")


def read(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> EppOptions:
    """Parse a command line of `python -m dynamo.epp`. Raises `ConfigError`."""
    variables = dict(environ() if variables is None else variables)
    if FORMER_KV_EVENTS in variables:
        setting(FORMER_KV_EVENTS, True, read_bool, variables)  # Refuses other values by its own name.
        variables.setdefault("DYN_ROUTER_USE_KV_EVENTS", variables[FORMER_KV_EVENTS])
    return load(EppOptions, argv, variables, prog="python -m dynamo.epp")
