"""Loads of the routing benchmark: those on which constants were chosen (`TRAINING`) and those that were not (`HELD_OUT`).

The held-out loads were written after the constants and are not used by `--tune`. Arrivals are Poisson processes. `rate`
is about the number of requests per second that eight workers of the mocker's defaults complete under least-loaded routing.

training     agents       sessions of four turns, instructions of 4,096 tokens in common with others of their kind
             bursts       twelve requests at once, 24 kinds of prefixes
             tenants      a hundred prefixes of 6,144 tokens, chosen by Zipf's law, caches of a sixth of their sum
             ladder       150 equally likely prefixes of 5,632 tokens, caches of a third of their sum
             chats        conversations of five turns, sixteen kinds
             prefixes     prompts of 4,096 tokens, three quarters in common with others, 64 kinds
             mixed        log-normal prompts of 1,100 tokens in the median, up to 50,000, 30 kinds of prefixes of 1,024 tokens
             agents, split    agents on three prefill and five decode workers, transfers at 12.5 GB/s
             tenants, tiers   tenants with a second cache in host memory, about four times the first
             trace, 1     first half of a recorded trace (Mooncake's conversation trace)
held out     documents    twelve questions on each of a moving set of documents of 8,000 to 30,000 tokens
             completion   editors: repository prefixes of 3,072 tokens, answers of 30 tokens, sessions of eight requests
             retrieval    common instructions, then four of 300 passages by Zipf's law, in any order
             reasoning    short prompts without common parts, answers of 1,000 tokens on average
             tasks        two levels: common instructions, forty tasks of 4,096 tokens, then the question
             outliers     short chats, one prompt in twenty of 30,000 to 60,000 tokens
             rotation     Zipf tenants of which others become popular every 20 s, caches of a quarter of their sum
             batch        an interactive load, and every 15 s eighty prompts at once with a common beginning
             assistants, split   sessions of six turns on three prefill and five decode workers, transfers at 25 GB/s
             library, tiers      120 documents of 8,192 tokens, unequally popular, caches of an eighth of their sum, host memory at 16 GB/s
             uneven       tasks on workers of which two have half and two 0.7 of the speed of the others
             forms        200 forms of 2,560 tokens, equally likely, answers of 70 tokens
             notebooks    sessions of nine turns on 50 notebooks of 4,096 tokens, caches of two thirds of their sum
             trace, 2     second half of the recorded trace

`forms` and `notebooks` were written last, after every constant.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.synthetic import Shape, sessions
from dynamo.replay.trace import read

BLOCK = 512
WORKERS = 8
Sessions = list[ReplaySession]
Make = Callable[[float, int, int], Sessions]
"""Rate in requests per second, seed, number of requests."""


@dataclass(frozen=True, slots=True)
class Load:
    """One shape of load."""

    make: Make
    rate: float
    """Requests per second at which the cluster saturates."""
    engine: EngineArgs = EngineArgs()  # noqa: RUF009 - frozen
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Speed of some workers relative to the others."""
    prefill_workers: int | None = None
    """Number of the workers that compute prompts for the others; None: every worker does both."""


