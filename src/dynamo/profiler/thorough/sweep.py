"""Sweep: measure the candidates, pick a prefill and a decode engine, and measure the curves of the picked ones."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.candidates import EngineFamily, candidates
from dynamo.profiler.config import ProfilerConfig
from dynamo.profiler.curves import DECODE_OSL, DecodeCurve, PrefillCurve, concurrencies, decode_grid, prefill_grid
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.rapid import PickedDeployment
from dynamo.profiler.search import BUSY_MAX, DECODE_SHARE, PREFILL_TOKENS, Configuration, EngineChoice, balanced
from dynamo.profiler.spec import ProfileSpec
from dynamo.profiler.thorough.deployment import CannotDeploy, Deployer, RunningDeployment, sequences_in
from dynamo.profiler.thorough.journal import Measurement, MeasurementJournal
from dynamo.profiler.thorough.load import LoadGenerator
from dynamo.profiler.thorough.measuring import PREFILL_OSL, EngineMeter, prefill_concurrency
from dynamo.protocols.kubernetes.v1beta1 import ProfilingPhase

logger = logging.getLogger(__name__)

CONCURRENCY_MAX = 512
DEFAULT_CONTEXT = 8192

MakeLoad = Callable[[RunningDeployment, Path], LoadGenerator]
EnterPhase = Callable[[ProfilingPhase, str], None]


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Measurements of one candidate at the lengths of the request."""

    parallel: PickedParallelConfig
    kv_tokens: int
    prefill: Measurement
    decodes: Sequence[Measurement]


