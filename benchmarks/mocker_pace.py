"""Mocker pace: accuracy of simulated times, ours and the released mocker's, with the same client in one run.

    python -m benchmarks.mocker_pace [--streams 1,16,64,256]

Each mocker serves twice as many requests as streams (512 uncached prompt tokens, 128 output tokens) at the speed of a
real engine, `--speedup-ratio 1`, over the request plane, without a frontend. Printed are the total time, the time to
first token and the time between tokens. The scheduling of prefill and decode within a batch determines all three, so
equal figures mean equal schedulers. Without the released system ours is measured alone.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, quantiles
from typing import Any

from benchmarks.corpus import bench_model
from benchmarks.peer import PeerMissing, ensure_peer
from benchmarks.report import write_result
from benchmarks.stacks import HOST, Implementation, Recipe, Stack, ours, theirs
from dynamo.core.codec import MSGPACK, encode
from dynamo.protocols.engine import PreprocessedRequest, StopConditions
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane

PROMPT_TOKENS = 512
ANSWER_TOKENS = 128
VOCABULARY = 16_000  # Below the benchmark model's size, so that both mockers accept every id.
ANSWER_TIMEOUT_S = 120.0


class Stopwatch:
    """Receiver that records the time of each token."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int) -> None:
        self.times.append(time.perf_counter())

    def on_item(self, item: Item) -> None:
        self.times.append(time.perf_counter())

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.ended.set_exception(error)


async def send_request(client: Client, name: str, seed: random.Random, permits: asyncio.Semaphore) -> list[float]:
    """Return the times of one request: sent, first token, second token, …"""
    async with permits:
        watch = Stopwatch()
        prompt = [seed.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        stop = StopConditions(max_tokens=ANSWER_TOKENS)
        body = encode(PreprocessedRequest(model="bench", token_ids=prompt, stop_conditions=stop), MSGPACK)
        await client.send(body, watch, request_id=name)
        await asyncio.wait_for(watch.ended, ANSWER_TIMEOUT_S)
        return watch.times


FORMS = (8, 11, 11, 11, 11), (2, 1, 1, 2, 2)
"""Width and digits of the columns."""


async def measure(home: str, streams: int) -> dict[str, float]:
    """Return the figures of the registered mocker."""
    options = TcpOptions(host=HOST, answer_host=HOST)
    runtime = DistributedRuntime(
        None,
        FileDiscovery(os.path.join(home, "discovery")),
        lambda dispatcher, registry: TcpPlane(dispatcher, options, registry),
    )
    try:
        client = await runtime.endpoint("dynamo.backend.generate").client()
        await client.wait_for_instances(10)
        seed, permits = random.Random(streams), asyncio.Semaphore(streams)
        began = time.perf_counter()
        requested = [send_request(client, f"{streams}-{number}", seed, permits) for number in range(2 * streams)]
        answers = await asyncio.gather(*requested)
        elapsed = time.perf_counter() - began
    finally:
        await runtime.shutdown()
    first = [1000 * (times[1] - times[0]) for times in answers]
    between = [1000 * (after - before) for times in answers for before, after in pairwise(times[1:])]
    return {
        "all_s": elapsed, "ttft_p50_ms": median(first), "ttft_p90_ms": tail(first),
        "itl_mean_ms": mean(between), "itl_p50_ms": median(between),
    }  # fmt: skip


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return quantiles(values, n=2)[0]


def tail(values: Sequence[float]) -> float:
    """Return the 90th percentile."""
    return quantiles(values, n=10, method="inclusive")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", default="1,16,64,256", help="how many at once, a comma between")
    parser.add_argument("--quick", action="store_true", help="16 and 64 streams, and no result file")
    options = parser.parse_args()
    counts = [16, 64] if options.quick else [int(word) for word in options.streams.split(",")]
    found: list[dict[str, Any]] = []
    implementations: list[Implementation] = [ours()]
    try:
        implementations.append(theirs(ensure_peer()))
    except PeerMissing as error:
        print(f"the released system cannot be run here: {error}")
    print(
        f"{'streams':>7} {'mocker':>7} {'all, s':>8} {'TTFT p50':>10} {'TTFT p90':>10} {'ITL mean':>10} {'ITL p50':>10}  ms"
    )
    for streams in counts:
        for implementation in implementations:
            with Stack(
                Recipe(name=implementation.name, frontend=ours(), engine=implementation, speedup=1.0), bench_model()
            ) as stack:
                row = asyncio.run(measure(stack.home, streams))
            found.append({"streams": streams, "mocker": implementation.name, **row})
            cells = "".join(
                f"{value:{width}.{digits}f}" for value, width, digits in zip(row.values(), *FORMS, strict=True)
            )
            print(f"{streams:7} {implementation.name:>7} {cells}", flush=True)
    print(write_result("mocker_pace", {"runs": found}, is_whole=not options.quick))


if __name__ == "__main__":
    main()
