"""Mocker fidelity: the same load to our mocker and to the released one, with the same frontend of ours.

    python -m benchmarks.mocker_fidelity [--requests N] [--rounds R]

The implementations alternate, so that background load affects both. Printed are the ratios of 10th percentiles, medians
and 90th percentiles of the time to first token and of the time between tokens: the 10th percentile depends least on
background load.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.corpus import bench_model
from benchmarks.peer import PeerMissing, ensure_peer
from benchmarks.report import write_result
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs

REQUEST_TIMEOUT_S = 120.0
ANSWER_TOKENS = 24
PROMPT_TOKENS = (200, 1200, 3000)
"""Lengths of prompts; each applies to a third of the requests."""


@dataclass(slots=True)
class Times:
    """Times of one implementation in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def add(self, other: "Times") -> None:
        """Add the measurements of another round."""
        self.ttft += other.ttft
        self.itl += other.itl


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of that share."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def send_request(port: int, tokens: Sequence[int]) -> tuple[float, list[float]]:
    """Return the time to first token of one request, and its mean time between tokens."""
    body = {
        "model": MODEL_NAME, "prompt": list(tokens), "max_tokens": ANSWER_TOKENS, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:200]!r}")
        events = (line for line in response if line.startswith(b"data: {") and b'"choices":[{' in line)
        received = [time.perf_counter() for _ in events]
    finally:
        connection.close()
    return (received[0] - began) * 1000, [(received[-1] - received[0]) * 1000 / (len(received) - 1)] if len(
        received
    ) > 1 else []


def load(stack: Stack, requests: int, concurrency: int, seed: int) -> Times:
    """Run one round at that concurrency, with prompts that share no prefix."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(10, 1500) for _ in range(PROMPT_TOKENS[number % len(PROMPT_TOKENS)])]
        for number in range(requests)
    ]
    times = Times()
    with ThreadPoolExecutor(concurrency) as clients:
        for ttft, itl in clients.map(lambda prompt: send_request(stack.port, prompt), prompts):
            times.ttft.append(ttft)
            times.itl += itl
    return times


def compare(
    peer: str, requests: int = 24, concurrency: int = 4, rounds: int = 3, flags: Sequence[str] = ()
) -> dict[str, Times]:
    """Return both implementations' times over some rounds."""
    found = {"ours": Times(), "theirs": Times()}
    engines = {"ours": ours(), "theirs": theirs(peer)}
    with (
        Stack(Recipe(name="ours", frontend=ours(), engine=engines["ours"], speedup=1.0, engine_flags=flags), bench_model()) as one,
        Stack(Recipe(name="theirs", frontend=ours(), engine=engines["theirs"], speedup=1.0, engine_flags=flags), bench_model()) as other,
    ):  # fmt: skip
        stacks = {"ours": one, "theirs": other}
        for stack in stacks.values():
            load(stack, 2, 1, seed=0)
        for number in range(rounds):
            for name, stack in stacks.items():
                found[name].add(load(stack, requests, concurrency, seed=1 + number))
    return found


def ratios(found: dict[str, Times]) -> dict[str, float]:
    """Return the ratios of ours to theirs."""
    table: dict[str, float] = {}
    for what in ("ttft", "itl"):
        a, b = (getattr(found[name], what) for name in ("ours", "theirs"))
        table[f"{what} p10"] = percentile(a, 0.1) / percentile(b, 0.1)
        table[f"{what} median"] = statistics.median(a) / statistics.median(b)
        table[f"{what} p90"] = percentile(a, 0.9) / percentile(b, 0.9)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-type", default="vllm")
    parser.add_argument("--quick", action="store_true", help="one round, and no result file")
    given = parser.parse_args()
    try:
        peer = ensure_peer()
    except PeerMissing as error:
        print(f"the peer is missing: {error}", file=sys.stderr)
        return 1
    found = compare(
        peer,
        given.requests,
        given.concurrency,
        1 if given.quick else given.rounds,
        ["--engine-type", given.engine_type],
    )
    for name, times in found.items():
        shown = [f"{what} {statistics.median(values):.2f} / {percentile(values, 0.9):.2f} ms" for what, values in
                 (("ttft", times.ttft), ("itl", times.itl))]  # fmt: skip
        print(f"{name:8} median / p90: {', '.join(shown)}")
    for what, ratio in ratios(found).items():
        print(f"{what:12} {100 * (ratio - 1):+.1f} %")
    medians = {
        name: {"ttft_ms": statistics.median(times.ttft), "itl_ms": statistics.median(times.itl)}
        for name, times in found.items()
    }
    kept = {
        "engine_type": given.engine_type,
        "requests": given.requests,
        "medians": medians,
        "ratios": dict(ratios(found)),
    }
    print(write_result("mocker_fidelity", kept, is_whole=not given.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
