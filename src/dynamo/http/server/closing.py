"""Closing of connections whose client may still send, or may still wait for a response.

Closing a connection while its client sends resets it, and the client loses a response that it has not read. A connection
thus lingers after its last response: further data is read and dropped, within the bounds of `Lingering`.

A client that only closed its sending side, and waits, and one that closed the connection look the same. Writing to the
latter fails once its reset has arrived, so a half-closed connection is probed (`HalfClosedProbes`).
"""

import asyncio
from collections.abc import Callable

LINGER_BYTES_MAX = 512 << 20
"""Maximum bytes of a request that are read and dropped after an early refusal, so that its client can read it."""
LINGER_S, LINGER_IDLE_S = 30.0, 5.0
"""Maximum seconds of that reading, in all and without a byte. Closing earlier resets the connection, refusal included."""
PROBES_S = (0.0, 0.02, 0.15, 1.0)
"""Times of probes of a half-closed connection. Clients accept few interim responses, Go's five at most."""


class Lingering:
    """Data of a client that is dropped after the last response of its connection; times are those of the loop."""

    def __init__(self, now_s: float, dropped_bytes: int) -> None:
        """`dropped_bytes`: received before the last response, and not parsed."""
        self.last_byte_at = now_s
        """Time of the last byte that was dropped."""
        self._since = now_s
        self._dropped_bytes = dropped_bytes

    def drop(self, count: int, now_s: float) -> None:
        """Count bytes that are dropped."""
        self._dropped_bytes += count
        self.last_byte_at = now_s

    @property
    def is_too_much(self) -> bool:
        """Return whether the client sent more than it may."""
        return self._dropped_bytes > LINGER_BYTES_MAX

    def is_over(self, now_s: float) -> bool:
        """Return whether the client has had the time to read the last response."""
        return now_s - self._since > LINGER_S or now_s - self.last_byte_at > LINGER_IDLE_S


class HalfClosedProbes:
    """Probes of one connection whose client has closed its sending side."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, probe: Callable[[], None], is_closing: Callable[[], bool]
    ) -> None:
        """Probe at once, and after the times of `PROBES_S` unless the connection `is_closing`."""
        self._loop = loop
        self._probe = probe
        self._is_closing = is_closing
        self._next: asyncio.TimerHandle | None = None
        self._run(0)

    def _run(self, number: int) -> None:
        self._probe()
        if number + 1 < len(PROBES_S) and not self._is_closing():
            wait_s = PROBES_S[number + 1] - PROBES_S[number]
            self._next = self._loop.call_later(wait_s, self._run, number + 1)

    def cancel(self) -> None:
        """Probe no more."""
        if self._next is not None:
            self._next.cancel()
