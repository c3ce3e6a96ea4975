"""Random shapes of load: number N is a function of N alone. None of them was used to choose anything of a policy.

Drawn are (log-uniformly, where the highest value is more than ten times the lowest):

workers              4, 6, 8, 12 or 16; in one shape of six a third of them with half to 0.8 of the speed; in one of six a third computes prompts for the others
common beginnings    1 to 300, chosen by Zipf's law with an exponent of 0 to 1.3, of 0 to 24 blocks of 512 tokens;
                     in two shapes of five, each followed by one of 2 to 30 second parts of 1 to 12 blocks
prompt               after the common part log-normal, 50 to 2,000 tokens in the median, with a sigma of 0.2 to 1.3, up to 30,000 tokens
sessions             in two shapes of five: 2 to 10 turns, 50 to 1,500 tokens more in each, pauses of 0.3 to 6 s
answers              exponential, 20 to 800 tokens on average
arrivals             Poisson; in three shapes of ten bursts of 4 to 32 at once; in one of five a rate that swings by 80 % in 30 s
caches               of each worker: a tenth of the common beginnings to twice their sum, at least 102,400 tokens;
                     in one shape of six with a second one in host memory, four times as large

The rate at which a shape saturates its workers is measured: requests per second that are completed under least-loaded routing, when all arrive almost at once
and sessions make no pauses.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from benchmarks.routing_loads import BLOCK, Prompts, Sessions, length
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.report import rows_of
from dynamo.replay.scenario import Scenario

CACHE_BLOCK = 64
"""Tokens of a cache block."""
CACHE_BLOCKS_MIN, CACHE_BLOCKS_MAX = 1600, 16384
TAIL_TOKENS_MAX = 30_000
FLOOD_RATE = 2000.0
"""Requests per second while the saturated rate is measured."""
DONE_SHARE = 0.8
"""Share of the requests after which it is measured; the last ones leave workers idle."""
SWING, SWING_S = 0.8, 30.0


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    """Return a value whose logarithm is uniformly distributed."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))


