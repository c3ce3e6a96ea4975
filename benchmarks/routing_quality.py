"""Quality of routing decisions: simulated latency of every policy on training loads and on held-out loads.

    python -m benchmarks.routing_quality [--trace TRACE] [--seeds 3] [--requests 600] [--jobs 1]
    python -m benchmarks.routing_quality --tune      constants of `balanced`, on the training loads only
    python -m benchmarks.routing_quality --tables    write the tables of the committed result file into docs/balanced.md

The loads are in `benchmarks/routing_loads.py`, training and held-out loads kept apart. Eight workers with the mocker's engines
and the router's own code, in virtual time: equal commands give equal figures, on any machine. Strengths are shares of the rate
at which the cluster saturates: light 0.2, near 0.75, over 1.25. KV events reach the router immediately, and on held-out loads near
saturation also after 5 and 50 ms. Lag, training loads, and the policies of `ONCE` have one seed. Finished cells are kept in a file and not run again.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import dynamo
from benchmarks import routing_loads
from benchmarks.corpus import cache_dir
from benchmarks.report import RESULTS, machine, print_line, write_result
from benchmarks.routing_cases import case_tables, cases
from benchmarks.routing_loads import WORKERS, loads
from benchmarks.routing_tables import tables
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.kv_router import balanced
from dynamo.replay.outcome import Flight, RunOutcome
from dynamo.replay.report import RequestRow, percentile, rows_of, summary_of
from dynamo.replay.scenario import Scenario

QUEUE = {"queue_threshold": 1.0, "queue_policy": "wspt"}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "round-robin": ("round_robin", {}),
    "least-loaded": ("least_loaded", {}),
    "power-of-two": ("power_of_two", {}),
    "kv default": ("kv_router", {}),
    "kv tuned": ("kv_router", {"prefill_load_scale": 32}),
    "kv tuned, queue": ("kv_router", {"prefill_load_scale": 32, **QUEUE}),
    "preble": ("preble", {}),
    "balanced": ("balanced", {}),
}
"""`kv tuned` has the best settings of upstream's cost on the first half of the recorded trace."""
LAGGED = ("kv tuned", "preble", "balanced")
ONCE = ("power-of-two", "kv tuned, queue")
"""Policies that run with the first seed only: they are never far from least-loaded and kv tuned."""
STRENGTHS = {"light": 0.2, "near": 0.75, "over": 1.25}
LAGS_MS = (0, 5, 50)
TENANT_REQUESTS = 10
"""Requests of a common beginning from which it counts as a tenant."""
SIMULATED = ("kv_router", "mocker", "replay", "tokens")
"""Packages that determine the figures."""
LONGEST = 0.05
"""Share of the requests that counts as the longest prompts."""
PAGE = Path(__file__).parent.parent / "docs" / "balanced.md"
BEGIN, END = "<!-- tables of benchmarks/results/routing_quality.json -->", "<!-- end of the tables -->"
GRID: dict[str, tuple[float, ...]] = {
    "RECOMPUTE_WEIGHT_IDLE": (3.0, 4.0, 5.0),
    "RECOMPUTE_WEIGHT_FILLED": (3.0, 6.0, 12.0),
    "RECOMPUTE_WEIGHT_MAX": (6.0, 12.0, 24.0),
    "RECOMPUTE_FULL_SHARE": (0.25, 0.4, 0.6),
    "ANSWER_S": (0.6, 1.2, 2.4),
    "RECENT_WEIGHT": (0.0, 0.03, 0.1),
    "COPIES": (1.0, 3.0, 8.0),
    "RECOMPUTE_SHARE_MIN": (0.1, 0.3, 1.0),
    "QUEUE_DELAY_WEIGHT": (4.0, 8.0, 12.0),
    "DECODING": (0.3, 0.6, 1.0),
    "EVICTION_DELAY_WEIGHT": (2.0, 6.0, 12.0),
    "OCCUPANCY_WEIGHT": (0.0, 40.0, 80.0),
    "TRANSFER_WEIGHT": (4.0, 8.0, 16.0),
    "COPY_WEIGHT": (1.0, 3.0, 6.0),
}
"""Constants of `balanced`, changed one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityBench:
    """Options of the program."""

    trace: str | None = option(None, "--trace", None, "Recorded trace in Mooncake's format: one more load of each kind")
    seeds: int = option(3, "--seeds", None, "Seeds of each load")
    requests: int = option(600, "--requests", None, "Requests of each load")
    jobs: int = option(1, "--jobs", None, "Processes")
    only: list[str] = option([], "--only", None, "Names of loads (default: all)")
    held_out: bool = option(False, "--held-out", None, "Leave out the training loads")
    tune: bool = option(False, "--tune", None, "Vary the constants of balanced on the training loads")
    tables: bool = option(
        False, "--tables", None, "Write the tables of the committed result file into docs/balanced.md"
    )
    quick: bool = option(False, "--quick", None, "One seed, 300 requests, and no result file")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    shape: str
    is_training: bool
    strength: str
    policy: str
    seed: int
    lag_ms: int
    requests: int
    trace: str | None
    constants: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        """Return a name of the run that is stable between invocations."""
        return json.dumps([one for name, one in asdict(self).items() if name != "trace"])


def run(cell: Cell) -> dict[str, Any]:
    """Return the figures of one run; times in milliseconds."""
    shape = loads(cell.trace, is_training=cell.is_training)[cell.shape]
    mode, settings = POLICIES[cell.policy]
    began = {name: getattr(balanced, name) for name, _ in cell.constants}
    for name, value in cell.constants:
        setattr(balanced, name, value)
    outcome = Scenario(
        sessions=shape.make(shape.rate * STRENGTHS[cell.strength], cell.seed, cell.requests),
        workers=WORKERS - (shape.prefill_workers or 0),
        prefill_workers=shape.prefill_workers,
        router_mode=mode,
        router_settings=settings,
        engine=shape.engine,
        speeds=shape.speeds,
        event_lag_ms=cell.lag_ms,
        seed=cell.seed,
    ).run()
    for name, value in began.items():
        setattr(balanced, name, value)
    return figures(outcome)


def figures(outcome: RunOutcome) -> dict[str, float]:
    """Return latency, throughput and fairness of a run."""
    rows = rows_of(outcome.flights)
    found = summary_of(outcome, rows)
    longest = sorted(rows, key=lambda row: row.input_length)[-max(1, round(len(rows) * LONGEST)) :]
    chosen = {
        "e2e": found["mean_e2e_latency_ms"],
        "e2e_p50": found["median_e2e_latency_ms"],
        "e2e_p99": found["p99_e2e_latency_ms"],
        "ttft": found["mean_ttft_ms"],
        "ttft_p50": found["median_ttft_ms"],
        "ttft_p90": found["p90_ttft_ms"],
        "ttft_p99": found["p99_ttft_ms"],
        "tpot": found["mean_tpot_ms"],
        "tok_s": found["output_throughput_tok_s"],
        "reuse": found["prefix_cache_reused_ratio"],
        "worst_tenant": worst_tenant(outcome.flights, rows),
        "longest_p99": percentile(sorted(row.ttft_ms for row in longest), 0.99),
        "refused": float(found.get("refused_requests", 0)),
    }
    return {name: float(f"{value:.5g}") for name, value in chosen.items()}


def worst_tenant(flights: Sequence[Flight], rows: Sequence[RequestRow]) -> float:
    """Return the highest mean time to first token of the requests with a common beginning; of all if there are none."""
    times: dict[int, list[float]] = defaultdict(list)
    for flight, row in zip(flights, rows, strict=True):
        times[flight.turn.hash_ids[0]].append(row.ttft_ms)
    means = [mean(of) for of in times.values() if len(of) >= TENANT_REQUESTS]
    return max(means, default=mean(row.ttft_ms for row in rows))


def run_all(cells: Sequence[Cell], jobs: int, kept: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of all cells by key; those in the file `kept` are read from it, if they are of this code."""
    found: dict[str, dict[str, Any]] = {}
    if kept.exists():
        rows = map(json.loads, kept.read_text().splitlines())
        found = {row["key"]: row["figures"] for row in rows if row.get("code") == code_digest()}
    missing = [cell for cell in cells if cell.key not in found]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, kept.open("a") as file:
        for done, (key, made) in enumerate(pool.imap_unordered(_keyed, missing), 1):
            found[key] = made
            file.write(json.dumps({"key": key, "code": code_digest(), "figures": made}) + "\n")
            file.flush()
            if done % 50 == 0:
                left = (time.monotonic() - began) / done * (len(missing) - done)
                print(f"{done} of {len(missing)}, {left:.0f} s left", file=sys.stderr, flush=True)
    return found


