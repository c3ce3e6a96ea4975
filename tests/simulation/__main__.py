"""`SEED=123 python -m tests.simulation` replays one seed; `SEEDS=10000 python -m tests.simulation` looks for one."""

import os
import sys
import time

from tests.simulation.runs import Report, run_everywhere
from tests.simulation.world import World


def replay(seed: int) -> int:
    """Prints everything that happens under one seed."""
    world = World(seed).run()
    print(f"{world.scenario}\n")
    print("\n".join(world.events))
    print(f"\n{world.loop.callbacks} callbacks, digest {world.digest()[:16]}")
    for violation in world.violations:
        print(f"VIOLATION  {violation}")
    return 1 if world.violations else 0


def search(first: int, count: int) -> int:
    """Runs many seeds; prints how to replay each that failed."""
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
