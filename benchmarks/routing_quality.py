"""What routing is worth: one load after the other, simulated under every way to choose a worker, in virtual time.

    python -m benchmarks.routing_quality --trace conversation.jsonl.gz [--seeds 5] [--jobs 1] [--quick]
    python -m benchmarks.routing_quality --trace conversation.jsonl.gz --tune

The first half of the trace is for tuning (`--tune` prints what upstream's knobs do on it), the second half for the tables;
caches are empty at the start of each. A seed is a window of its own: so many requests from another place of the half on,
around its end. Beside the trace there are made-up loads, made anew for each seed: shared prefixes, conversations, and agents
that call tools, which is like the trace of NVIDIA's published figures (prompts of 8,600 tokens, answers of 182, 59 % known,
batches of 2,048). Closed loops from light to saturated, and arrivals at the trace's times, faster and faster. A cell that is in
the results file already is not run again. Every run checks itself: nothing lost, blocks conserved, the router's index equal
to the caches. The routers and the points that matter most run with every seed, the others (not `SEEDED`, or `ONCE`) with the first.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions
from dynamo.replay.trace import read

QUEUE = {"queue_threshold": 1.0, "queue_policy": "wspt"}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "round-robin": ("round_robin", {}),
    "least-loaded": ("least_loaded", {}),
    "kv default": ("kv_router", {}),
    "kv tuned": ("kv_router", {"prefill_load_scale": 32}),
    "kv tuned, queue": ("kv_router", {"prefill_load_scale": 32, **QUEUE}),
    "preble": ("preble", {}),
    "balanced": ("balanced", {}),
    "balanced, no queue": ("balanced", {"queue_threshold": None}),
}
UPSTREAM = ("kv default", "kv tuned", "kv tuned, queue")
OURS = ("balanced", "balanced, no queue")
ONCE = ("least-loaded", "kv default", "kv tuned, queue", "preble")
SCALES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
KNOBS: list[dict[str, Any]] = [{"prefill_load_scale": scale} for scale in SCALES]
KNOBS += [{"prefill_load_scale": 32.0, "overlap_score_credit": credit} for credit in (0.0, 0.5)]
KNOBS += [{"prefill_load_scale": 32.0, "router_temperature": degree} for degree in (0.2, 0.5, 1.0)]
KNOBS += [
    {"prefill_load_scale": 32.0, "decode_active_request_weight": 16.0},
    {"prefill_load_scale": 8.0, **QUEUE},
    {"prefill_load_scale": 32.0, **QUEUE},
]
"""The search grid of upstream's own router benchmark, one knob after the other around the best."""
FIGURES = ("ttft", "ttft_later", "ttft_p99", "tpot", "e2e", "tok_s", "reuse")
STARTING = 2
"""How many requests of each place of a closed loop are its start: all of the first come at once, and wait for each other."""
T_QUANTILE = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's, two-sided 95 %, by the number of seeds."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load at one strength."""

    load: str
    workers: int
    concurrency: int | None
    speedup: float

    @property
    def title(self) -> str:
        strength = f"arrivals x{self.speedup:g}" if self.concurrency is None else f"{self.concurrency} at once"
        return f"{self.load}, {self.workers} workers, {strength}"


def closed(load: str, workers: int, levels: Iterable[int]) -> list[Point]:
    return [Point(load, workers, level, 1.0) for level in levels]


def opened(load: str, workers: int, speeds: Iterable[float]) -> list[Point]:
    return [Point(load, workers, None, speed) for speed in speeds]