@cache
def code_digest() -> str:
    """Return a digest of the code that determines the figures of a cell."""
    files = [file for package in SIMULATED for file in sorted(Path(dynamo.__path__[0], package).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in (Path(routing_loads.__file__), *files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _keyed(cell: Cell) -> tuple[str, dict[str, Any]]:
    return cell.key, run(cell)


def cells_of(config: QualityBench) -> Iterator[Cell]:
    """Yield the runs of the held-out loads, then those of the training loads with the first seed."""
    shapes = [(shape, False, seed) for seed in range(config.seeds) for shape in _wanted(config, is_training=False)]
    if not config.held_out:
        shapes += [(shape, True, 0) for shape in _wanted(config, is_training=True)]
    for shape, is_training, seed in shapes:
        for strength in STRENGTHS:
            for lag_ms in LAGS_MS if strength == "near" and seed == 0 and not is_training else LAGS_MS[:1]:
                for policy in LAGGED if lag_ms else POLICIES:
                    if seed == 0 or policy not in ONCE:
                        yield Cell(shape, is_training, strength, policy, seed, lag_ms, config.requests, config.trace)


def tuning_cells(config: QualityBench) -> Iterator[Cell]:
    """Yield runs of `balanced` with one constant changed, on the training loads."""
    for shape in _wanted(config, is_training=True):
        for strength in STRENGTHS:
            for constants in variants():
                for seed in range(config.seeds):
                    yield Cell(shape, True, strength, "balanced", seed, 0, config.requests, config.trace, constants)


def variants() -> Iterable[tuple[tuple[str, float], ...]]:
    """Return the constants as they are, and each with its other values."""
    yield ()
    for name, values in GRID.items():
        yield from (((name, value),) for value in values if value != getattr(balanced, name))


def _wanted(config: QualityBench, *, is_training: bool) -> list[str]:
    return [name for name in loads(config.trace, is_training=is_training) if not config.only or name in config.only]


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two marks of a page."""
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def main() -> int:
    """Run what is missing, print the tables and write the result file."""
    config = load(QualityBench, sys.argv[1:])
    path = Path(RESULTS) / "routing_quality.json"
    if config.tables:
        committed = json.loads(path.read_text())
        write_between(PAGE, BEGIN, END, f"{tables(committed)}\n\n{case_tables(committed['cases'])}")
        return 0
    if config.quick:
        config = load(QualityBench, [*sys.argv[1:], "--seeds=1", "--requests=300"])
    kept = Path(cache_dir()) / "routing_quality.cells.jsonl"
    os.makedirs(kept.parent, exist_ok=True)
    cells = list(tuning_cells(config) if config.tune else cells_of(config))
    found = run_all(cells, config.jobs, kept)
    points: dict[str, Any] = {}
    for cell in cells:
        kind = "training" if cell.is_training else "held_out"
        name = " ".join(f"{one}={value:g}" for one, value in cell.constants) or cell.policy
        point = points.setdefault(kind, {}).setdefault(f"{cell.shape}, {cell.strength}, lag {cell.lag_ms}", {})
        for figure, value in found[cell.key].items():
            point.setdefault(name, {}).setdefault(figure, []).append(value)
    before = json.loads(path.read_text()) if path.exists() else {}
    kept_parts = {name: before[name] for name in ("points", "tuning", "cases") if name in before}
    seeds = {name: before[name] for name in ("seeds", "tuning_seeds") if name in before}
    seeds["tuning_seeds" if config.tune else "seeds"] = config.seeds
    result = {**seeds, "requests": config.requests, **kept_parts}
    result["tuning" if config.tune else "points"] = points["training"] if config.tune else points
    if not config.tune:
        result["cases"] = cases()
    print_line(tables(result))
    print_line(
        write_result("routing_quality", {"machine": machine(), **result}, is_whole=not (config.quick or config.only))
    )
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
