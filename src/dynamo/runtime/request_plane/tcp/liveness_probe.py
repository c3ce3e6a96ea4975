"""Liveness of workers: `AckWatch` of unacknowledged calls, `KeepAlive` of workers with running calls, and `LivenessProbe`.

`LivenessProbe` is for workers that left the registry while calls were running.

A removed record does not show whether running streams will end. A worker that drains removes its record first and
continues, possibly silent during a long prefill; a worker that only lost its registry connection is healthy. A
stopped or hanging worker loses its record in the same way, but its connection stays open, because the kernel
acknowledges data that the process never reads. The probe distinguishes them: it is a request for an unknown path,
which a live worker rejects immediately. Without a response within the acknowledgement timeout, the connection is
closed, so that its calls end and can migrate.

Workers in the registry are not probed this way: requests that cannot migrate wait for an unresponsive worker, and
requests that can migrate have left it before (`KeepAlive`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from dynamo.core.errors import ConnectionTimeout, Disconnected
from dynamo.runtime.request_plane.base import Item

logger = logging.getLogger(__name__)

C = TypeVar("C")

INTERVAL_S = 5.0  # Interval between probes: the worker may fail after a response; bounds how long a stream waits.


LOOKS = 8  # Checks per period. More cost wakeups; fewer detect later, because silence may begin just after a check.


class KeepAlive:
    """Liveness of a worker with running calls, determined by periodic checks; holds receptions as of the last ones.

    While calls are running, the caller checks at equal intervals whether data arrived since the last check. After the
    first check without data it sends a probe, which a live worker answers immediately from its event loop, whatever its
    engine does. A worker that was silent at all other checks of a period is unresponsive (SIGSTOP, frozen machine,
    hanging loop).

    Checks are counted instead of seconds: a caller that was suspended itself checks late, but only once, so that a
    response in its socket is read before the next check. A suspended caller therefore does not declare live workers
    unresponsive.
    """

    __slots__ = ("_quiet", "_received")

    def __init__(self) -> None:
        self._received = 0
        self._quiet = 0

    def look(self, received: int) -> bool:
        """Check once; `received` is the number of receptions so far. Return True when a probe must be sent."""
        if received != self._received:
            self._received = received
            self._quiet = 0
            return False
        self._quiet += 1
        return self._quiet == 1

    def is_silent(self, received: int) -> bool:
        """Return True from the last check of a silent period until data arrives."""
        return self._quiet >= LOOKS - 1 and received == self._received


class ProbedConnection(Protocol):
    """Connection that the probe uses."""

    address: str

    def send_probe(self, probe: "LivenessProbe") -> None:
        """Send the probe; `probe` receives the result."""

    def serves(self, instances: Collection[int]) -> bool:
        """Return True while calls to one of these instances are running."""

    def abort(self) -> None:
        """Abort the connection."""


class LivenessProbe:
    """Liveness probe of one connection, and the receiver of its responses."""

    def __init__(self, connection: ProbedConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._suspects: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_probing = False

    def suspect(self, instance_id: int) -> None:
        """Start probing: this instance left the registry."""
        self._suspects.add(instance_id)
        if not self._is_probing and self._timer is None:
            self._look()

    def close(self) -> None:
        """Stop probing: the connection is closed."""
        self._suspects.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_token(self, token_id: int) -> None:
        """Ignore tokens: rejections contain none."""

    def on_item(self, item: Item) -> None:
        """Ignore items: rejections contain none."""

    def on_end(self) -> None:
        """Treat an unexpected end as a sign of life."""
        self._lives()

    def on_error(self, error: Exception) -> None:
        """Treat any error sent by the worker as a sign of life."""
        if isinstance(error, ConnectionTimeout):
            self._is_probing = False
            logger.warning(
                "closing connection to worker %s: not in the registry and no response to a liveness probe",
                self._connection.address,
            )
            self._connection.abort()
        elif isinstance(error, Disconnected):
            self._is_probing = False
        else:
            self._lives()

    def _lives(self) -> None:
        self._is_probing = False
        self._timer = self._loop.call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._connection.serves(self._suspects):
            self._is_probing = True
            self._connection.send_probe(self)
        else:
            self._suspects.clear()


class AckWatch(Generic[C]):
    """Unacknowledged calls, oldest first, under one timer."""

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
        """Return how long the oldest call has been waiting."""
        for deadline in self._deadlines.values():
            return self._loop.time() + self._timeout_s - deadline
        return 0.0

    def close(self) -> list[C]:
        """Stop watching; return the unacknowledged calls."""
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
            if self._deadlines.pop(call, None) is not None:  # The callback of one call may end another.
                self._on_expired(call)
