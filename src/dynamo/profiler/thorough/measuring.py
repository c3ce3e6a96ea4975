"""Measuring: the loads of a sweep on a running deployment, by the load generator of `dynamo replay`."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

import msgspec

from dynamo.profiler.thorough.journal import Measurement, MeasurementJournal
from dynamo.profiler.thorough.local import LocalDeployment
from dynamo.replay.frontend import FrontendClient, Prompts
from dynamo.replay.load import ClosedLoop, ReplaySession, Turn
from dynamo.replay.online import Online
from dynamo.replay.report import RequestRow, rows_of

logger = logging.getLogger(__name__)

PREFILL_OSL = 5
WARMUP_ISL, WARMUP_REQUESTS = 32, 3
"""Requests before the first measurement: connections are opened, kernels compiled, caches filled."""
LATEST = 4
"""Inverse of the share of requests whose ITL counts, those that start last."""
BLOCK_TOKENS = 512
TOKEN_IDS = range(10, 250)
"""Ids of prompts, which every vocabulary has."""


@dataclass(slots=True)
class EngineMeter:
    """Measurements on one deployment. Each uses prompts that no earlier one has used, so that no cache has them."""

    deployment: LocalDeployment
    journal: MeasurementJournal
    engine: str
    _blocks: Iterator[int] = field(default_factory=itertools.count)

    async def warm_up(self) -> None:
        """Send a few short requests."""
        await self._run(self._sessions(WARMUP_ISL, PREFILL_OSL, WARMUP_REQUESTS), 1)

    async def prefill(self, isl: int, concurrency: int = 1) -> Measurement:
        """Return the TTFT of prompts that are sent together."""
        return await self._measured("prefill", isl, PREFILL_OSL, concurrency)

    async def decode(self, isl: int, osl: int, concurrency: int) -> Measurement:
        """Return the ITL of concurrent answers. A run before it fills the cache, so that prompts take no time."""
        return await self._measured("decode", isl, osl, concurrency)

    async def _measured(self, kind: str, isl: int, osl: int, concurrency: int) -> Measurement:
        wanted = Measurement(engine=self.engine, kind=kind, isl=isl, osl=osl, concurrency=concurrency)
        known = self.journal.known.get(wanted.key)
        if known is not None and not known.error:
            return known
        sessions = self._sessions(isl, osl, concurrency)
        if kind == "decode":
            await self._run(sessions, concurrency)
        rows = await self._run(sessions, concurrency)
        found = summarized(wanted, rows)
        self.journal.add(found)
        if found.error:
            logger.warning(
                "%s: %s of %d tokens, %d at once: dropped: %s", self.engine, kind, isl, concurrency, found.error
            )
        else:
            logger.info(
                "%s: %s of %d tokens, %d at once: TTFT %.1f ms, ITL %.2f ms, %.0f tokens/s",
                self.engine, kind, isl, concurrency, found.ttft_ms, found.itl_ms, found.tok_s,
            )  # fmt: skip
        return found

    async def _run(self, sessions: list[ReplaySession], concurrency: int) -> list[RequestRow]:
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


def summarized(wanted: Measurement, rows: list[RequestRow]) -> Measurement:
    """Return the measurement of answered requests; one with an error if some were not answered."""
    if len(rows) < wanted.concurrency:
        return msgspec.structs.replace(wanted, error=f"{wanted.concurrency - len(rows)} requests were not answered")
    # During the answers of the requests that start last, no other prompt is computed: their ITL is that of decoding alone.
    latest = sorted(rows, key=lambda row: row.arrival_ms + row.ttft_ms)[-max(1, len(rows) // LATEST) :]
    itl_ms = mean(row.itl_ms or 0.0 for row in latest)
    return msgspec.structs.replace(
        wanted,
        ttft_ms=mean(row.ttft_ms for row in rows),
        itl_ms=itl_ms,
        # The rate while all requests are running: their start and end are no property of the engine.
        tok_s=1000 * wanted.concurrency / itl_ms if itl_ms else 0.0,
    )