@dataclass(frozen=True, slots=True)
class RandomShape:
    """One shape of load and its cluster."""

    number: int
    workers: int
    prefill_workers: int | None
    speeds: dict[int, float]
    beginnings: int
    zipf: float
    beginning_blocks: int
    parts: int
    """Second parts after each beginning; 0: none."""
    part_blocks: int
    tail_tokens: float
    tail_sigma: float
    turns: int
    turn_tokens: int
    pause_ms: float
    answer_tokens: float
    burst: int
    """Requests that arrive at once."""
    swings: bool
    engine: EngineArgs = field(default_factory=EngineArgs)

    @classmethod
    def of(cls, number: int) -> "RandomShape":
        """Return the shape with a number."""
        rng = random.Random(f"shape {number}")
        workers = rng.choice((4, 6, 8, 12, 16))
        third = max(1, workers // 3)
        kind = rng.choice(("alike", "alike", "alike", "alike", "uneven", "split"))
        beginnings, zipf = round(log_uniform(rng, 1, 300)), rng.uniform(0, 1.3)
        beginning_blocks = rng.randrange(25)
        has_parts, has_turns = rng.random() < 0.4, rng.random() < 0.4
        parts, part_blocks = rng.randrange(2, 31), rng.randrange(1, 13)
        common_tokens = BLOCK * beginnings * (beginning_blocks + (parts * part_blocks if has_parts else 0))
        cache = round(common_tokens * log_uniform(rng, 0.1, 2) / CACHE_BLOCK)
        blocks = min(max(cache, CACHE_BLOCKS_MIN), CACHE_BLOCKS_MAX)
        arrivals = rng.random()
        has_host = rng.random() < 1 / 6
        host = {"num_host_blocks": 4 * blocks, "host_offload_h2d_bandwidth_gbps": 16.0} if has_host else {}
        transfer = (
            {"kv_transfer_bandwidth": 25.0, "kv_transfer_timing_mode": "destination_missing"} if kind == "split" else {}
        )
        return cls(
            number=number,
            workers=workers,
            prefill_workers=third if kind == "split" else None,
            speeds={place: rng.uniform(0.5, 0.8) for place in range(third)} if kind == "uneven" else {},
            beginnings=beginnings,
            zipf=zipf,
            beginning_blocks=beginning_blocks,
            parts=parts if has_parts else 0,
            part_blocks=part_blocks if has_parts else 0,
            tail_tokens=log_uniform(rng, 50, 2000),
            tail_sigma=rng.uniform(0.2, 1.3),
            turns=rng.randrange(2, 11) if has_turns else 1,
            turn_tokens=round(log_uniform(rng, 50, 1500)),
            pause_ms=rng.uniform(300, 6000),
            answer_tokens=log_uniform(rng, 20, 800),
            burst=rng.randrange(4, 33) if arrivals < 0.3 else 1,
            swings=arrivals > 0.8,
            engine=EngineArgs(num_gpu_blocks=blocks, **host, **transfer),  # type: ignore[arg-type]
        )

    @property
    def description(self) -> str:
        """Return the parameters in one line."""
        nodes = f"{self.workers} workers" + (f", {self.prefill_workers} for prompts" if self.prefill_workers else "")
        second = f", then {self.parts} of {self.part_blocks}" if self.parts else ""
        turns = f", {self.turns} turns of {self.turn_tokens}" if self.turns > 1 else ""
        arrivals = f", bursts of {self.burst}" if self.burst > 1 else ", swinging rate" if self.swings else ""
        host = ", host memory" if self.engine.num_host_blocks else ""
        return (
            f"{nodes}{', uneven' if self.speeds else ''}; {self.beginnings} beginnings of {self.beginning_blocks} blocks (Zipf {self.zipf:.1f}){second}; "
            f"prompts {self.tail_tokens:.0f} (sigma {self.tail_sigma:.1f}){turns}; answers {self.answer_tokens:.0f}{arrivals}; "
            f"caches of {self.engine.num_gpu_blocks} blocks{host}"
        )

    def sessions(self, rate: float, seed: int, count: int) -> Sessions:
        """Return sessions with so many requests in all, and so many requests per second on average."""
        rng, prompts = random.Random(f"{self.number} {seed}"), Prompts(self.beginning_blocks)
        weights = [(place + 1) ** -self.zipf for place in range(self.beginnings)]
        seconds = {
            (kind, part): prompts.own(self.part_blocks) for kind in range(self.beginnings) for part in range(self.parts)
        }
        found = Sessions()
        for at, at_ms in enumerate(self._arrivals(rng, rate / self.turns, max(1, count // self.turns))):
            kind = rng.choices(range(self.beginnings), weights)[0]
            second = seconds[kind, rng.randrange(self.parts)] if self.parts else ()
            tail = min(TAIL_TOKENS_MAX, max(8, int(rng.lognormvariate(math.log(self.tail_tokens), self.tail_sigma))))
            found.append(self._session(rng, prompts, f"k{kind}.{at}", (*prompts.prefix(kind), *second), tail, at_ms))
        return found

    def _session(
        self, rng: random.Random, prompts: Prompts, name: str, common: tuple[int, ...], tail: int, at_ms: float
    ) -> ReplaySession:
        tokens, blocks, turns = len(common) * BLOCK + tail, common, list[Turn]()
        for turn in range(self.turns):
            if turn:
                tokens += rng.randrange(self.turn_tokens // 2, 2 * self.turn_tokens)
            blocks = (*blocks, *prompts.own(-(-tokens // BLOCK) - len(blocks)))
            answer = length(rng, self.answer_tokens, least=2)
            times = (None, rng.expovariate(1 / self.pause_ms)) if turn else (at_ms, 0.0)
            turns.append(Turn(f"{name}.{turn}", tokens, answer, blocks, *times))
            tokens += answer
        return ReplaySession(name, turns)

    def _arrivals(self, rng: random.Random, rate: float, count: int) -> Iterator[float]:
        """Yield arrival times of sessions in ms."""
        at_ms = 0.0
        for at in range(count):
            if at % self.burst == 0:
                swing = 1 + SWING * math.sin(2 * math.pi * at_ms / 1000 / SWING_S) if self.swings else 1
                at_ms += rng.expovariate(rate * swing / self.burst) * 1000
            yield at_ms

    def scenario(self, mode: str, settings: dict[str, object], rate: float, seed: int, count: int) -> Scenario:
        """Return the simulation of the shape under a router mode."""
        return Scenario(
            sessions=self.sessions(rate, seed, count),
            workers=self.workers - (self.prefill_workers or 0),
            prefill_workers=self.prefill_workers,
            router_mode=mode,
            router_settings=settings,
            engine=self.engine,
            speeds=self.speeds,
            seed=seed,
        )

    def saturated_rate(self, count: int) -> float:
        """Return the requests per second that the workers complete under least-loaded routing."""
        eager = replace(self, pause_ms=1.0, burst=1, swings=False)
        rows = rows_of(eager.scenario("least_loaded", {}, FLOOD_RATE, 0, count).run().flights)
        ends = sorted(row.arrival_ms + row.e2e_latency_ms for row in rows)
        done = max(1, int(DONE_SHARE * len(ends)))
        return 1000 * done / ends[done - 1]