SEEDED = [
    *closed("conversation", 8, (64, 256, 512)),
    *opened("conversation", 8, (4.5,)),
    *closed("tools", 8, (64, 256, 512)),
    *closed("prefixes", 8, (64, 512)),
    *opened("chats", 8, (3.0,)),
]
POINTS = [
    *SEEDED,
    *opened("conversation", 8, (1.0,)),
    *closed("chats", 8, (64,)),
    *opened("prefixes", 8, (3.0,)),
    *closed("conversation", 32, (256, 1024)),
    *opened("conversation", 32, (18.0,)),
]
"""Those that are not among the first have one seed."""
QUICK = [*closed("conversation", 8, (64, 512)), *closed("prefixes", 8, (64,))]
TUNING = [*closed("conversation", 8, (64, 256, 512)), *opened("conversation", 8, (4.5,))]
WINDOW = 375  # Requests for each worker: 3,000 for eight, all of the half and some again for thirty-two.
MADE_UP = 3000
TOOLS = 8000  # Published with 23,608: the start, when all come at once, weighs less.


@cache
def load(name: str, trace: str | None, workers: int, seed: int, *, is_tuning: bool) -> list[ReplaySession]:
    """The sessions of a load, as one seed has them."""
    if name == "prefixes":
        shape = Shape(
            input_tokens=4096,
            output_tokens=200,
            requests=MADE_UP,
            shared_prefix_ratio=0.75,
            prefix_groups=64,
            request_rate=15,
            seed=seed,
        )
        return sessions(shape)
    if name == "chats":
        shape = Shape(
            input_tokens=1024,
            output_tokens=200,
            requests=MADE_UP,
            turns=5,
            shared_prefix_ratio=0.5,
            prefix_groups=16,
            inter_turn_delay_ms=2000,
            request_rate=4,
            seed=seed,
        )
        return sessions(shape)
    if name == "tools":
        return tools(seed)
    assert trace is not None, "the conversation load needs --trace"
    whole = read([trace])
    half = whole[: len(whole) // 2] if is_tuning else whole[len(whole) // 2 :]
    return window(half, len(half) * seed // 5, min(WINDOW * workers, len(half)))


def window(half: list[ReplaySession], start: int, count: int) -> list[ReplaySession]:
    """So many sessions from one on, around the end, at times that go on there; the first comes at once."""
    begin, end = half[0].turns[0].at_ms or 0.0, half[-1].turns[0].at_ms or 0.0
    chosen = (half + half)[start : start + count]
    first = chosen[0].turns[0].at_ms or 0.0
    found = []
    for place, session in enumerate(chosen):
        again = end - begin if start + place >= len(half) else 0.0
        turns = [replace(turn, at_ms=(turn.at_ms or 0.0) - first + again) for turn in session.turns]
        found.append(replace(session, session_id=f"{session.session_id}.{place}", turns=turns))
    return found


def tools(seed: int) -> list[ReplaySession]:
    """Agents of eight kinds, each with its instructions and tools at the beginning, that ask twice: before a tool, and after."""
    chance = random.Random(seed)
    block, fresh = 512, 8 * 6
    found = []
    for number in range(TOOLS // 2):
        kind = min(int(chance.expovariate(0.5)), 7)
        asked = max(600, round(chance.lognormvariate(8.1, 0.6)))
        first = 3072 + asked
        answer = max(20, round(chance.expovariate(1 / 182)))
        second = first + answer + max(100, round(chance.lognormvariate(7.6, 0.6)))
        ids = [*range(kind * 6, kind * 6 + 6), *range(fresh, fresh + -(-second // block) - 6)]
        fresh += len(ids)
        final = max(20, round(chance.expovariate(1 / 182)))
        turns = [
            Turn(f"t{number}.0", first, answer, tuple(ids[: -(-first // block)]), number * 300.0),
            Turn(f"t{number}.1", second, final, tuple(ids), None, 1000.0),
        ]
        found.append(ReplaySession(f"t{number}", turns))
    return found


def engine_of(point: Point) -> EngineArgs:
    """The mocker's defaults; batches like the published ones where the load is like the published one."""
    return EngineArgs(max_num_batched_tokens=2048) if point.load == "tools" else EngineArgs()


def least_ttft_ms(asked: Sequence[ReplaySession], engine: EngineArgs) -> float:
    """What no router can go below: every request alone on its worker, with all in its cache that was ever asked before."""
    timing, batch = engine.timing(), engine.max_num_batched_tokens
    seen: set[int] = set()
    times = []
    for session in asked:
        for turn in session.turns:
            known = next((at for at, name in enumerate(turn.hash_ids) if name not in seen), len(turn.hash_ids))
            seen.update(turn.hash_ids)
            left = max(1, turn.input_tokens - 512 * known)
            whole, rest = divmod(left, batch)
            times.append(whole * timing.prefill_ms(batch) + timing.prefill_ms(rest))
    return mean(times)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    point: Point
    policy: str
    mode: str
    settings: str
    seed: int
    trace: str | None
    is_tuning: bool

    @property
    def key(self) -> str:
        return f"{self.point.title} | {self.policy} | {self.settings} | seed {self.seed} | tuning {self.is_tuning}"


def run(cell: Cell) -> dict[str, Any]:
    """Its figures."""
    began = time.process_time()
    point = cell.point
    outcome = Scenario(
        sessions=load(point.load, cell.trace, point.workers, cell.seed, is_tuning=cell.is_tuning),
        workers=point.workers,
        router_mode=cell.mode,
        router_settings=json.loads(cell.settings),
        concurrency=point.concurrency,
        speedup=point.speedup,
        engine=engine_of(point),
        seed=cell.seed,
    ).run()
    rows = rows_of(outcome.flights)
    found = summary_of(outcome, rows)
    later = rows[STARTING * (point.concurrency or 0) :]
    return {
        "key": cell.key,
        "point": point.title,
        "policy": cell.policy,
        "seed": cell.seed,
        "ttft": found["mean_ttft_ms"],
        "ttft_later": mean(row.ttft_ms for row in later),
        "ttft_p99": found["p99_ttft_ms"],
        "tpot": found["mean_itl_ms"],
        "e2e": found["mean_e2e_latency_ms"],
        "tok_s": found["output_throughput_tok_s"],
        "reuse": found["prefix_cache_reused_ratio"],
        "cpu_s": time.process_time() - began,
    }


def run_all(cells: Sequence[Cell], results: Path, jobs: int) -> list[dict[str, Any]]:
    """All of them; those whose results are there already are read."""
    known = {}
    if results.exists():
        known = {row["key"]: row for row in map(json.loads, results.read_text().splitlines())}
    missing = [cell for cell in cells if cell.key not in known]
    if jobs == 0:
        begun = {cell.point for cell in missing}
        return [known[cell.key] for cell in cells if cell.point not in begun]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, results.open("a") as file:
        for row in pool.imap_unordered(run, missing):
            known[row["key"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
    return [known[cell.key] for cell in cells]


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for each point: means over the seeds, with 95 % intervals where there are several."""
    for title in dict.fromkeys(row["point"] for row in rows):
        of_point = [row for row in rows if row["point"] == title]
        yield f"### {title}\n"
        yield "| router | TTFT ms | later | TTFT p99 | TPOT ms | e2e ms | tok/s | reuse |"
        yield "|---|---:|---:|---:|---:|---:|---:|---:|"
        for policy in dict.fromkeys(row["policy"] for row in of_point):
            mine = [row for row in of_point if row["policy"] == policy]
            cells = [figure(name, [row[name] for row in mine]) for name in FIGURES]
            yield f"| {policy} | {' | '.join(cells)} |"
        yield ""


def figure(name: str, values: Sequence[float]) -> str:
    """A mean, and how sure it is."""
    digits = {"tpot": 2, "reuse": 3}.get(name, 0)
    text = f"{mean(values):,.{digits}f}"
    if len(values) in T_QUANTILE:
        text += f" ± {T_QUANTILE[len(values)] * stdev(values) / len(values) ** 0.5:,.{digits}f}"
    return text


Figures = dict[int, dict[str, Any]]
"""A router's figures at a point, by seed."""


def verdicts(rows: Sequence[dict[str, Any]], points: Sequence[Point], trace: str | None) -> Iterator[str]:
    """Ours against round-robin, and against upstream's best of each point, seed by seed: mean ratios, and how sure they are.

    Later: without the first two requests of each place of a closed loop. At most: what a router could gain that had every cache on an idle worker (`least_ttft_ms`).
    """
    yield "| point | router | TTFT, round-robin / ours | later | later, at most | tok/s over round-robin | TPOT over round-robin | e2e over upstream's best | over preble |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for title in dict.fromkeys(row["point"] for row in rows):
        found: dict[str, Figures] = {}
        for row in rows:
            if row["point"] == title:
                found.setdefault(row["policy"], {})[row["seed"]] = row
        base = found["round-robin"]
        point = next(point for point in points if point.title == title)
        most = [
            figures["ttft_later"]
            / least_ttft_ms(load(point.load, trace, point.workers, seed, is_tuning=False), engine_of(point))
            for seed, figures in base.items()
        ]
        best = min(UPSTREAM, key=lambda policy: mean(ratios(found[policy], base, "e2e")))
        for policy in OURS:
            ours = found[policy]
            yield (
                f"| {title} | {policy} | {sure(ratios(base, ours, 'ttft'))} | {sure(ratios(base, ours, 'ttft_later'))} | {mean(most):.2f} | {percent(ratios(ours, base, 'tok_s'))} "
                f"| {percent(ratios(ours, base, 'tpot'))} | {percent(ratios(ours, found[best], 'e2e'))} "
                f"| {percent(ratios(ours, found['preble'], 'e2e'))} |"
            )


def ratios(one: Figures, other: Figures, name: str) -> list[float]:
    """One router's figure over another's, for each seed that both have."""
    return [one[seed][name] / other[seed][name] for seed in sorted(one.keys() & other.keys())]


def sure(values: Sequence[float]) -> str:
    """A mean, and a 95 % interval where there are several."""
    return f"{mean(values):.2f}{interval(values, 1.0, 2)}"


def percent(values: Sequence[float]) -> str:
    """The same of ratios, as what one is over the other."""
    return f"{100 * (mean(values) - 1):+.1f}{interval(values, 100.0, 1)} %"


def interval(values: Sequence[float], factor: float, digits: int) -> str:
    if len(values) not in T_QUANTILE:
        return ""
    return f" ± {factor * T_QUANTILE[len(values)] * stdev(values) / len(values) ** 0.5:.{digits}f}"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="the Mooncake conversation trace; without it only the loads that are made up")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="0: runs nothing, prints the points that are finished")
    parser.add_argument("--quick", action="store_true", help="three points")
    parser.add_argument("--tune", action="store_true", help="upstream's knobs on the first half of the trace")
    parser.add_argument(
        "--results", type=Path, default=Path("routing_quality.jsonl"), help="where finished cells are kept"
    )
    given = parser.parse_args()
    points = TUNING if given.tune else QUICK if given.quick else POINTS
    points = [point for point in points if given.trace or point.load != "conversation"]
    policies = {f"kv {json.dumps(knobs)}": ("kv_router", knobs) for knobs in KNOBS} if given.tune else POLICIES
    asked = [(point, seed) for seed in range(1 if given.tune else given.seeds) for point in points if point in SEEDED]
    asked += [(point, 0) for point in points if point not in SEEDED]
    cells = [
        Cell(point, policy, mode, json.dumps(settings, sort_keys=True), seed, given.trace, given.tune)
        for point, seed in asked
        for policy, (mode, settings) in policies.items()
        if seed == 0 or policy not in ONCE
    ]
    rows = run_all(cells, given.results, given.jobs)
    print("\n".join(tables(rows)))
    if not given.tune:
        print("\n".join(verdicts(rows, points, given.trace)))


if __name__ == "__main__":
    main()
