"""Runtime options of the frontend and of every worker: registry and transports."""

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.core.config import environ, load, option, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.runtime.push_router import DEVICE_RATIO
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpOptions
from dynamo.runtime.request_plane.tcp.tls import HANDSHAKE_TIMEOUT_S, TcpTls, TcpTlsFiles
from dynamo.runtime.transports.nats.options import DEFAULT_SERVER, NatsOptions

POD_VARIABLES = ("KUBERNETES_SERVICE_HOST", "DYN_PARENT_DGD_K8S_NAME", "POD_NAME", "POD_UID")
"""Variables of a pod that an operator made."""
DISCOVERY_BACKENDS = ("file", "etcd", "kubernetes", "mem")
REQUEST_PLANES = ("tcp", "nats")
RESPONSE_PLANES = ("tcp",)
EVENT_PLANES = ("zmq", "nats")
DEFAULT_EVENT_PLANE = "zmq"
MEMORY_EVENT_PLANES = ("mem", "memory")  # Within one process.
CODECS = ("msgpack", "json")
NO_DEVICES = ("none", "void")
"""Values of `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES` that hide all GPUs."""


def default_discovery() -> str:
    """Return the registry that the environment names: etcd by its address, Kubernetes in a pod of an operator, else files."""
    if setting("ETCD_ENDPOINTS", "", str):
        return "etcd"
    return "kubernetes" if all(setting(name, "", str) for name in POD_VARIABLES) else "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Discovery and transports between processes."""

    discovery_backend: str = option(
        default_discovery,
        "--discovery-backend",
        "DYN_DISCOVERY_BACKEND",
        "Registry of processes; default: etcd where ETCD_ENDPOINTS is set, Kubernetes in a pod of the operator, "
        "or files in DYN_FILE_KV",
        choices=DISCOVERY_BACKENDS,
    )
    request_plane: str = option(
        "tcp",
        "--request-plane",
        "DYN_REQUEST_PLANE",
        "Transport of requests: TCP connections to the workers, or a NATS server (NATS_SERVER)",
        choices=REQUEST_PLANES,
    )
    response_plane: str = option(
        "tcp",
        "--response-plane",
        "DYN_RESPONSE_PLANE",
        "Transport of responses; QUIC is not supported",
        choices=RESPONSE_PLANES,
    )
    event_plane: str = option(
        DEFAULT_EVENT_PLANE,
        "--event-plane",
        "DYN_EVENT_PLANE",
        "Transport of events: ZMQ connections to the publishers, or a NATS server",
        choices=EVENT_PLANES,
    )
    tcp_tls_cert_path: str | None = option(
        None, "--tcp-tls-cert-path", "DYN_TCP_TLS_CERT_PATH", "Server certificate of this process (PEM)"
    )
    tcp_tls_key_path: str | None = option(
        None, "--tcp-tls-key-path", "DYN_TCP_TLS_KEY_PATH", "Private key of the server certificate (PEM)"
    )
    tcp_tls_ca_cert_path: str | None = option(
        None, "--tcp-tls-ca-cert-path", "DYN_TCP_TLS_CA_CERT_PATH", "CA certificates for verifying servers (PEM)"
    )
    tcp_tls_insecure: bool = option(
        False, "--tcp-tls-insecure", "DYN_TCP_TLS_INSECURE", "Skip the verification of server certificates"
    )
    tcp_tls_server_name: str | None = option(
        None,
        "--tcp-tls-server-name",
        "DYN_TCP_TLS_SERVER_NAME",
        "Name expected in server certificates where it differs from the host",
    )
    tcp_tls_handshake_timeout: float = option(
        HANDSHAKE_TIMEOUT_S,
        "--tcp-tls-handshake-timeout",
        "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS",
        "Timeout of a TLS handshake in seconds",
    )
    tcp_tls_client_cert_path: str | None = option(
        None,
        "--tcp-tls-client-cert-path",
        "DYN_TCP_TLS_CLIENT_CERT_PATH",
        "Client certificate of this process (PEM)",
    )
    tcp_tls_client_key_path: str | None = option(
        None, "--tcp-tls-client-key-path", "DYN_TCP_TLS_CLIENT_KEY_PATH", "Private key of the client certificate (PEM)"
    )
    tcp_tls_client_ca_cert_path: str | None = option(
        None,
        "--tcp-tls-client-ca-cert-path",
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH",
        "CA certificates for verifying clients (PEM); where set, clients must present a certificate",
        allows_blank=False,
    )
    nats_tls_ca_cert_path: str | None = option(
        None, "--nats-tls-ca-cert-path", "NATS_TLS_CA_CERT_PATH", "CA certificates for verifying the NATS server (PEM)"
    )
    nats_tls_client_cert_path: str | None = option(
        None, "--nats-tls-client-cert-path", "NATS_TLS_CLIENT_CERT_PATH", "Client certificate for the NATS server (PEM)"
    )
    nats_tls_client_key_path: str | None = option(
        None,
        "--nats-tls-client-key-path",
        "NATS_TLS_CLIENT_KEY_PATH",
        "Private key of the NATS client certificate (PEM)",
    )
    nats_tls_insecure: bool = option(
        False, "--nats-tls-insecure", "NATS_TLS_INSECURE", "Skip the verification of the NATS server's certificate"
    )


