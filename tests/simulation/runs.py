"""Runs of many seeds, sequential or on every core, and the command that replays a failed one."""

import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.simulation import Simulation

BATCH = 25


@dataclass
class Report:
    """Result of some seeds."""

    seeds: int = 0
    failures: list[str] = field(default_factory=list)
    """A line for each seed that failed."""
    seen: Counter[str] = field(default_factory=Counter)
    """Counts of faults, statuses, migrated streams and lost messages."""

    def add(self, other: "Report") -> None:
        self.seeds += other.seeds
        self.failures += other.failures
        self.seen += other.seen


def run(seeds: Iterable[int]) -> Report:
    """Run seeds in this process."""
    report = Report()
    for seed in seeds:
        report.seeds += 1
        try:
            simulation = Simulation(seed).run()
        except Exception:
            report.failures.append(f"{replay_line(seed)}  # {traceback.format_exc()}")
            continue
        report.seen += simulation.seen
        if simulation.violations:
            report.failures.append(f"{replay_line(seed)}  # {simulation.violations[0]}")
    return report


def run_everywhere(first: int, count: int) -> Iterator[Report]:
    """Run that many seeds on all cores, in batches."""
    batches = [range(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(run, batches)


def replay_line(seed: int) -> str:
    return f"SEED={seed} .venv/bin/python -m tests.simulation"
