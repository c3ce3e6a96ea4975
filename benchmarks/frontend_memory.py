"""Frontend memory at start, during 256 streams, and after 100,000 requests.

    python -m benchmarks.frontend_memory [--quick]

Our frontend and the released one run in sequence, each with its own mocker without simulated delays. Every request is a
new one (64 prompt tokens, 4 output tokens), so that per-prompt state is included. Measured is the resident memory of
the process and its children, from `/proc`. Growth is reported twice: since the start, which includes the state that
every process allocates at its first requests, and since a tenth of the requests, which shows leaks.
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.corpus import bench_model, read_prompts
from benchmarks.loadgen import Load, build_requests, family, measure, read_parents, read_usage
from benchmarks.report import OURS, THEIRS, guarded, implementations, number, print_line, ratio, table, write_result
from benchmarks.stacks import FRONTEND, HOST, MODEL_NAME, Implementation, Recipe, Stack
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 64, 4, 64
BUSY_STREAMS, BUSY_PROMPT_TOKENS, BUSY_OUTPUT_TOKENS = 256, 512, 128
SETTLE_S = 3.0  # Deferred frees, and a collection if one is due.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Memory of our frontend and of the released one."""

    quick: bool = option(False, "--quick", None, "A tenth of the requests, and no results file: under a minute")
    requests: int = option(100_000, "--requests", None, "Requests until the last look")

    def __post_init__(self) -> None:
        if self.requests < 100:
            raise ConfigError("--requests: expected at least 100")

    @property
    def count(self) -> int:
        return self.requests // 10 if self.quick else self.requests


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one frontend in MiB at each measurement."""

    start: float
    """Ready, one request answered."""
    busy: float
    """While 256 streams of 512 and 128 tokens ran."""
    early: float
    """After a tenth of the requests."""
    end: float
    """After all of them, and a pause."""
    requests: int
    seconds: float

    @property
    def growth(self) -> float:
        """Growth since the start."""
        return self.end / self.start - 1

    @property
    def late_growth(self) -> float:
        """Growth over the last nine tenths of the requests."""
        return self.end / self.early - 1


def rss_mib(pids: Sequence[int]) -> float:
    """Return the resident memory of processes and their children."""
    return sum(read_usage(pid).rss_bytes for pid in family(pids, read_parents())) / 2**20


class Bench:
    """Prompts and measurements of the stacks."""

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.model = bench_model()
        self.small = read_prompts(self.model, PROMPT_TOKENS)
        self.large = read_prompts(self.model, BUSY_PROMPT_TOKENS)

    def look(self, name: str, implementation: Implementation) -> Memory:
        with Stack(Recipe(name=name, frontend=implementation, engine=implementation), self.model) as stack:
            time.sleep(SETTLE_S)
            pids = stack.pids[FRONTEND]
            start = rss_mib(pids)
            early, sent, began = start, 0, time.monotonic()
            is_early = True
            while sent < self.config.count:
                sent += self._small(stack, min(8.0, 1.0 + sent / 1000))
                if is_early and sent >= self.config.count / 10:
                    is_early, early = False, rss_mib(pids)
            seconds = time.monotonic() - began
            time.sleep(SETTLE_S)
            end = rss_mib(pids)
            found = Memory(start, self._busy(stack), early, end, sent, seconds)
        print_line(
            f"  {name}: {number(start)} MiB at the start, {number(end)} after {sent:,} requests in {seconds:.0f} s"
        )
        return found

    def _small(self, stack: Stack, window_s: float) -> int:
        work = Load(
            host=HOST,
            port=stack.port,
            concurrency=CONCURRENCY,
            warmup_s=0.0,
            window_s=window_s,
            ramp_s=0.0,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=OUTPUT_TOKENS,
        )
        requests = build_requests(work, MODEL_NAME, self.small.texts, self.small.words)
        first = requests.count = random.randrange(2**31)
        report = measure(work, requests, stack.pids)
        if report.bad or report.unanswered:
            raise ConnectionError(f"{report.bad} bad answers, {report.unanswered} missing: {report.bad_example}")
        return requests.count - first

    def _busy(self, stack: Stack) -> float:
        work = Load(
            host=HOST,
            port=stack.port,
            concurrency=BUSY_STREAMS,
            warmup_s=2.0,
            window_s=3.0,
            prompt_tokens=BUSY_PROMPT_TOKENS,
            completion_tokens=BUSY_OUTPUT_TOKENS,
        )
        requests = build_requests(work, MODEL_NAME, self.large.texts, self.large.words)
        requests.count = random.randrange(2**31)
        return measure(work, requests, stack.pids).costs[FRONTEND].rss_mib


def markdown(found: Mapping[str, Memory]) -> str:
    """Return both results, and the ratio of ours to theirs."""
    head = [
        "frontend", "at the start, MiB", "256 streams, MiB", "after the requests, MiB", "since the start",
        "since a tenth of them", "requests/s",
    ]  # fmt: skip
    rows = [
        [
            name, number(one.start), number(one.busy), number(one.end), f"{one.growth:+.0%}",
            f"{one.late_growth:+.0%}", number(one.requests / one.seconds),
        ]
        for name, one in found.items()
    ]  # fmt: skip
    if OURS in found and THEIRS in found:
        mine, other = found[OURS], found[THEIRS]
        rate = ratio(mine.requests / mine.seconds, other.requests / other.seconds)
        rows.append(
            [
                "**ours/theirs**", ratio(mine.start, other.start), ratio(mine.busy, other.busy),
                ratio(mine.end, other.end), "", "", rate,
            ]
        )  # fmt: skip
    return table(head, rows)


def main() -> int:
    config = load(MemoryConfig, sys.argv[1:], prog="python -m benchmarks.frontend_memory")
    bench = Bench(config)
    found = {name: bench.look(name, implementation) for name, implementation in implementations().items()}
    whole = not config.quick and THEIRS in found
    path = write_result("frontend_memory", {name: asdict(one) for name, one in found.items()}, is_whole=whole)
    print_line(f"\n{markdown(found)}\n\nwritten to {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