class Prompts:
    """Block names: shared prefixes by kind, and blocks of one prompt alone."""

    def __init__(self, prefix_blocks: int) -> None:
        self._prefix_blocks = prefix_blocks
        self._next = 1_000_000

    def own(self, count: int) -> tuple[int, ...]:
        """Return names of new blocks."""
        first = self._next
        self._next += max(0, count)
        return tuple(range(first, self._next))

    def prefix(self, kind: int) -> tuple[int, ...]:
        """Return the names of a kind's prefix."""
        return tuple(range(kind * self._prefix_blocks, (kind + 1) * self._prefix_blocks))

    def of(self, kind: int, tokens: int) -> tuple[int, ...]:
        """Return the names of a new prompt of that kind."""
        return (*self.prefix(kind), *self.own(-(-tokens // BLOCK) - self._prefix_blocks))


def arrivals(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    """Yield arrival times in ms."""
    at_ms = 0.0
    for _ in range(count):
        at_ms += rng.expovariate(rate) * 1000
        yield at_ms


def single(name: str, blocks: tuple[int, ...], tokens: int, output: int, at_ms: float) -> ReplaySession:
    """Return a session of one request; the part of its name before the dot is its tenant."""
    return ReplaySession(name, [Turn(name, tokens, output, blocks, at_ms)])


def length(rng: random.Random, average: float, least: int = 20) -> int:
    """Return an exponentially distributed number of tokens."""
    return max(least, int(rng.expovariate(1 / average)))


def talks(
    rng: random.Random, prompts: Prompts, name: str, kind: int, at_ms: float, turns: int, more: tuple[int, int],
    output: float, delay_ms: float, prefix_tokens: int,
) -> ReplaySession:  # fmt: skip
    """Return a session whose turns extend each other's prompts."""
    tokens, blocks, found = prefix_tokens, prompts.prefix(kind), list[Turn]()
    for turn in range(turns):
        tokens += rng.randrange(*more)
        blocks = (*blocks, *prompts.own(-(-tokens // BLOCK) - len(blocks)))
        answer = length(rng, output)
        times = (at_ms, 0.0) if turn == 0 else (None, delay_ms)
        found.append(Turn(f"{name}.{turn}", tokens, answer, blocks, *times))
        tokens += answer
    return ReplaySession(name, found)


# Training.


def agents(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts = random.Random(seed), Prompts(8)
    return [
        talks(rng, prompts, f"k{kind}.{at}", kind, at_ms, 4, (200, 1500), 200, 800, 8 * BLOCK)
        for at, at_ms in enumerate(arrivals(rng, rate / 4, count // 4))
        for kind in (min(int(rng.expovariate(0.5)), 7),)
    ]


def bursts(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(6), Sessions()
    for burst, at_ms in enumerate(arrivals(rng, rate / 12, count // 12)):
        for at in range(12):
            kind, tokens = rng.randrange(24), 6 * BLOCK + rng.randrange(100, 2500)
            found.append(single(f"k{kind}.{burst}.{at}", prompts.of(kind, tokens), tokens, length(rng, 200), at_ms))
    return found


def tenants(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(12), Sessions()
    weights = [1 / (place + 1) for place in range(100)]
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        tokens, kind = 12 * BLOCK + rng.randrange(100, 1500), rng.choices(range(100), weights)[0]
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 200), at_ms))
    return found


def ladder(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(11), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind = rng.randrange(150)
        found.append(single(f"k{kind}.{at}", prompts.of(kind, 6000), 6000, 100, at_ms))
    return found


def chats(rate: float, seed: int, count: int) -> Sessions:
    return sessions(
        Shape(
            input_tokens=1024, output_tokens=200, requests=count, turns=5, shared_prefix_ratio=0.5, prefix_groups=16,
            inter_turn_delay_ms=2000, request_rate=rate / 5, seed=seed,
        )
    )  # fmt: skip


def prefixes(rate: float, seed: int, count: int) -> Sessions:
    return sessions(
        Shape(
            input_tokens=4096, output_tokens=200, requests=count, shared_prefix_ratio=0.75, prefix_groups=64,
            request_rate=rate, seed=seed,
        )
    )  # fmt: skip


def mixed(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(2), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind, tokens = rng.randrange(30), 2 * BLOCK + min(50_000, int(rng.lognormvariate(7, 1.3)))
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 200), at_ms))
    return found


# Held out.


def assistants(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts = random.Random(seed), Prompts(5)
    return [
        talks(rng, prompts, f"k{kind}.{at}", kind, at_ms, 6, (60, 2400), 160, 1200, 5 * BLOCK)
        for at, at_ms in enumerate(arrivals(rng, rate / 6, count // 6))
        for kind in (rng.randrange(12),)
    ]


def library(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(16), Sessions()
    weights = [(place + 1) ** -0.8 for place in range(120)]
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        tokens, kind = 16 * BLOCK + rng.randrange(80, 700), rng.choices(range(120), weights)[0]
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 140), at_ms))
    return found


def documents(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(1), Sessions()
    for document, at_ms in enumerate(arrivals(rng, rate / 12, count // 12)):
        blocks = prompts.own(rng.randrange(16, 60))
        for question in range(12):
            at = at_ms + rng.expovariate(1 / 8000) * question
            tokens = len(blocks) * BLOCK + rng.randrange(30, 300)
            found.append(single(f"d{document}.{question}", (*blocks, *prompts.own(1)), tokens, length(rng, 250), at))
    return found


def completion(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts = random.Random(seed), Prompts(6)
    return [
        talks(rng, prompts, f"k{kind}.{at}", kind, at_ms, 8, (20, 400), 30, 1500, 6 * BLOCK)
        for at, at_ms in enumerate(arrivals(rng, rate / 8, count // 8))
        for kind in (rng.randrange(30),)
    ]


def retrieval(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(2), Sessions()
    weights = [1 / (place + 1) for place in range(300)]
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        passages = rng.choices(range(1, 301), weights, k=4)
        blocks = (*prompts.prefix(0), *(name for one in passages for name in prompts.prefix(one)), *prompts.own(1))
        tokens = len(blocks) * BLOCK - rng.randrange(200)
        found.append(single(f"k{passages[0]}.{at}", blocks, tokens, length(rng, 180), at_ms))
    return found


def reasoning(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(1), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        tokens = rng.randrange(100, 900)
        found.append(single(f"k{at % 8}.{at}", prompts.own(2), tokens, length(rng, 1000), at_ms))
    return found


def tasks(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(8), Sessions()
    common = prompts.own(3)
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind, extra = rng.randrange(40), rng.randrange(50, 900)
        blocks = (*common, *prompts.prefix(kind), *prompts.own(-(-extra // BLOCK)))
        found.append(single(f"k{kind}.{at}", blocks, 11 * BLOCK + extra, length(rng, 120), at_ms))
    return found


def outliers(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(2), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind = rng.randrange(12)
        tokens = rng.randrange(30_000, 60_000) if rng.random() < 0.05 else 2 * BLOCK + length(rng, 700)
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 220), at_ms))
    return found


def rotation(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(10), Sessions()
    weights = [1 / (place + 1) for place in range(90)]
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind = (rng.choices(range(90), weights)[0] + 7 * int(at_ms // 20_000)) % 90
        tokens = 10 * BLOCK + rng.randrange(60, 1200)
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 150), at_ms))
    return found


def batch(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(7), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate * 0.6, int(count * 0.6))):
        kind, tokens = rng.randrange(1, 20), 7 * BLOCK + rng.randrange(50, 1000)
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 200), at_ms))
    for at in range(int(count * 0.4)):
        tokens, at_ms = 7 * BLOCK + rng.randrange(500, 4000), 15_000 * (1 + at // 80) * 13 / rate
        found.append(single(f"batch.{at}", prompts.of(0, tokens), tokens, length(rng, 100), at_ms))
    return found


def forms(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts, found = random.Random(seed), Prompts(5), Sessions()
    for at, at_ms in enumerate(arrivals(rng, rate, count)):
        kind, tokens = rng.randrange(200), 5 * BLOCK + rng.randrange(40, 400)
        found.append(single(f"k{kind}.{at}", prompts.of(kind, tokens), tokens, length(rng, 70), at_ms))
    return found


def notebooks(rate: float, seed: int, count: int) -> Sessions:
    rng, prompts = random.Random(seed), Prompts(8)
    return [
        talks(rng, prompts, f"k{kind}.{at}", kind, at_ms, 9, (100, 900), 150, 2000, 8 * BLOCK)
        for at, at_ms in enumerate(arrivals(rng, rate / 9, count // 9))
        for kind in (rng.randrange(50),)
    ]


@cache
def trace_of(path: str) -> Sessions:
    """Return the sessions of a trace."""
    return read([path])


def recorded(path: str, half: int) -> Make:
    """Return a maker of windows of one half of a recorded trace, with arrivals at `rate`."""

    def make(rate: float, seed: int, count: int) -> Sessions:
        whole = trace_of(path)
        chosen = whole[: len(whole) // 2] if half == 1 else whole[len(whole) // 2 :]
        start = len(chosen) * seed // 7
        window = (chosen + chosen)[start : start + count]
        rng = random.Random(seed)
        return [
            replace(one, session_id=f"k{at % 8}.{at}", turns=[replace(one.turns[0], at_ms=at_ms)])
            for at, (one, at_ms) in enumerate(zip(window, arrivals(rng, rate, count), strict=True))
        ]

    return make


def small(blocks: int) -> EngineArgs:
    """Return the mocker's engine with another cache size."""
    return EngineArgs(num_gpu_blocks=blocks)


def split(transfer_gbps: float) -> EngineArgs:
    """Return the mocker's engine with transfers of missing blocks at a bandwidth in GB/s."""
    return EngineArgs(kv_transfer_bandwidth=transfer_gbps, kv_transfer_timing_mode="destination_missing")


TRAINING: dict[str, Load] = {
    "agents": Load(agents, 50),
    "bursts": Load(bursts, 70),
    "tenants": Load(tenants, 16, small(1600)),
    "ladder": Load(ladder, 50, small(4400)),
    "chats": Load(chats, 50),
    "prefixes": Load(prefixes, 80),
    "mixed": Load(mixed, 55),
    "agents, split": Load(agents, 60, split(12.5), prefill_workers=3),
    "tenants, tiers": Load(tenants, 14, EngineArgs(num_gpu_blocks=1600, num_host_blocks=6000)),
}
HELD_OUT: dict[str, Load] = {
    "documents": Load(documents, 20),
    "completion": Load(completion, 85),
    "retrieval": Load(retrieval, 50),
    "reasoning": Load(reasoning, 28),
    "tasks": Load(tasks, 90),
    "outliers": Load(outliers, 52),
    "rotation": Load(rotation, 28, small(1800)),
    "batch": Load(batch, 70),
    "assistants, split": Load(assistants, 60, split(25), prefill_workers=3),
    "library, tiers": Load(
        library, 16, EngineArgs(num_gpu_blocks=2000, num_host_blocks=9000, host_offload_h2d_bandwidth_gbps=16)
    ),
    "uneven": Load(tasks, 72, speeds={0: 0.5, 1: 0.5, 2: 0.7, 3: 0.7}),
    "forms": Load(forms, 96),
    "notebooks": Load(notebooks, 18, small(2133)),
}
TRACE_RATE = 17.0


def loads(trace: str | None, *, is_training: bool) -> dict[str, Load]:
    """Return the loads of one half of the benchmark; a recorded trace adds one to each."""
    found = dict(TRAINING if is_training else HELD_OUT)
    if trace is not None:
        half = 1 if is_training else 2
        found[f"trace, {half}"] = Load(recorded(trace, half), TRACE_RATE)
    return found
