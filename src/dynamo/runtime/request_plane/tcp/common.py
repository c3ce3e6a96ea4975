"""What both framings share: limits, counters, addresses, socket options and the watch over acknowledgements."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from dynamo.core.metrics import MetricsRegistry, log_buckets

C = TypeVar("C")

WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - compared, not bound
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3  # A vanished host is noticed within 25 s.


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """Sizes and times of the TCP plane; the defaults are upstream's (serving-plane.md §3.3)."""

    message_bytes_max: int = 32 << 20
    request_timeout_s: float = 10.0
    connect_timeout_s: float = 3.0
    silence_s: float = 1.5
    """How soon a worker of ours that stands still is noticed while it owes answers; 0 is never."""

    @property
    def answer_bytes_max(self) -> int:
        """An answer's frame may carry as much as a request, and its envelope."""
        return self.message_bytes_max + 65536

    @property
    def write_buffer_bytes_max(self) -> int:
        """Two of the largest messages: whoever leaves more unread does not read."""
        return 2 * self.message_bytes_max


NEVER_SPOKE = ", before it said anything we understand: is DYN_TCP_TLS_* the same at both ends?"
"""What is added where a connection breaks so: a worker that wants a handshake hangs up on whoever begins with words."""


class TcpMetrics:
    """`dynamo_transport_tcp_*` (serving-plane.md §7.3)."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_transport_tcp_"
        self.sent = registry.counter(prefix + "bytes_sent_total", "Bytes sent on the request plane").labels()
        self.received = registry.counter(prefix + "bytes_received_total", "Bytes received").labels()
        self.errors = registry.counter(prefix + "errors_total", "Connections that broke or could not be read").labels()
        self.slow_readers = registry.counter(
            prefix + "slow_readers_total", "Connections cut because the peer did not read"
        ).labels()
        self.left_silent = registry.counter(
            prefix + "left_silent_total", "Calls that went elsewhere because their worker stood still"
        ).labels()
        self.first_response = registry.histogram(
            "dynamo_request_plane_roundtrip_ttft_seconds",
            "From sending a request to the first element of its answer",
            (),
            log_buckets(0.001, 480.0, 18),
        ).labels()


def tune(connected: asyncio.BaseTransport, write_buffer_bytes_max: int) -> asyncio.Transport:
    """Sends at once, notices a vanished host, and bounds what waits to be sent."""
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
    """What others are told to connect to."""
    return local_address() if host in WILDCARDS else host


def local_address() -> str:
    """The machine's address in its network; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # A documentation address: a route is chosen, nothing is sent.
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Who is at the other end, for a log line."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "an unknown peer"


class AckWatch(Generic[C]):
    """Calls that wait for an acknowledgement, oldest first, under one timer."""

    def __init__(self, timeout_s: float, on_expired: Callable[[C], None]) -> None:
        self._timeout_s = timeout_s
        self._on_expired = on_expired
        self._loop = asyncio.get_running_loop()
        self._deadlines: dict[C, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: C) -> None:
        self._deadlines[call] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def discard(self, call: C) -> None:
        self._deadlines.pop(call, None)

    @property
    def waited_s(self) -> float:
        """How long the oldest of them has waited."""
        for deadline in self._deadlines.values():
            return self._loop.time() + self._timeout_s - deadline
        return 0.0

    def close(self) -> list[C]:
        """Stops watching; returns those that still waited."""
        waiting = list(self._deadlines)
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return waiting

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for call, deadline in list(self._deadlines.items()):
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._look)
                return
            if self._deadlines.pop(call, None) is not None:  # Whoever hears of one may give up another.
                self._on_expired(call)
