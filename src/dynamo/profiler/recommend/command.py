"""`dynamo recommend`: search, progress, and the files of the result."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.profiler.candidates import EngineFamily, candidates
from dynamo.profiler.models import model_config
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.model_shape import ModelShape, model_shape
from dynamo.profiler.recommend import output
from dynamo.profiler.recommend.config import RecommendConfig, gpu_of
from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.exploration import Exploration, best_of, families, front
from dynamo.profiler.recommend.pareto import pareto_page
from dynamo.profiler.recommend.points import correction, parallel_of
from dynamo.profiler.recommend.presets import LOAD_S_MIN, PRESETS
from dynamo.profiler.recommend.rehearsal import rehearsal_graph, write_curves
from dynamo.profiler.recommend.simulation import CandidateDeployment, DeploymentSimulator, SimulatedResult
from dynamo.profiler.spec import ProfileSpec, TrafficTarget
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.replay.load import ReplaySession

INTERRUPTED = 130
REPORT_EVERY_S = 2.0
"""Seconds between two lines of progress where standard error is not a terminal."""


@dataclass(slots=True)
class SearchProgress:
    """Progress of a search, and all results so far: one line that is redrawn on a terminal, otherwise a line now and then."""

    is_terminal: bool
    results: list[SimulatedResult] = field(default_factory=list)
    _shown_s: float = field(default_factory=time.monotonic)

    def show(self, candidate: CandidateDeployment) -> None:
        """Report the simulation that begins."""
        text = f"simulation {len(self.results) + 1}: {candidate.label()}"
        if self.is_terminal:
            sys.stderr.write(f"\r\x1b[K{text[: _columns() - 1]}")
            sys.stderr.flush()
        elif time.monotonic() - self._shown_s >= REPORT_EVERY_S:
            self._shown_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


@dataclass(slots=True)
class RecommendationSearch:
    """The search of one command."""

    config: RecommendConfig
    spec: ProfileSpec
    sessions: Sequence[ReplaySession]
    traffic: TrafficTarget
    engines: Sequence[AnalyticEngine]
    estimate: EstimateError
    progress: SearchProgress
    simulator: DeploymentSimulator = field(init=False)
    results: Sequence[SimulatedResult] = ()
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.simulator = DeploymentSimulator(
            self.engines, self.sessions, config.latency, max_gpus=config.gpus, startup_s=config.startup_time
        )

    def run(self) -> None:
        """Search; after Ctrl-C the results are those of the finished simulations."""
        config = self.config
        exploration = Exploration(
            families=families(self.engines, self.traffic, config.latency, config.gpus),
            rate=self.traffic.request_rate or 1.0,
            requests=len(self.sessions),
            max_gpus=config.gpus,
            share=config.sla_share,
            simulate=self._simulate,
            presets=tuple(PRESETS) if self.uses_presets() else (),
        )
        try:
            exploration.run()
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            self.progress.close()
        self.results = exploration.results or self.progress.results

    def uses_presets(self) -> bool:
        """Return whether planner presets are simulated."""
        return self.config.planner_presets and duration_s(self.sessions) >= LOAD_S_MIN

    def best(self) -> SimulatedResult:
        """Return the recommended deployment, or the nearest to the objectives."""
        return best_of(self.results, self.config.sla_share)

    def slower(self, best: SimulatedResult) -> SimulatedResult | None:
        """Return the outcome of the best deployment if every step takes longer by the error of the estimate."""
        if self.is_interrupted:
            return None
        slowed = [replace(one, efficiency=one.efficiency.slowed(1 + self.estimate.itl)) for one in self.engines]
        try:
            self.progress.show(best.candidate)
            return replace(self.simulator, engines=slowed).run(best.candidate)
        except KeyboardInterrupt:
            self.is_interrupted = True
            return None
        finally:
            self.progress.close()

    def _simulate(self, candidate: CandidateDeployment, limit: int | None) -> SimulatedResult:
        self.progress.show(candidate)
        found = self.simulator.run(candidate, limit)
        self.progress.results.append(found)
        return found


def recommend(argv: Sequence[str], prog: str = "dynamo recommend") -> int:
    """Print the recommendation and write its files; return 1 if no deployment meets the objectives."""
    config = load(RecommendConfig, argv, prog=prog)
    try:
        search = prepared(config)
    except KeyboardInterrupt:
        return INTERRUPTED
    search.run()
    if not search.results:
        if search.is_interrupted:
            return INTERRUPTED
        raise ConfigError(f"--gpus {config.gpus}: no engine of {config.model} fits")
    best = search.best()
    _report(search, best)
    if search.is_interrupted:
        sys.stderr.write("interrupted: the recommendation rests on what had been simulated\n")
        return INTERRUPTED
    return 0 if best.met_share >= config.sla_share else 1


def prepared(config: RecommendConfig) -> RecommendationSearch:
    """Return the search of a command: load, engines and the error of their estimate."""
    spec, sessions = spec_of(config), config.load()
    traffic = traffic_of(config, sessions)
    engines, estimate = engines_of(config, spec, traffic)
    progress = SearchProgress(sys.stderr.isatty())
    return RecommendationSearch(config, spec, sessions, traffic, engines, estimate, progress)


def spec_of(config: RecommendConfig) -> ProfileSpec:
    """Return the specification of the graph."""
    gpu = gpu_of(str(config.gpu))
    return ProfileSpec(
        model=str(config.model),
        backend=config.backend,
        image=config.image,
        gpu=gpu,
        sku=gpu.sku,
        gpus_per_node=config.gpus_per_node or gpu.gpus_per_node,
        total_gpus=config.gpus,
        latency=config.latency,
    )


def traffic_of(config: RecommendConfig, sessions: Sequence[ReplaySession]) -> TrafficTarget:
    """Return mean lengths and rate of the load, which order the candidates."""
    turns = [turn for session in sessions for turn in session.turns]
    if not turns:
        raise ConfigError(f"--trace {config.trace}: has no requests")
    seconds = duration_s(sessions)
    rate = len(turns) / seconds if seconds else config.request_rate or 1.0
    isl = round(mean(turn.input_tokens for turn in turns))
    return TrafficTarget(isl=isl, osl=round(mean(turn.output_tokens for turn in turns)), request_rate=rate)


def duration_s(sessions: Sequence[ReplaySession]) -> float:
    """Return the seconds between the first and the last arrival."""
    times = [turn.at_ms for session in sessions for turn in session.turns if turn.at_ms is not None]
    return (max(times) - min(times)) / 1000 if times else 0.0


def engines_of(
    config: RecommendConfig, spec: ProfileSpec, traffic: TrafficTarget
) -> tuple[list[AnalyticEngine], EstimateError]:
    """Return the engines that fit, and the error of their estimate. Raise `ConfigError` if none fits."""
    shape = model_shape(model_config(spec), spec.model)
    accuracy = EFFICIENCIES[config.backend]
    estimate = EstimateError(itl=accuracy.tpot_error, ttft=accuracy.ttft_error, source=accuracy.source)
    family = EngineFamily(shape=shape, gpu=spec.gpu, gpus_per_node=spec.gpus_per_node, efficiency=accuracy.efficiency)
    if config.points:
        found = correction(config.points, family, parallel_of(config.points_parallel, "--points-parallel"))
        family = replace(family, efficiency=found.efficiency)
        estimate = estimate.corrected(found)
    engines = []
    for one in shapes_of(config, shape):
        engines += candidates(replace(family, shape=one), config.gpus, traffic.isl + traffic.osl)
    if not engines:
        larger = candidates(family, 64 * spec.gpus_per_node, traffic.isl + traffic.osl)
        hint = f"must be {larger[0].gpus} or more" if larger else "no number of GPUs suffices"
        raise ConfigError(
            f"--gpus {config.gpus}: {hint}: {spec.model} has {shape.weight_bytes / 2**30:.0f} GiB of weights"
        )
    return engines, estimate


def shapes_of(config: RecommendConfig, shape: ModelShape) -> list[ModelShape]:
    """Return the model with each type of cached values that is searched."""
    compact = replace(shape, kv_bits=8.0)
    return {"auto": [shape], "fp8": [compact], "search": [shape, compact]}[config.kv_cache_dtype]


def _report(search: RecommendationSearch, best: SimulatedResult) -> None:
    """Print the table and write the files."""
    config, on_front = search.config, front(search.results)
    slower = search.slower(best)
    lines = output.assumptions(config, search.estimate, uses_presets=search.uses_presets())
    is_met = best.met_share >= config.sla_share
    print(output.table(search.results, on_front, config.sla_share, search.estimate))
    print(f"\n{'Recommended' if is_met else 'Nearest to the objectives'}: {output.summary(best)}")
    if not is_met:
        print(
            f"No deployment of {config.gpus} GPUs meets {config.latency.text()} for {100 * config.sla_share:.0f} % of the requests; "
            f"this one does for {100 * best.met_share:.1f} %"
        )
    if slower is not None:
        print(f"How sure: {output.sureness(slower, search.estimate, config.sla_share)}")
    print("\nThis assumes:")
    for line in lines:
        print(f"- {line}")
    found: dict[str, Any] = {
        "recommended": output.as_json(best, search.estimate),
        "meets_objectives": is_met,
        "met_share_if_slower": None if slower is None else slower.met_share,
        "assumptions": lines,
        "results": [output.as_json(one, search.estimate) for one in search.results],
    }
    graph = output.graph(search.spec, best.candidate)
    directory = Path(config.output_dir)
    _write(
        directory,
        {
            "recommendation.json": json.dumps(found, indent=2) + "\n",
            "pareto.html": pareto_page(search.results, best, config.sla_share, search.estimate),
            "launch.sh": output.launch_commands(config, best.candidate),
            "compose.yaml": yaml.safe_dump(output.compose(config, best.candidate), sort_keys=False),
            "graph.yaml": yaml.safe_dump_all(graph, sort_keys=False),
            "rehearsal.yaml": yaml.safe_dump(_rehearsal(search, best.candidate, directory), sort_keys=False),
        },
    )


def _rehearsal(search: RecommendationSearch, candidate: CandidateDeployment, directory: Path) -> KubeObject:
    """Write the curves of the recommended engines, and return a graph of simulated ones that read them."""
    engines = {role: search.simulator.engine(choice) for role, choice in output.roles(candidate)}
    decode = engines.get("decode") or engines[None]
    folder = write_curves(directory, engines.get("prefill") or decode, decode)
    return rehearsal_graph(search.spec, candidate, engines, folder)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of the result. Raise `ConfigError` if one cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--output-dir {directory}: {error.strerror or error}") from None
    print(f"\nWritten to {directory}: {', '.join(files)}")
