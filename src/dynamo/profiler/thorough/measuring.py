"""Measuring: the loads of a sweep on a running deployment, and the journal of their results."""

import logging
from dataclasses import dataclass

import msgspec

from dynamo.profiler.thorough.journal import Measurement, MeasurementJournal
from dynamo.profiler.thorough.load import LoadGenerator, LoadSample

logger = logging.getLogger(__name__)

PREFILL_OSL = 5
WARMUP_ISL, WARMUP_REQUESTS = 32, 3
"""Requests per data-parallel rank before the first measurement: kernels are compiled and connections opened."""
BURST = 4
"""Prompts per rank of a data-parallel engine that are sent together, so that every rank has some."""


@dataclass(slots=True)
class EngineMeter:
    """Measurements on one deployment."""

    load: LoadGenerator
    journal: MeasurementJournal
    engine: str
    ranks: int = 1
    """Data-parallel ranks."""

    async def warm_up(self) -> None:
        """Send a few short requests."""
        await self.load.warm_up(WARMUP_ISL, PREFILL_OSL, WARMUP_REQUESTS * self.ranks)

    async def prefill(self, isl: int) -> Measurement:
        """Return the TTFT of one prompt; on a data-parallel engine that of one of a burst."""
        return await self._measured("prefill", isl, PREFILL_OSL, prefill_concurrency(self.ranks))

    async def decode(self, isl: int, osl: int, concurrency: int) -> Measurement:
        """Return the ITL of concurrent answers. A run before it fills the cache, so that prompts take no time."""
        return await self._measured("decode", isl, osl, concurrency)

    async def _measured(self, kind: str, isl: int, osl: int, concurrency: int) -> Measurement:
        wanted = Measurement(engine=self.engine, kind=kind, isl=isl, osl=osl, concurrency=concurrency)
        known = self.journal.known.get(wanted.key)
        if known is not None and not known.error:
            return known
        sample = await self.load.run(isl, osl, concurrency, repeats=kind == "decode")
        found = summarized(wanted, sample, is_burst=kind == "prefill" and concurrency > 1)
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


def prefill_concurrency(ranks: int) -> int:
    """Return the prompts of a prefill measurement."""
    return 1 if ranks == 1 else BURST * ranks


def summarized(wanted: Measurement, sample: LoadSample, *, is_burst: bool = False) -> Measurement:
    """Return the measurement of a load; one with an error if some requests were not answered.

    `is_burst`: each rank computed `BURST` prompts one after another; TTFT is the share of one in the time of the last
    one, without the steps that decoded the answers before it.
    """
    if sample.answered < wanted.concurrency:
        return msgspec.structs.replace(
            wanted, error=f"{wanted.concurrency - sample.answered} requests were not answered"
        )
    ttft_ms = sample.ttft_ms
    if is_burst:
        decoding_ms = sample.itl_ms * (wanted.osl - 1) * (BURST - 1)
        ttft_ms = (sample.last_ttft_ms - decoding_ms) / BURST
        if ttft_ms <= 0:
            ttft_ms = sample.last_ttft_ms / BURST  # Prompts were computed in the same steps as answers.
    return msgspec.structs.replace(
        wanted,
        ttft_ms=ttft_ms,
        itl_ms=sample.itl_ms,
        # The rate while all requests are running: their start and end are no property of the engine.
        tok_s=1000 * wanted.concurrency / sample.itl_ms if sample.itl_ms else 0.0,
    )
