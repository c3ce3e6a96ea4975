"""Cost of a token in the response frames: our batched ones against upstream's framing, in one run.

    python -m benchmarks.response_frames [--streams 64] [--tokens 512] [--quick]

Two processes, a worker and a caller, over loopback TCP. The worker writes one token to every stream in each step, as an
engine does; the caller's receivers only count. Printed are CPU-microseconds per token of each process, for both
framings, their ratio, and the parts of the batched path alone.
"""

import argparse
import asyncio
import multiprocessing
import time
from array import array
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from benchmarks.report import write_result
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Item, Reply, Request, Target
from dynamo.runtime.request_plane.tcp.batched_caller import BatchedCall, BatchedLink
from dynamo.runtime.request_plane.tcp.batched_worker import BatchedSession
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics, TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane
from dynamo.runtime.request_plane.tcp.unfinished import UnfinishedFrames
from dynamo.runtime.server import Dispatcher

T = TypeVar("T")

FRAMINGS = ((True, "batched"), (False, "upstream"))
QUICK_TOKENS = 128
PATH = "1/bench/backend/generate"


class Counter:
    """Receiver that only counts."""

    def __init__(self, done: asyncio.Event, left: list[int]) -> None:
        self.tokens = 0
        self.done = done
        self.left = left

    def on_token(self, token_id: int) -> None:
        self.tokens += 1

    def on_item(self, item: Item) -> None:
        raise AssertionError("the benchmark sends only tokens")

    def on_end(self) -> None:
        self.left[0] -= 1
        if not self.left[0]:
            self.done.set()

    def on_error(self, error: Exception) -> None:
        raise error


def worker(pipe: Connection, streams: int, tokens: int) -> None:
    """Serve: wait for all streams, then step."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        replies: list[Reply] = []
        finished = asyncio.Event()

        def step(left: int) -> None:
            for reply in replies:
                reply.token(151_643)
            if left > 1:
                loop.call_soon(step, left - 1)
                return
            for reply in replies:
                reply.finish()
            finished.set()

        def handle(request: Request, reply: Reply) -> None:
            replies.append(reply)
            if len(replies) == streams:
                nonlocal started
                started = time.process_time()
                loop.call_soon(step, tokens)

        started = 0.0
        dispatcher = Dispatcher()
        dispatcher.add(PATH, handle)
        plane = TcpPlane(dispatcher, TcpOptions(host="127.0.0.1"))
        await plane.listen()
        pipe.send(plane.address(PATH).tcp)
        await finished.wait()
        await asyncio.sleep(0.2)
        pipe.send(time.process_time() - started)
        await loop.run_in_executor(None, pipe.recv)
        await plane.close()

    run_loop(run())


async def call(address: str, is_batched: bool, streams: int, tokens: int) -> float:
    """Send the requests, and return the CPU seconds of this process while the tokens arrived."""
    plane = TcpPlane(Dispatcher(), TcpOptions(host="127.0.0.1"))
    hostport, _, path = address.partition("/")
    target = Target(1, hostport, path, "msgpack", is_batched)
    await plane.connect(target)
    done, left = asyncio.Event(), [streams]
    receivers = [Counter(done, left) for _ in range(streams)]
    started = time.process_time()
    for index, receiver in enumerate(receivers):
        plane.send(target, Request(str(index), b"\x80"), receiver, lambda _, __: None)
    await done.wait()
    spent = time.process_time() - started
    assert all(receiver.tokens == tokens for receiver in receivers), "tokens were lost"
    await plane.close()
    return spent


def measure(is_batched: bool, streams: int, tokens: int) -> tuple[float, float]:
    """Return the CPU-microseconds per token of the worker and of the caller."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs, streams, tokens))
    process.start()
    caller_s = run_loop(call(ours.recv(), is_batched, streams, tokens))
    worker_s = ours.recv()
    ours.send(None)
    process.join()
    count = streams * tokens
    return worker_s / count * 1e6, caller_s / count * 1e6


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop, as our processes do."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Sink:
    """Transport that drops the written data."""

    def write(self, data: bytes) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None


async def parts(streams: int, rounds: int = 3000) -> tuple[float, float]:
    """Return microseconds per token of `reply.token` with its flush, and of reading the frame, without sockets."""
    metrics = TcpMetrics(MetricsRegistry())
    replies: list[Reply] = []
    dispatcher = Dispatcher()
    dispatcher.add(PATH, lambda _, reply: replies.append(reply))
    unfinished = UnfinishedFrames(TcpLimits().message_bytes_max, metrics)
    session = BatchedSession(dispatcher, TcpLimits(), metrics, unfinished, lambda _: None)
    session.connection_made(Sink())  # type: ignore[arg-type]
    link = BatchedLink("", TcpLimits(), metrics, lambda _: None)
    link.connection_made(Sink())  # type: ignore[arg-type]
    receiver = Counter(asyncio.Event(), [streams])
    target = Target(1, "", PATH, "msgpack", True)
    for index in range(streams):
        link.send(target, Request(str(index), b"\x80"), receiver, lambda _, __: None)
    session.data_received(b"".join(link._out))
    session._flush()
    best_write = best_read = 1e9
    data = frame.tokens_frame(array("I", range(streams)), array("I", [151_643] * streams))
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(rounds):
            for reply in replies:
                reply.token(151_643)
            session._flush()
        best_write = min(best_write, (time.perf_counter() - started) / rounds / streams * 1e6)
        started = time.perf_counter()
        for _ in range(rounds):
            link.data_received(data)
        best_read = min(best_read, (time.perf_counter() - started) / rounds / streams * 1e6)
        await asyncio.sleep(0)
    assert isinstance(next(iter(link._calls.values())), BatchedCall)
    return best_write, best_read


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and no results file")
    options = parser.parse_args()
    options.tokens = min(options.tokens, QUICK_TOKENS) if options.quick else options.tokens
    print(f"{options.streams} streams of {options.tokens} tokens; CPU-us per token, best of 3")
    best = {}
    for is_batched in (True, False):
        runs = [measure(is_batched, options.streams, options.tokens) for _ in range(3)]
        best[is_batched] = tuple(min(run[end] for run in runs) for end in (0, 1))
    print(f"{'framing':<12}{'worker':>10}{'caller':>10}")
    for is_batched, name in FRAMINGS:
        print(f"{name:<12}{best[is_batched][0]:>10.3f}{best[is_batched][1]:>10.3f}")
    ratios = [best[False][end] / best[True][end] for end in (0, 1)]
    print(f"{'ratio':<12}{ratios[0]:>9.1f}x{ratios[1]:>9.1f}x")
    write, read = run_loop(parts(options.streams))
    print(f"without sockets: reply.token and its frame {write:.3f} us, reading it {read:.3f} us a token")
    found = {
        "streams": options.streams,
        "tokens": options.tokens,
        "us_per_token": {name: dict(zip(("worker", "caller"), best[key], strict=True)) for key, name in FRAMINGS},
        "ratio": dict(zip(("worker", "caller"), ratios, strict=True)),
        "without_sockets_us": {"write": write, "read": read},
    }
    print(f"written to {write_result('response_frames', found, is_whole=not options.quick)}")


if __name__ == "__main__":
    main()