def tcp_options(variables: Mapping[str, str] | None = None, options: RuntimeOptions | None = None) -> TcpOptions:
    """Return the TCP settings from the environment. Raise `ConfigError` for invalid values.

    `options`, if given, replace the variables of the same settings.
    """
    port = setting("DYN_TCP_RPC_PORT", 0, int, variables)
    answer_port = setting("DYN_TCP_RESPONSE_STREAM_PORT", 0, int, variables)
    for name, value in (("DYN_TCP_RPC_PORT", port), ("DYN_TCP_RESPONSE_STREAM_PORT", answer_port)):
        if not 0 <= value <= 65535:
            raise ConfigError(f"{name}={value}: must be a port from 0 to 65535")
    return TcpOptions(
        host=setting("DYN_TCP_RPC_HOST", "", str, variables),
        port=port,
        answer_host=setting("DYN_TCP_RESPONSE_STREAM_HOST", "", str, variables),
        answer_port=answer_port,
        backlog=setting("DYN_TCP_LISTEN_BACKLOG", 1024, int, variables),
        limits=TcpLimits(
            message_bytes_max=setting("DYN_TCP_MAX_MESSAGE_SIZE", 32 << 20, int, variables),
            request_timeout_s=setting("DYN_TCP_REQUEST_TIMEOUT", 10.0, float, variables),
            connect_timeout_s=setting("DYN_TCP_CONNECT_TIMEOUT", 3.0, float, variables),
            silence_s=setting("DYN_TCP_SILENCE_TIMEOUT", 1.5, float, variables),
        ),
        tls=TcpTls.load(tcp_tls_files(variables, options)),
    )


def tcp_tls_files(variables: Mapping[str, str] | None = None, options: RuntimeOptions | None = None) -> TcpTlsFiles:
    """Return the certificate and key files of the TCP plane. Raise `ConfigError` for invalid combinations."""
    if options is None:
        options = load(
            RuntimeOptions,
            (),
            {name: text for name, text in (environ() if variables is None else variables).items() if "TCP_TLS" in name},
        )
    return TcpTlsFiles(
        cert_path=options.tcp_tls_cert_path or "",
        key_path=options.tcp_tls_key_path or "",
        ca_cert_path=options.tcp_tls_ca_cert_path or "",
        client_cert_path=options.tcp_tls_client_cert_path or "",
        client_key_path=options.tcp_tls_client_key_path or "",
        client_ca_cert_path=options.tcp_tls_client_ca_cert_path or "",
        is_insecure=options.tcp_tls_insecure,
        server_name=options.tcp_tls_server_name or "",
        handshake_timeout_s=options.tcp_tls_handshake_timeout,
    )


