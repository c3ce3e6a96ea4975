"""Liveness, with a client whose responses the test controls."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.settle import until

from dynamo.runtime.transports.nats.liveness import SILENCES_MAX, NatsTraffic, Pings


class Client:
    """A client that answers pings on demand."""

    def __init__(self) -> None:
        self._transport = None
        self._reading_task: asyncio.Future[None] | None = None
        self._ps = SimpleNamespace(buf=b"")
        self.stats: Any = {"in_msgs": 0}
        self.answer = asyncio.Event()
        self.received_requests = 0

    async def rtt(self, timeout: float) -> float:  # noqa: ASYNC109 - the library calls it so
        self.received_requests += 1
        await self.answer.wait()
        return 0.0


class Growing(dict[str, int]):
    """Counters that have grown at each check; after some checks the server answers."""

    def __init__(self, client: Client, looks: int) -> None:
        self._client = client
        self._left = looks

    def __getitem__(self, name: str) -> int:
        self._left -= 1
        if self._left == 0:
            self._client.answer.set()
        return self._left


def test_nats_liveness_counts_traffic_in_both_directions() -> None:
    before = NatsTraffic((3, 10), 100)
    assert NatsTraffic((4, 10), 100).has_moved(before)
    assert NatsTraffic((3, 11), 100).has_moved(before)
    assert NatsTraffic((3, 10), 99).has_moved(before)
    assert not NatsTraffic((3, 10), 101).has_moved(before), "what piles up does not move"


async def test_nats_liveness_accepts_a_pong() -> None:
    client, pings = Client(), Pings()
    client.answer.set()
    await pings.once(client, 5.0)  # type: ignore[arg-type]
    await pings.until_answered(client, 5.0)  # type: ignore[arg-type]
    assert client.received_requests == 2


async def test_nats_liveness_tolerates_one_missed_pong() -> None:
    client, pings = Client(), Pings()
    with pytest.raises(ConnectionError, match="no sign of life for"):
        await pings.until_answered(client, 0.001)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await pings.once(client, 0.001)  # type: ignore[arg-type]
    pings.end()
    assert SILENCES_MAX == 2


async def test_nats_liveness_accepts_a_pong_behind_other_traffic() -> None:
    client, pings = Client(), Pings()
    client.stats = Growing(client, looks=5 * SILENCES_MAX)
    await pings.until_answered(client, 0.001)  # type: ignore[arg-type]


async def test_nats_liveness_ping_ends_with_its_connection() -> None:
    client, pings = Client(), Pings()
    waiting = asyncio.ensure_future(pings.once(client, 5.0))  # type: ignore[arg-type]
    await until(lambda: client.received_requests)
    pings.end()
    with pytest.raises(ConnectionError, match="closed before the response"):
        await asyncio.wait_for(waiting, 5.0)


async def test_nats_liveness_does_not_wait_for_a_pong_that_no_task_reads() -> None:
    client, pings = Client(), Pings()
    client._reading_task = asyncio.get_running_loop().create_future()
    client._reading_task.cancel()
    with pytest.raises(ConnectionError, match="no longer read"):
        await pings.once(client, 3600.0)  # type: ignore[arg-type]
    pings.end()
