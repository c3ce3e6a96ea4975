"""Memory of idle streams at both ends, ours and the released bindings', in one run.

    python -m benchmarks.idle_streams [--streams 10000] [--their-streams 10000]

A worker answers every request with one token and then sends nothing; a caller holds all these responses open. Resident
memory of both processes is read before and after. Socket memory of the kernel is not included: ours share one
connection between the two processes, the released ones have one each.
"""

import sys
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.plane import allow_many_files, pair, pythons
from benchmarks.report import write_result
from dynamo.core.config import exit_on_config_error, load, option

WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleStreamsBench:
    """Open streams without traffic."""

    streams: int = option(10_000, "--streams", None, "Streams to hold open")
    their_streams: int = option(10_000, "--their-streams", None, "The same for the released bindings")
    quick: bool = option(False, "--quick", None, "A tenth of them, and no results file")


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of resident memory for each stream."""

    streams: int
    caller_bytes: float
    worker_bytes: float


def measure(python: str, streams: int) -> Figures:
    with pair(python, python) as (caller, worker):
        caller.do("run", calls=WARM_UP, concurrency=WARM_UP, tokens=1)
        parties = (caller, worker)
        before = [party.do("used")["rss_bytes"] for party in parties]
        held = caller.do("hold", streams=streams)["streams"]
        assert held == streams, f"{held} streams of {streams} are open"
        after = [party.do("used")["rss_bytes"] for party in parties]
        return Figures(streams, *((late - early) / streams for early, late in zip(before, after, strict=True)))


def main() -> int:
    config = load(IdleStreamsBench, sys.argv[1:], prog="python -m benchmarks.idle_streams")
    share = 10 if config.quick else 1
    counts = {"ours": config.streams // share, "theirs": config.their_streams // share}
    allow_many_files(2 * max(counts.values()) + 1000)
    figures: dict[str, Figures] = {}
    print(f"{'':<8}{'streams':>9}{'caller, B each':>16}{'worker, B each':>16}")
    for name, python in pythons().items():
        one = figures[name] = measure(python, counts[name])
        print(f"{name:<8}{one.streams:>9}{one.caller_bytes:>16.0f}{one.worker_bytes:>16.0f}")
    result: dict[str, Any] = {name: asdict(one) for name, one in figures.items()}
    if "theirs" in figures:
        ours, theirs = (figures[name].caller_bytes + figures[name].worker_bytes for name in ("ours", "theirs"))
        result["ratio"] = ours / theirs
        print(f"ours/theirs, both ends: {ours / theirs:.2f}")
    kept = {"settings": asdict(config), "figures": result}
    print(f"written to {write_result('idle_streams', kept, is_whole=not config.quick)}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
