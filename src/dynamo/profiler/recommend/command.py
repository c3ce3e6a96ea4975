"""`dynamo recommend`: search, progress, and the files of the result."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import yaml

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.profiler.candidates import EngineFamily, candidates
from dynamo.profiler.models import model_config
from dynamo.profiler.perf.analytic_engine import AnalyticEngine, Efficiency
from dynamo.profiler.perf.calibration import EnginePoint, fit
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.recommend import output
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.exploration import Exploration, best_of, families, front
from dynamo.profiler.recommend.simulation import CandidateDeployment, DeploymentSimulator, SimulatedResult
from dynamo.profiler.spec import ProfileSpec, TrafficTarget
from dynamo.replay.load import ReplaySession
from dynamo.replay.page import plot, small_page

INTERRUPTED = 130


class PointOfUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured closed loop of the user's engine, as in `dynamo replay fit`, with its parallelism."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    tp: int = 1
    pp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    tok_s: float | None = None


@dataclass(slots=True)
class SearchProgress:
    """Progress of a search on one line of a terminal, and all results so far."""

    is_shown: bool
    results: list[SimulatedResult] = field(default_factory=list)

    def show(self, candidate: CandidateDeployment) -> None:
        """Draw the simulation that begins."""
        if self.is_shown:
            sys.stderr.write(f"\r\x1b[Ksimulation {len(self.results) + 1}: {candidate.label()[:100]}")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the line."""
        if self.is_shown:
            sys.stderr.write("\r\x1b[K")


def recommend(argv: Sequence[str], prog: str = "dynamo recommend") -> int:
    """Print the recommendation and write its files; return 1 if no deployment meets the objectives."""
    config = load(RecommendConfig, argv, prog=prog)
    spec = spec_of(config)
    sessions = config.load()
    traffic = traffic_of(config, sessions)
    engines, is_corrected = engines_of(config, spec, traffic)
    simulator = DeploymentSimulator({one.parallel.label(): one for one in engines}, sessions, config.latency)
    progress = SearchProgress(sys.stderr.isatty())

    def simulate(candidate: CandidateDeployment, limit: int | None) -> SimulatedResult:
        progress.show(candidate)
        found = simulator.run(candidate, limit)
        progress.results.append(found)
        return found

    exploration = Exploration(
        families=families(engines, traffic, config.latency, config.gpus),
        rate=traffic.request_rate or 1.0,
        requests=len(sessions),
        max_gpus=config.gpus,
        share=config.sla_share,
        simulate=simulate,
    )
    is_interrupted = False
    try:
        exploration.run()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        progress.close()
    results = exploration.results or progress.results
    if not results:
        if is_interrupted:
            return INTERRUPTED
        raise ConfigError(f"--gpus {config.gpus}: no engine of {config.model} fits")
    _report(config, spec, results, is_corrected=is_corrected)
    if is_interrupted:
        sys.stderr.write("interrupted: the recommendation rests on what had been simulated\n")
        return INTERRUPTED
    return 0 if best_of(results, config.sla_share).met_share >= config.sla_share else 1


def spec_of(config: RecommendConfig) -> ProfileSpec:
    """Return the specification of the graph."""
    gpu = gpu_spec(str(config.gpu))
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
    times = [turn.at_ms for turn in turns if turn.at_ms is not None]
    seconds = (max(times) - min(times)) / 1000 if times else 0.0
    rate = len(turns) / seconds if seconds else config.request_rate or 1.0
    isl = round(mean(turn.input_tokens for turn in turns))
    return TrafficTarget(isl=isl, osl=round(mean(turn.output_tokens for turn in turns)), request_rate=rate)


def engines_of(config: RecommendConfig, spec: ProfileSpec, traffic: TrafficTarget) -> tuple[list[AnalyticEngine], bool]:
    """Return the engines that fit, and whether the user's points corrected them. Raise `ConfigError` if none fits."""
    shape = model_shape(model_config(spec), spec.model)
    family = EngineFamily(
        shape=shape,
        gpu=spec.gpu,
        gpus_per_node=spec.gpus_per_node,
        efficiency=EFFICIENCIES[config.backend].efficiency,
    )
    if config.points is not None:
        family = replace(family, efficiency=corrected(config.points, family))
    engines = candidates(family, config.gpus, traffic.isl + traffic.osl)
    if not engines:
        larger = candidates(family, 64 * spec.gpus_per_node, traffic.isl + traffic.osl)
        hint = f"must be {larger[0].gpus} or more" if larger else "no number of GPUs suffices"
        raise ConfigError(
            f"--gpus {config.gpus}: {hint}: {spec.model} has {shape.weight_bytes / 2**30:.0f} GiB of weights"
        )
    return engines, config.points is not None


def corrected(path: str, family: EngineFamily) -> Efficiency:
    """Return the efficiencies that the user's points correct. Raise `ConfigError` for a file that cannot be read."""
    from dynamo.planner.config.parallelization import PickedParallelConfig

    try:
        points = msgspec.json.decode(Path(path).read_bytes(), type=list[PointOfUser])
    except OSError as error:
        raise ConfigError(f"--points {path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--points {path}: {error}") from None
    if not points:
        raise ConfigError(f"--points {path}: must have one point or more")
    measured = []
    for one in points:
        parallel = PickedParallelConfig(tp=one.tp, pp=one.pp, dp=one.dp, moe_tp=one.moe_tp, moe_ep=one.moe_ep)
        measured.append(
            EnginePoint(
                engine=family.engine(parallel),
                isl=one.input_tokens,
                osl=one.output_tokens,
                batch=max(1, one.concurrency // one.dp),
                ttft_ms=one.ttft_ms,
                tpot_ms=one.tpot_ms,
            )
        )
    return fit(measured, family.efficiency)


def _report(
    config: RecommendConfig, spec: ProfileSpec, results: Sequence[SimulatedResult], *, is_corrected: bool
) -> None:
    """Print the table and write the files."""
    best, on_front = best_of(results, config.sla_share), front(results)
    lines = output.assumptions(config, EFFICIENCIES[config.backend], is_corrected=is_corrected)
    is_met = best.met_share >= config.sla_share
    print(output.table(results, on_front, config.sla_share))
    print(
        f"\n{'Recommended' if is_met else 'Nearest to the objectives'}: {best.candidate.label()}, {best.candidate.gpus} GPUs"
    )
    if not is_met:
        print(
            f"No deployment of {config.gpus} GPUs meets {config.latency.text()} for {100 * config.sla_share:.0f} % of the requests; "
            f"this one does for {100 * best.met_share:.1f} %"
        )
    print("\nThis assumes:")
    for line in lines:
        print(f"- {line}")
    directory = Path(config.output_dir)
    points = [(one.e2e_ms / 1000, one.goodput_per_gpu) for one in on_front]
    title = "Goodput per GPU (tokens/s) by mean latency of a request"
    found: dict[str, Any] = {
        "recommended": output.as_json(best),
        "meets_objectives": is_met,
        "assumptions": lines,
        "results": [output.as_json(one) for one in results],
    }
    files = {
        "recommendation.json": json.dumps(found, indent=2) + "\n",
        "pareto.html": small_page("Recommendation", plot(title, {"Pareto front": points}, "s")),
        "launch.sh": output.launch_commands(config, best.candidate),
        "compose.yaml": yaml.safe_dump(output.compose(config, best.candidate), sort_keys=False),
        "graph.yaml": yaml.safe_dump(output.graph(spec, best.candidate), sort_keys=False),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"--output-dir {directory}: {error.strerror or error}") from None
    print(f"\nWritten to {directory}: {', '.join(files)}")
