"""Loads of a measurement: the interface of load generators, and the load generator of `dynamo replay`."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Protocol

from dynamo.profiler.thorough.deployment import RunningDeployment
from dynamo.replay.frontend import FrontendClient, Prompts
from dynamo.replay.load import ClosedLoop, ReplaySession, Turn
from dynamo.replay.online import Online
from dynamo.replay.report import RequestRow, rows_of

logger = logging.getLogger(__name__)

LATEST = 4
"""Inverse of the share of requests whose ITL counts, those that start last."""
BLOCK_TOKENS = 512
TOKEN_IDS = range(10, 250)
"""Ids of prompts, which every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """Latencies of requests that were sent together."""

    answered: int
    ttft_ms: float = 0.0
    """Mean time to first token."""
    last_ttft_ms: float = 0.0
    """Longest time to first token."""
    itl_ms: float = 0.0
    """Mean inter-token latency while all answers are running, without other requests' prompts where that is known."""


class LoadGenerator(Protocol):
    """Sends requests to one deployment."""

    async def warm_up(self, isl: int, osl: int, requests: int) -> None:
        """Send short requests one after another."""
        ...

    async def run(self, isl: int, osl: int, concurrency: int, *, repeats: bool) -> LoadSample:
        """Send `concurrency` requests together and return their latencies.

        With `repeats`, the same requests are sent twice, and the second time counts: their prompts are then cached.
        """
        ...


@dataclass(slots=True)
class ReplayLoad:
    """The load generator of `dynamo replay`. Each run uses prompts that no earlier one has used."""

    deployment: RunningDeployment
    _blocks: Iterator[int] = field(default_factory=itertools.count)

    async def warm_up(self, isl: int, osl: int, requests: int) -> None:
        """Send short requests one after another."""
        await self._send(self._sessions(isl, osl, requests), 1)

    async def run(self, isl: int, osl: int, concurrency: int, *, repeats: bool) -> LoadSample:
        """Send `concurrency` requests together and return their latencies."""
        sessions = self._sessions(isl, osl, concurrency)
        if repeats:
            await self._send(sessions, concurrency)
        return sampled(await self._send(sessions, concurrency))

    async def _send(self, sessions: list[ReplaySession], concurrency: int) -> list[RequestRow]:
        client = FrontendClient(self.deployment.stream, self.deployment.model, Prompts(BLOCK_TOKENS, TOKEN_IDS))
        outcome = await Online(ClosedLoop(sessions, concurrency), client).run()
        for reason, count in outcome.failures.most_common(1):
            logger.warning("%d of %d requests failed: %s", count, len(sessions), reason)
        return rows_of(outcome.flights)

    def _sessions(self, isl: int, osl: int, count: int) -> list[ReplaySession]:
        found = []
        for number in range(count):
            ids = tuple(next(self._blocks) for _ in range(-(-isl // BLOCK_TOKENS)))
            found.append(ReplaySession(f"s{number}", [Turn(f"r{number}", isl, osl, ids, 0.0, 0.0)]))
        return found


def sampled(rows: Sequence[RequestRow]) -> LoadSample:
    """Return the latencies of answered requests."""
    if not rows:
        return LoadSample(answered=0)
    # During the answers of the requests that start last, no other prompt is computed: their ITL is that of decoding alone.
    latest = sorted(rows, key=lambda row: row.arrival_ms + row.ttft_ms)[-max(1, len(rows) // LATEST) :]
    return LoadSample(
        answered=len(rows),
        ttft_ms=mean(row.ttft_ms for row in rows),
        last_ttft_ms=max(row.ttft_ms for row in rows),
        itl_ms=mean(row.itl_ms or 0.0 for row in latest),
    )
