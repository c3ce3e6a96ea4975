"""Liveness of a NATS server, determined by pings and by traffic on the connection."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nats.aio.client import Client

SILENCES_MAX = 2  # One silence is tolerated: this process may have been suspended itself.
PING_GIVEN_UP_S = 3600  # Longer than any ping: they end with their connection.


@dataclass(frozen=True, slots=True)
class NatsTraffic:
    """Traffic counters of a connection."""

    received: tuple[int, int]
    """Received messages, and bytes of the incomplete one."""
    unsent_bytes: int

    @classmethod
    def of(cls, client: "Client") -> "NatsTraffic":
        writer = getattr(client._transport, "_io_writer", None)
        unsent = writer.transport.get_write_buffer_size() if writer is not None else 0
        return cls((client.stats["in_msgs"], len(client._ps.buf)), unsent)

    def has_moved(self, before: "NatsTraffic") -> bool:
        """Return True if data was received or sent since."""
        return self.received != before.received or self.unsent_bytes < before.unsent_bytes


class Pings:
    """Outstanding pings of one connection.

    They end only with the connection: the library's reader fails on the response to a cancelled ping.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[float]] = set()

    async def once(self, client: "Client", timeout_s: float) -> None:
        """Do one round trip. Raise `TimeoutError`, and `ConnectionError` when the connection ends first."""
        ping, reader = self._begin(client), client._reading_task
        waits: set[asyncio.Future[Any]] = {ping} if reader is None else {ping, reader}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if reader is not None and reader.done() and not ping.done():  # The end of `asyncio.run` cancels every task.
            raise ConnectionError("the connection is no longer read")
        if not ping.done():
            raise TimeoutError
        _result(ping)

    async def until_answered(self, client: "Client", silence_s: float) -> None:
        """Wait for a ping response; raise `ConnectionError` for a server without traffic in either direction meanwhile.

        The response may be queued behind other data: while that is transferred, the server is alive.
        """
        ping = self._begin(client)
        silences = 0
        while silences < SILENCES_MAX:
            before = NatsTraffic.of(client)
            await asyncio.wait({ping}, timeout=silence_s)
            if ping.done():
                _result(ping)
                return
            silences = 0 if NatsTraffic.of(client).has_moved(before) else silences + 1
        raise ConnectionError(f"no sign of life for {SILENCES_MAX * silence_s:g} s")

    def end(self) -> None:
        """Cancel the pings: their connection is closed."""
        for task in list(self._tasks):
            task.cancel()

    def _begin(self, client: "Client") -> "asyncio.Task[float]":
        task = asyncio.get_running_loop().create_task(client.rtt(PING_GIVEN_UP_S), name="nats.ping")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _result(ping: "asyncio.Task[float]") -> None:
    if ping.cancelled():
        raise ConnectionError("connection closed before the response to a ping")
    ping.result()
