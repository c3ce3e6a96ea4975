"""Scale: cost of a routing decision, of a cache event, of a replica's message, of metrics and of discovery.

    python -m benchmarks.scale [--quick]

Against the number of workers (8 to 4,096), the number of frontends (messages of a replica), and the size of the index (10^5 to
10^7 blocks). Every case runs in a process of its own. docs/scale.md shows the result and derives from it what saturates first.
"""

import asyncio
import concurrent.futures
import math
import multiprocessing
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import scale_cases
from benchmarks.report import number, print_line, table, write_result
from benchmarks.scale_joins import joins
from dynamo.core.clock import SystemClock
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.interpreter import configure_interpreter
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import Router
from dynamo.routing.sync.replica_sync import ReplicaSync

WORKERS = (8, 64, 256, 1024, 4096)
SIZES = (10**5, 10**6, 10**7)
POLICIES: tuple[scale_cases.Policy, ...] = ("dynamo", "balanced")
DECISIONS = 400
JOINING = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBench:
    """Cost against the size of a deployment."""

    rounds: int = option(3, "--rounds", None, "Turns of the cases within a process; figures are medians")
    frontends: int = option(2, "--frontends", None, "Frontends that must notice the workers that join")
    quick: bool = option(False, "--quick", None, "One round, up to a million blocks, and no results file")


def prepared(work: Callable[[], Any]) -> Any:
    """Run a case with the garbage collector as a server has it."""
    configure_interpreter()
    return work()


def apart(work: Callable[[], Any]) -> Any:
    """Return the result of a case that runs in a new process."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(prepared, work).result()


def replica_message(workers: int) -> float:
    """Return the microseconds that one request of another router takes."""

    async def measure() -> float:
        from tests.cluster.memory import MemoryCluster

        cluster = MemoryCluster()
        router = Router(RoutingConfig(block_size=scale_cases.BLOCK_SIZE, use_kv_events=False), random.Random(1))
        sync = ReplicaSync(cluster.runtime(), scale_cases.ENDPOINT, router, SystemClock())
        found = scale_cases.replica_message(sync, router, workers)
        await cluster.shutdown()
        return found

    return asyncio.run(measure())


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def by_workers(config: ScaleBench) -> dict[str, dict[str, float]]:
    """Return the costs that may depend on the number of workers; the turns of the sizes alternate."""
    cases: dict[str, list[dict[str, float]]] = {str(workers): [] for workers in WORKERS}
    for _ in range(1 if config.quick else config.rounds):
        for workers in WORKERS:
            found: dict[str, float] = {}
            for policy in POLICIES:
                made = apart(partial(scale_cases.decision, workers, policy, DECISIONS))
                found |= {f"{policy}_{name}": value for name, value in made.items()}
            found |= apart(partial(scale_cases.metrics, workers))
            found["replica_us"] = apart(partial(replica_message, workers))
            print_line(f"{workers} workers: {', '.join(f'{name} {number(value)}' for name, value in found.items())}")
            cases[str(workers)].append(found)
    return {workers: medians(turns) for workers, turns in cases.items()}


def by_size(config: ScaleBench) -> dict[str, dict[str, float]]:
    """Return the costs that may depend on the number of blocks in the index."""
    cases = {}
    for size in SIZES[:-1] if config.quick else SIZES:
        cases[str(size)] = found = apart(partial(scale_cases.index, size))
        print_line(f"{size} blocks: {', '.join(f'{name} {number(value)}' for name, value in found.items())}")
    return cases


def summary(workers: dict[str, dict[str, float]], sizes: dict[str, dict[str, float]]) -> str:
    """Return the most important figures as a table."""
    rows = [
        [
            f"{count} workers",
            *(number(found[f"{policy}_decision_us"]) for policy in POLICIES),
            number(found["render_ms"]),
        ]
        for count, found in workers.items()
    ]
    text = table(["", *(f"decision, {policy}, µs" for policy in POLICIES), "metrics page, ms"], rows)
    longest = [
        [f"10^{math.log10(int(size)):.0f} blocks", number(found["stored_ns"]), number(found["stored_pause_ms"])]
        for size, found in sizes.items()
    ]
    return text + "\n\n" + table(["", "stored, ns a block", "longest event, ms"], longest)


def main() -> int:
    config = load(ScaleBench, sys.argv[1:], prog="python -m benchmarks.scale")
    found: dict[str, Any] = {
        "hashing_us": apart(scale_cases.hashing),
        "decoded_ns": apart(scale_cases.decoded_event),
    }
    found["workers"], found["index"] = by_workers(config), by_size(config)
    found["joins"] = joins(200 if config.quick else JOINING, config.frontends)
    print_line(f"joins: {found['joins']}")
    print_line(summary(found["workers"], found["index"]))
    print_line(write_result("scale", found, is_whole=not config.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
