"""Shared parts of both TCP framings: options, limits, metrics, addresses and socket options."""

import asyncio
import socket
from typing import cast

from msgspec import Struct, field

from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane.tcp.tls import TcpTls

WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - compared, not bound
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3  # Detects a vanished host within 25 s.


ROUNDTRIP_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upstream's buckets."""


class TcpLimits(Struct, frozen=True, kw_only=True):
    """Size and time limits of the TCP plane; the defaults are Dynamo's."""

    message_bytes_max: int = 32 << 20
    request_timeout_s: float = 10.0
    connect_timeout_s: float = 3.0
    silence_s: float = 1.5
    """Time in which an unresponsive worker with running calls is detected; 0 disables detection."""

    @property
    def answer_bytes_max(self) -> int:
        """Return the maximum response frame: a message and its envelope."""
        return self.message_bytes_max + 65536

    @property
    def write_buffer_bytes_max(self) -> int:
        """Return the write buffer limit: two of the largest messages; a peer that leaves more unread is too slow."""
        return 2 * self.message_bytes_max


NO_VALID_FRAME_HINT = ", before any valid frame; set the same DYN_TCP_TLS_* for both processes"
"""Hint for connections that close before any valid frame: a TLS server closes connections without a handshake."""


class TcpOptions(Struct, frozen=True, kw_only=True):
    """Addresses to listen on, limits and TLS."""

    host: str = ""
    """Host to bind and advertise; empty: this machine's address, which is also advertised for a bound wildcard."""
    port: int = 0
    answer_host: str = ""
    """Host that released workers connect to with responses; empty: as `host`."""
    answer_port: int = 0
    backlog: int = 1024
    speaks_batched: bool = True
    """Whether batched frames are supported; False uses Dynamo framing only, as a released peer does."""
    limits: TcpLimits = field(default_factory=TcpLimits)
    tls: TcpTls = field(default_factory=TcpTls)


class TcpMetrics:
    """`dynamo_transport_tcp_*` metrics."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_transport_tcp_"
        self.sent = registry.counter(prefix + "bytes_sent_total", "Bytes sent on the request plane").labels()
        self.received = registry.counter(prefix + "bytes_received_total", "Bytes received").labels()
        self.errors = registry.counter(prefix + "errors_total", "Lost connections and malformed frames").labels()
        self.slow_readers = registry.counter(
            prefix + "slow_readers_total", "Connections closed because the peer did not read"
        ).labels()
        self.left_silent = registry.counter(
            prefix + "left_silent_total", "Calls migrated from unresponsive workers"
        ).labels()
        self.first_response = registry.histogram(
            "dynamo_request_plane_roundtrip_ttft_seconds",
            "Time from sending a request to the first response element",
            (),
            ROUNDTRIP_BUCKETS,
        ).labels()


def tune(connected: asyncio.BaseTransport, write_buffer_bytes_max: int) -> asyncio.Transport:
    """Disable Nagle's algorithm, enable keep-alive and bound the write buffer."""
    transport = cast("asyncio.Transport", connected)
    transport.set_write_buffer_limits(high=write_buffer_bytes_max)
    sock = transport.get_extra_info("socket")
    if sock is None:
        return transport
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return transport


def advertised(host: str) -> str:
    """Return the host that others connect to."""
    return local_address() if host in WILDCARDS else host


def local_address() -> str:
    """Return this machine's address in its network; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Documentation address: selects a route, sends nothing.
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Return the peer's address for log lines."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "an unknown peer"
