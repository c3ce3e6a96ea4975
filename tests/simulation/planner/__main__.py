"""`SEED=123 python -m tests.simulation.planner` replays one seed; `SEEDS=1000 python -m tests.simulation.planner` runs many."""

import logging
import os
import sys

from tests.simulation.planner.simulation import check, describe


def main() -> int:
    """Run the seeds of the environment; return 1 if one violates an invariant."""
    logging.disable(logging.CRITICAL)
    if "SEED" in os.environ:
        events, violations, scenario = describe(int(os.environ["SEED"]))
        print(scenario, *events, *(f"VIOLATION  {one}" for one in violations), sep="\n")
        return 1 if violations else 0
    first, count = int(os.environ.get("FIRST", "0")), int(os.environ.get("SEEDS", "200"))
    failed = 0
    for seed in range(first, first + count):
        if violations := check(seed):
            failed += 1
            print(f"SEED={seed} python -m tests.simulation.planner  # {violations[0]}", flush=True)
    print(f"{count} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
