"""Simulation of one deployment under the load: the production router, and engines with estimated step times."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.mocker.simulation.timing import StepTimes
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.recommend.presets import preset_config, simulated_planner
from dynamo.profiler.recommend.routers import RouterChoice
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import LatencyTarget
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.report import Objectives, rows_of, summary_of
from dynamo.replay.scenario import Scenario

BLOCK_TOKENS = 64
TRANSFER_GB_S = 50.0
"""Bandwidth of KV transfers per GPU of a prefill engine."""


class EstimatedEngine(EngineArgs, frozen=True, kw_only=True):
    """Arguments of a simulated engine whose step times are those of the performance model."""

    step_times: AnalyticEngine

    def timing(self) -> StepTimes:
        """Return the step time model."""
        return self.step_times


@dataclass(frozen=True, slots=True)
class CandidateDeployment:
    """A deployment to simulate."""

    config: Configuration
    router: RouterChoice
    preset: str | None = None
    """Preset of the planner that scales the engines; None: their number is constant."""

    @property
    def gpus(self) -> int:
        """Return the GPUs of all engines; those at the start if a planner scales them."""
        return self.config.gpus

    def label(self) -> str:
        """Return a short description that differs for all candidates."""
        decode, prefill = self.config.decode, self.config.prefill
        parts = [] if prefill is None else [f"prefill {prefill.replicas}x{prefill.parallel.label()}"]
        role = "decode" if prefill else "aggregated"
        parts.append(f"{role} {decode.replicas}x{decode.parallel.label()} batch {decode.batch}")
        cache = "" if decode.kv_dtype == "auto" else f", {decode.kv_dtype} cache"
        planner = "" if self.preset is None else f", planner {self.preset}"
        return f"{' + '.join(parts)}{cache}, {self.router.label()}{planner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResult:
    """Outcome of one simulation."""

    candidate: CandidateDeployment
    requests: int
    met_share: float
    """Share of all requests that met the objectives; unanswered ones did not."""
    goodput: float
    """Output tokens per second of requests that met the objectives."""
    output_tok_s: float
    ttft_ms: float
    """Mean time to first token."""
    p95_ttft_ms: float
    itl_ms: float
    """Mean inter-token latency."""
    e2e_ms: float
    """Mean latency of a request."""
    reused_share: float
    """Share of prompt tokens found in a cache."""
    mean_gpus: float
    """GPUs in use on average, those of starting engines included."""

    @property
    def goodput_per_gpu(self) -> float:
        """Return the goodput per GPU."""
        return self.goodput / self.mean_gpus


@dataclass(slots=True)
class DeploymentSimulator:
    """Simulator of candidates under one load; it counts what it simulates."""

    engines: Sequence[AnalyticEngine]
    sessions: Sequence[ReplaySession]
    latency: LatencyTarget
    max_gpus: int = 8
    """GPUs that a planner may use."""
    startup_s: float = 0.0
    """Seconds until an engine that a planner adds is ready."""
    simulated_requests: int = 0
    _by_key: dict[tuple[str, str], AnalyticEngine] = field(init=False)

    def __post_init__(self) -> None:
        self._by_key = {(one.parallel.label(), one.kv_dtype): one for one in self.engines}

    def engine(self, choice: EngineChoice) -> AnalyticEngine:
        """Return the performance model of an engine."""
        return self._by_key[choice.parallel.label(), choice.kv_dtype]

    def run(self, candidate: CandidateDeployment, limit: int | None = None) -> SimulatedResult:
        """Return the outcome of a candidate under the first `limit` sessions, or all."""
        sessions = self.sessions if limit is None else self.sessions[:limit]
        outcome = self._scenario(candidate, sessions).run()
        rows = rows_of(outcome.flights)
        # Steps do not contain the time that a request spends outside of the engine.
        request_ms = self.engine(candidate.config.decode).request_ms()
        objectives = Objectives(ttft_ms=(self.latency.ttft_ms or 0.0) - request_ms, itl_ms=self.latency.itl_ms)
        found = summary_of(outcome, rows, objectives)
        total = found["num_requests"]
        self.simulated_requests += total
        return SimulatedResult(
            candidate=candidate,
            requests=total,
            met_share=sum(objectives.are_met(row) for row in rows) / total if total else 0.0,
            goodput=found["goodput_tok_s"] or 0.0,
            output_tok_s=found["output_throughput_tok_s"] or 0.0,
            ttft_ms=(found["mean_ttft_ms"] or 0.0) + request_ms,
            p95_ttft_ms=(found["p95_ttft_ms"] or 0.0) + request_ms,
            itl_ms=found["mean_itl_ms"] or 0.0,
            e2e_ms=(found["mean_e2e_latency_ms"] or 0.0) + request_ms,
            reused_share=found["prefix_cache_reused_ratio"] or 0.0,
            mean_gpus=found.get("mean_gpus") or float(candidate.gpus),
        )

    def _scenario(self, candidate: CandidateDeployment, sessions: Sequence[ReplaySession]) -> Scenario:
        config, preset = candidate.config, candidate.preset
        prefill, decode = config.prefill, self._args(config.decode)
        prefill_args = None if prefill is None else self._args(prefill)
        planner = None
        if preset is not None:
            settings = preset_config(preset, config, self.latency, self.max_gpus)
            planner = functools.partial(simulated_planner, settings, decode, prefill_args)
        return Scenario(
            sessions=sessions,
            workers=config.decode.replicas,
            prefill_workers=None if prefill is None else prefill.replicas,
            engine=decode,
            prefill_engine=prefill_args,
            router_mode=candidate.router.mode,
            router_settings=candidate.router.settings(),
            planner=planner,
            gpus_per_worker=((prefill or config.decode).parallel.num_gpus, config.decode.parallel.num_gpus),
        )

    def _args(self, choice: EngineChoice) -> EstimatedEngine:
        engine = self.engine(choice)
        ranks = engine.parallel.dp
        return EstimatedEngine(
            step_times=engine,
            num_gpu_blocks=max(1, engine.kv_tokens() // ranks // BLOCK_TOKENS),
            block_size=BLOCK_TOKENS,
            max_num_seqs=choice.batch,
            max_num_batched_tokens=choice.max_tokens,
            startup_time=self.startup_s,
            dp_size=ranks,
            kv_bytes_per_token=round(engine.shape.kv_bytes_per_token),
            kv_transfer_bandwidth=TRANSFER_GB_S * engine.parallel.tp,
        )
