"""Quality and cost of the search of `dynamo recommend`, against every configuration of its grid.

    python -m benchmarks.recommend_search [--trace conversation.jsonl.gz] [--requests N]

For three generated loads, and the first requests of a trace, all aggregated and disaggregated deployments of up to four GPUs, with
all batch limits, router policies and queue policies, are simulated under the whole load. The search may use a tenth of that cost, counted in simulated
requests, and must find a deployment whose goodput per GPU is within 3 % of the best one that meets the objectives.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report import print_line, table, write_result
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.recommend.command import engines_of, spec_of, traffic_of
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.exploration import BATCHES, Exploration, best_of, configuration, families
from dynamo.profiler.recommend.routers import ROUTERS
from dynamo.profiler.recommend.simulation import CandidateDeployment, DeploymentSimulator, SimulatedResult
from dynamo.profiler.search import PREFILL_TOKENS, EngineChoice

GPUS = 4
REQUESTS = 200
LIMIT, COST = 0.03, 0.1
REPORT_EVERY = 25
BASE = RecommendConfig(model="Qwen/Qwen3-8B", gpu="h100_sxm", gpus=GPUS, request_rate=1.0)
LOADS = {
    "long prompts": replace(BASE, isl=6000, osl=150, request_rate=8.0, ttft=1000.0, itl=25.0),
    "long answers": replace(BASE, isl=800, osl=800, request_rate=9.0, ttft=500.0, itl=20.0),
    "common prefixes": replace(BASE, isl=6000, osl=250, request_rate=14.0, prefix_share=0.7, ttft=1000.0, itl=25.0),
}


def grid(engines: list[AnalyticEngine], isl: int) -> Iterator[CandidateDeployment]:
    """Yield every deployment of at most `GPUS` GPUs."""
    for decode in engines:
        for batch in BATCHES:
            for router in ROUTERS:
                for y in range(1, GPUS // decode.gpus + 1):
                    role = EngineChoice(parallel=decode.parallel, replicas=y, batch=batch)
                    yield CandidateDeployment(configuration(role, None), router)
                    for prefill in engines:
                        for x in range(1, (GPUS - y * decode.gpus) // prefill.gpus + 1):
                            other = EngineChoice(
                                parallel=prefill.parallel,
                                replicas=x,
                                batch=max(1, PREFILL_TOKENS // isl),
                                max_tokens=PREFILL_TOKENS,
                            )
                            yield CandidateDeployment(configuration(role, other), router)


def simulated(
    name: str, simulator: DeploymentSimulator, candidates: Sequence[CandidateDeployment]
) -> list[SimulatedResult]:
    """Return the outcomes of all candidates, with progress on standard error."""
    found = []
    for number, one in enumerate(candidates, 1):
        found.append(simulator.run(one))
        if number % REPORT_EVERY == 0 or number == len(candidates):
            print(f"{name}: {number} of {len(candidates)} configurations simulated", file=sys.stderr, flush=True)
    return found


def compare(name: str, config: RecommendConfig) -> dict[str, Any]:
    """Return the best of the grid and of the search, with their costs."""
    sessions = config.load()
    traffic = traffic_of(config, sessions)
    engines, _ = engines_of(config, spec_of(config), traffic)
    began = time.process_time()
    brute = DeploymentSimulator(engines, sessions, config.latency)
    everything = simulated(name, brute, list(grid(engines, traffic.isl)))
    spent_s = time.process_time() - began
    feasible = [one for one in everything if one.met_share >= config.sla_share]
    best = max(feasible, key=lambda one: one.goodput_per_gpu) if feasible else best_of(everything, config.sla_share)
    began = time.process_time()
    mine = DeploymentSimulator(engines, sessions, config.latency)
    search = Exploration(
        families=families(engines, traffic, config.latency, config.gpus),
        rate=traffic.request_rate or 1.0,
        requests=len(sessions),
        max_gpus=config.gpus,
        share=config.sla_share,
        simulate=mine.run,
    )
    found = search.run()
    assert found is not None
    result = {
        "configurations": len(everything),
        "simulations of the search": len(search.results),
        "feasible": len(feasible),
        "best": best.candidate.label(),
        "best goodput per GPU": round(best.goodput_per_gpu, 1),
        "found": found.candidate.label(),
        "found goodput per GPU": round(found.goodput_per_gpu, 1),
        "found met share": round(found.met_share, 4),
        "loss": round(1 - found.goodput_per_gpu / best.goodput_per_gpu, 4) if best.goodput_per_gpu else 0.0,
        "cost": round(mine.simulated_requests / brute.simulated_requests, 4),
        "CPU seconds": round(time.process_time() - began, 1),
        "CPU seconds of the grid": round(spent_s, 1),
    }
    print_line(f"{name}: {result}")
    return result


def main() -> int:
    """Print the comparison; return 1 where the search misses its aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="Mooncake conversation trace")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    loads = {name: replace(config, requests=options.requests) for name, config in LOADS.items()}
    if options.trace:
        loads["conversation trace"] = replace(
            BASE, trace=options.trace, request_rate=None, requests=options.requests, ttft=4000.0, itl=50.0
        )
    found = {name: compare(name, config) for name, config in loads.items()}
    rows = [
        [name, *(str(one[key]) for key in ("configurations", "best", "found", "loss", "cost"))]
        for name, one in found.items()
    ]
    print_line(table(["load", "configurations", "best", "found", "loss", "cost"], rows, words=4))
    is_whole = bool(options.trace) and options.requests == REQUESTS
    print_line(write_result("recommend_search", {"loads": found}, is_whole=is_whole))
    return int(any(one["loss"] > LIMIT or one["cost"] > COST for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