def nats_options(options: RuntimeOptions | None = None, variables: Mapping[str, str] | None = None) -> NatsOptions:
    """Return the NATS address and credentials from the environment. Raise `ConfigError` for invalid values.

    `options`, if given, replace the variables of the same settings.
    """

    def text(name: str) -> str:
        return setting(name, "", str, variables)

    if options is None:
        options = RuntimeOptions(
            nats_tls_ca_cert_path=text("NATS_TLS_CA_CERT_PATH"),
            nats_tls_client_cert_path=text("NATS_TLS_CLIENT_CERT_PATH"),
            nats_tls_client_key_path=text("NATS_TLS_CLIENT_KEY_PATH"),
            nats_tls_insecure=setting("NATS_TLS_INSECURE", False, read_bool, variables),
        )
    return NatsOptions(
        server=setting("NATS_SERVER", DEFAULT_SERVER, str, variables),
        username=text("NATS_AUTH_USERNAME"),
        password=text("NATS_AUTH_PASSWORD"),
        token=text("NATS_AUTH_TOKEN"),
        nkey=text("NATS_AUTH_NKEY"),
        credentials_file=text("NATS_AUTH_CREDENTIALS_FILE"),
        tls_ca_cert_path=options.nats_tls_ca_cert_path or "",
        tls_client_cert_path=options.nats_tls_client_cert_path or "",
        tls_client_key_path=options.nats_tls_client_key_path or "",
        tls_insecure=options.nats_tls_insecure,
        startup_timeout_s=setting("NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", 120.0, float, variables),
        request_timeout_s=setting("DYN_NATS_REQUEST_TIMEOUT_SECS", 10.0, float, variables),
    )


def request_plane_codec(variables: Mapping[str, str] | None = None) -> str:
    """Return the codec of this process's endpoints (`DYN_REQUEST_PLANE_CODEC`). Raise `ConfigError`."""
    codec = setting("DYN_REQUEST_PLANE_CODEC", "msgpack", str, variables)
    if codec not in CODECS:
        raise ConfigError(f"DYN_REQUEST_PLANE_CODEC={codec!r}: must be one of {', '.join(CODECS)}")
    return codec


def check_response_plane(given: str | None, variables: Mapping[str, str] | None = None) -> None:
    """Raise `ConfigError` for a response plane, given or in `DYN_RESPONSE_PLANE`, that is not supported."""
    if given is not None:
        if given not in RESPONSE_PLANES:
            raise ConfigError(f"response_plane {given!r}: must be {', '.join(RESPONSE_PLANES)}")
        return
    plane = setting("DYN_RESPONSE_PLANE", "tcp", str, variables)
    if plane not in RESPONSE_PLANES:
        raise ConfigError(f"DYN_RESPONSE_PLANE={plane!r}: must be {', '.join(RESPONSE_PLANES)}")


def inhibited_duration_s(variables: Mapping[str, str] | None = None) -> float:
    """Return how long a failed worker is deprioritized (`DYN_RUNTIME_INHIBITED_DURATION_SECS`); 0 disables it."""
    return setting("DYN_RUNTIME_INHIBITED_DURATION_SECS", 5.0, float, variables)


def device_ratio(variables: Mapping[str, str] | None = None) -> float:
    """Return the number of CPUs equal to one other device (`DYN_ENCODER_CUDA_TO_CPU_RATIO`). Raise `ConfigError`."""
    found = setting("DYN_ENCODER_CUDA_TO_CPU_RATIO", DEVICE_RATIO, float, variables)
    if not 0 < found < float("inf"):
        raise ConfigError(f"DYN_ENCODER_CUDA_TO_CPU_RATIO={found:g}: must be a number above 0")
    return found


def device_type(variables: Mapping[str, str] | None = None) -> str:
    """Return the device kind of this process, `cpu` or `cuda`, from the variables that hide GPUs.

    As in Dynamo, a process without such a variable counts as `cuda`, on any machine.
    """
    given = environ() if variables is None else variables  # An empty CUDA_VISIBLE_DEVICES is not an absent one.
    cuda, container = (given.get(f"{name}_VISIBLE_DEVICES", "all").strip().lower() for name in ("CUDA", "NVIDIA"))
    return "cpu" if cuda in ("", "-1", *NO_DEVICES) or container in NO_DEVICES else "cuda"


def check_event_plane(name: str) -> None:
    """Raise `ConfigError` for an unknown event plane."""
    if name and name not in (*EVENT_PLANES, *MEMORY_EVENT_PLANES):
        raise ConfigError(f"Invalid event_plane value {name!r} (--event-plane): must be {' or '.join(EVENT_PLANES)}")