@dataclass(slots=True)
class ThoroughSweep:
    """One thorough run."""

    spec: ProfileSpec
    config: ProfilerConfig
    model_config: Mapping[str, Any]
    enter: EnterPhase
    deployer: Deployer
    make_load: MakeLoad
    """Makes the load generator of a deployment, whose files are in a directory."""
    measured: list[MeasuredEngine] = field(default_factory=list)
    """Candidates that could be measured."""

    async def run(self) -> PickedDeployment:
        """Return the picked deployment with its measured curves. Raise `ConfigError` if no candidate can be measured."""
        journal = MeasurementJournal.opened(Path(self.config.output_dir))
        found = []
        options = self._parallelizations()
        for number, parallel in enumerate(options, 1):
            logger.info("candidate %d of %d: %s", number, len(options), parallel.label())
            try:
                found.append(await self._measured(parallel, journal))
            except CannotDeploy as error:
                logger.warning("candidate %s dropped: %s", parallel.label(), error)
        usable = [one for one in found if one.prefill.ttft_ms and any(not each.error for each in one.decodes)]
        if not usable:
            raise ConfigError(
                "searchStrategy: thorough: no candidate could be measured; see the log and the candidates' folders"
            )
        self.measured = usable
        prefill, decode, level = self._picked(usable)
        self.enter("SelectingConfig", "Selecting the configuration with the lowest cost")
        config = self._configuration(prefill, decode, level)
        curves = None
        if self.spec.needs_curves:
            self.enter("BuildingCurves", "Measuring performance curves of the picked engines")
            curves = await self._curves(prefill, decode, journal)
        is_met = self.spec.latency.met_by(config.ttft_ms, config.itl_ms, config.osl)
        text = f"sla: {self.spec.latency.text()} is not met by any measured engine; the nearest has TTFT {config.ttft_ms:.0f} ms, ITL {config.itl_ms:.1f} ms"
        return PickedDeployment(
            config=config,
            backend=self.spec.backend,
            max_context=self._max_context(),
            is_met=is_met,
            warnings=() if is_met else (text,),
            curves=curves,
        )

    def _parallelizations(self) -> list[PickedParallelConfig]:
        """Return the candidates; a command without the placeholder of engine arguments is a single one."""
        if self.deployer.is_single:
            return [PickedParallelConfig()]
        family = EngineFamily(
            shape=model_shape(self.model_config, self.spec.model),
            gpu=self.spec.gpu,
            gpus_per_node=self.spec.gpus_per_node,
        )
        context = self.spec.traffic.isl + self.spec.traffic.osl
        found = [one.parallel for one in candidates(family, self.spec.total_gpus, context, is_measured=True)]
        if not found:
            raise ConfigError(
                f"hardware.totalGpus: {self.spec.total_gpus}: no parallelization of {self.spec.model} fits"
            )
        return found

    @contextlib.asynccontextmanager
    async def _deployed(
        self, parallel: PickedParallelConfig, name: str, journal: MeasurementJournal
    ) -> AsyncIterator[tuple[RunningDeployment, EngineMeter]]:
        """Deploy an engine and warm it up."""
        choice = EngineChoice(parallel=parallel, batch=CONCURRENCY_MAX, max_tokens=PREFILL_TOKENS)
        directory = Path(self.config.output_dir) / f"{name}-{parallel.label()}"
        async with self.deployer.deployed(choice, directory) as deployment:
            load = self.make_load(deployment, directory)
            meter = EngineMeter(load, journal, parallel.label(), parallel.dp)
            await meter.warm_up()
            yield deployment, meter

    def _max_context(self) -> int:
        body = self.model_config.get("text_config") or self.model_config
        return int(body.get("max_position_embeddings") or DEFAULT_CONTEXT)

    async def _measured(self, parallel: PickedParallelConfig, journal: MeasurementJournal) -> MeasuredEngine:
        """Return the measurements of a candidate at the lengths of the request; it is deployed if some are missing."""
        traffic, label = self.spec.traffic, parallel.label()
        known = self._finished(parallel, journal)
        if known is not None:
            logger.info("candidate %s: all measurements are finished", label)
            return known
        async with self._deployed(parallel, "candidate", journal) as (deployment, meter):
            journal.add_cache(label, deployment.kv_blocks, deployment.block_tokens)
            self.enter("SweepingPrefill", f"Measuring prefill of {label}")
            prefill = await meter.prefill(traffic.isl)
            self.enter("SweepingDecode", f"Measuring decode of {label}")
            levels = self._levels(parallel, deployment.kv_blocks, deployment.block_tokens)
            decodes = []
            for number, level in enumerate(levels, 1):
                logger.info("%s: decode %d of %d", label, number, len(levels))
                decodes.append(await meter.decode(traffic.isl, traffic.osl, level))
        return MeasuredEngine(parallel, deployment.kv_tokens, prefill, decodes)

    def _finished(self, parallel: PickedParallelConfig, journal: MeasurementJournal) -> MeasuredEngine | None:
        """Return the measurements of a candidate if the journal has all of them."""
        traffic, label = self.spec.traffic, parallel.label()
        cache = journal.cache(label)
        if cache is None:
            return None
        prefill = journal.find(label, "prefill", traffic.isl, PREFILL_OSL, prefill_concurrency(parallel.dp))
        decodes = [
            journal.find(label, "decode", traffic.isl, traffic.osl, level) for level in self._levels(parallel, *cache)
        ]
        found = [one for one in decodes if one is not None]
        if prefill is None or len(found) < len(decodes):
            return None
        return MeasuredEngine(parallel, cache[0] * cache[1], prefill, found)

    def _levels(self, parallel: PickedParallelConfig, kv_blocks: int, block_tokens: int) -> list[int]:
        """Return the numbers of concurrent answers that are measured."""
        traffic = self.spec.traffic
        sequences = sequences_in(kv_blocks, block_tokens, traffic.isl + traffic.osl)
        most = CONCURRENCY_MAX if sequences is None else min(CONCURRENCY_MAX, sequences)
        return concurrencies(most, self.config.decode_interpolation_granularity, parallel.dp)

    def _picked(self, found: Sequence[MeasuredEngine]) -> tuple[MeasuredEngine, MeasuredEngine, Measurement]:
        """Return the prefill engine, the decode engine and its level with the highest rate per GPU within the objectives."""
        latency = self.spec.latency
        ttft_ms = latency.ttft_ms or latency.e2e_ms or 0.0
        itl_ms = latency.itl_ms or (latency.e2e_ms or 0.0) / self.spec.traffic.osl
        prefill = min(
            found,
            key=lambda one: (
                max(0.0, one.prefill.ttft_ms - ttft_ms),
                one.prefill.ttft_ms * one.parallel.num_gpus / one.parallel.dp,
            ),
        )
        levels = [(one, each) for one in found for each in one.decodes if not each.error]
        decode, level = min(
            levels,
            key=lambda pair: (max(0.0, pair[1].itl_ms - itl_ms), -pair[1].tok_s / pair[0].parallel.num_gpus),
        )
        return prefill, decode, level

    def _configuration(self, prefill: MeasuredEngine, decode: MeasuredEngine, level: Measurement) -> Configuration:
        traffic = self.spec.traffic
        prefill_rps = BUSY_MAX * 1000 * prefill.parallel.dp / prefill.prefill.ttft_ms
        decode_rps = DECODE_SHARE * level.tok_s / traffic.osl
        gpus = (prefill.parallel.num_gpus, decode.parallel.num_gpus)
        x, y = 1, 1
        if not self.spec.has_planner and sum(gpus) <= self.spec.total_gpus:
            x, y = balanced(prefill_rps, decode_rps, *gpus, self.spec.total_gpus)
        return Configuration(
            prefill=EngineChoice(
                parallel=prefill.parallel,
                replicas=x,
                batch=max(1, PREFILL_TOKENS // traffic.isl),
                max_tokens=PREFILL_TOKENS,
                kv_tokens=prefill.kv_tokens,
            ),
            decode=EngineChoice(
                parallel=decode.parallel,
                replicas=y,
                batch=max(1, level.concurrency // decode.parallel.dp),
                kv_tokens=decode.kv_tokens,
            ),
            ttft_ms=prefill.prefill.ttft_ms,
            itl_ms=level.itl_ms,
            request_rate=min(x * prefill_rps, y * decode_rps),
            osl=traffic.osl,
        )

    async def _curves(
        self, prefill: MeasuredEngine, decode: MeasuredEngine, journal: MeasurementJournal
    ) -> tuple[PrefillCurve, DecodeCurve]:
        """Measure both curves; one deployment serves for both if prefill and decode are of one kind."""
        prefills, decodes = PrefillCurve(), DecodeCurve(max(1, decode.kv_tokens))
        for one in dict.fromkeys((prefill.parallel, decode.parallel)):
            async with self._deployed(one, "curves", journal) as (deployment, meter):
                if one == prefill.parallel:
                    await self._prefill_curve(meter, one, prefills)
                if one == decode.parallel:
                    await self._decode_curve(deployment, meter, one, decodes)
        return prefills, decodes

    async def _prefill_curve(self, meter: EngineMeter, one: PickedParallelConfig, curve: PrefillCurve) -> None:
        for isl in prefill_grid(self._max_context(), self.config.prefill_interpolation_granularity):
            found = await meter.prefill(isl)
            if not found.error:
                curve.add(isl, found.ttft_ms, one.num_gpus, one.dp)

    async def _decode_curve(
        self, deployment: RunningDeployment, meter: EngineMeter, one: PickedParallelConfig, curve: DecodeCurve
    ) -> None:
        granularity = self.config.decode_interpolation_granularity
        for isl, levels in decode_grid(self._max_context(), curve.max_kv_tokens, granularity, one.dp):
            most = deployment.sequences(isl + DECODE_OSL)
            for level in levels:
                # A cache that is a few blocks too small for the grid's load would preempt sequences.
                found = await meter.decode(isl, DECODE_OSL, level if most is None else max(1, min(level, most)))
                if not found.error:
                    curve.add(isl, found.concurrency, found.itl_ms, found.tok_s / one.num_gpus)
