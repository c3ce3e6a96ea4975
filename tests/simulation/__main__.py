"""`SEED=123 python -m tests.simulation` replays one seed; `SEEDS=10000 python -m tests.simulation` looks for one."""

import os
import sys
import time

from tests.simulation.runs import Report, run_everywhere
from tests.simulation.simulation import Simulation


def replay(seed: int) -> int:
    """Print all events of one seed."""
    simulation = Simulation(seed).run()
    print(f"{simulation.scenario}\n")
    print("\n".join(simulation.events))
    print(f"\n{simulation.loop.callbacks} callbacks, digest {simulation.digest()[:16]}")
    for violation in simulation.violations:
        print(f"VIOLATION  {violation}")
    return 1 if simulation.violations else 0


def search(first: int, count: int) -> int:
    """Run many seeds; print a replay command for each that failed."""
    began, report = time.perf_counter(), Report()
    for part in run_everywhere(first, count):
        report.add(part)
        for failure in part.failures:
            print(failure, flush=True)
    print(", ".join(f"{what} {number}" for what, number in sorted(report.seen.items())))
    print(f"{report.seeds} seeds in {time.perf_counter() - began:.1f} s, {len(report.failures)} failed")
    return 1 if report.failures else 0


def main() -> int:
    if "SEED" in os.environ:
        return replay(int(os.environ["SEED"]))
    return search(int(os.environ.get("FIRST", "0")), int(os.environ.get("SEEDS", "200")))


if __name__ == "__main__":
    sys.exit(main())
