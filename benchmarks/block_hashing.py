"""Block hashing: processor time per block of our two implementations and of the released bindings, in turns.

    python -m benchmarks.block_hashing [--rounds 7] [--quick]

All hash the same tokens, which are a list of Python integers. The released bindings run in a process of their own.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.block_hashing_cases import measured
from benchmarks.peer import PeerMissing, ensure_peer
from benchmarks.report import machine, number, print_line, ratio, table, write_result
from dynamo.core.config import exit_on_config_error, load, option

TIMEOUT_S = 120
COMPILED, PLAIN, THEIRS = "ours, C", "ours, Python", "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class HashingBench:
    """Options of the program."""

    rounds: int = option(7, "--rounds", None, "Turns of each implementation; figures are medians")
    quick: bool = option(False, "--quick", None, "Two rounds, and no result file")


def released(python: str) -> dict[str, float]:
    """Measure the released bindings."""
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        [python, os.path.join(folder, "block_hashing_peer.py")],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, print a table and write the result file."""
    from dynamo.tokens import hashing

    config = load(HashingBench, sys.argv[1:])
    sides: dict[str, Callable[[], dict[str, float]]] = {PLAIN: lambda: measured(hashing.python_packed_block_hashes)}
    if hashing.packed_block_hashes is hashing.python_packed_block_hashes:
        print_line("the compiled implementation is not installed")
    else:
        sides = {COMPILED: lambda: measured(hashing.packed_block_hashes), **sides}
    try:
        python = ensure_peer()
        sides[THEIRS] = lambda: released(python)
    except PeerMissing as error:
        print_line(f"without the released bindings: {error}")
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(2 if config.quick else config.rounds):
        for name, side in sides.items():
            turns[name].append(side())
    medians = {
        name: {case: statistics.median(turn[case] for turn in made) for case in made[0]} for name, made in turns.items()
    }
    theirs = medians.get(THEIRS, {})
    rows = [
        [
            case,
            *(number(medians[name][case]) for name in sides),
            ratio(medians[next(iter(sides))][case], theirs.get(case)),
        ]
        for case in medians[PLAIN]
    ]
    print_line(table(["ns per block", *sides, "ratio"], rows))
    found = {"machine": machine(), "medians": medians, "turns": turns}
    print_line(write_result("block_hashing", found, is_whole=not config.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
