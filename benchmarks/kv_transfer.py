"""KV transfer: bandwidth of block transfers between processes by each transport, compared with memcpy in the same run.

    python -m benchmarks.kv_transfer [--mib 128] [--rounds 15]

The source is a process of its own and holds a cache with the layout of a small model (28 layers, 8 heads, blocks of 16
tokens); the puller fills blocks of its own cache, at other indices and in another order. `memcpy` is the same copy
within one process, an upper bound. NIXL is measured where it is installed.
"""

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.report import write_result
from dynamo.kvbm.transfer import nixl, shared
from dynamo.kvbm.transfer.base import Deadline, Descriptor, Layout, PullMember, Region
from dynamo.kvbm.transfer.nixl import NixlAgent, NixlPuller
from dynamo.kvbm.transfer.puller import Puller
from dynamo.kvbm.transfer.shared import SharedMemoryPages, SharedMemoryPuller
from dynamo.kvbm.transfer.source import SourceOptions, TransferSource
from dynamo.kvbm.transfer.tcp import TcpPuller

LAYOUT = Layout(model="bench", dtype="float16", item_bytes=2, block_tokens=16, layers=28, kv_heads=8, head_dim=128)
DEADLINE_S = 120.0
MIB, GB = 2**20, 1e9
ONE_PIECE, BLOCK_BY_BLOCK = "memcpy, one piece", "memcpy, block by block"


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one transport."""

    name: str
    seconds: float
    size: int

    @property
    def gb_s(self) -> float:
        return self.size / self.seconds / GB


def source_process(way: str, blocks: int, line: Connection) -> None:
    """Publish all blocks at each request, until the request to end."""
    size = blocks * LAYOUT.block_bytes
    pages = SharedMemoryPages(size) if way == "shm" else None
    memory = np.empty(size, np.uint8) if pages is None else pages.array
    memory[:] = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
    region = Region(LAYOUT, memory)
    agent = NixlAgent(region) if way == "nixl" else None
    source = TransferSource(region, lambda _: None, SourceOptions(host="127.0.0.1"), pages=pages, agent=agent)
    source.start()
    while line.recv():
        descriptor = source.publish(range(blocks))
        assert descriptor is not None, "the source holds too much"
        line.send(descriptor.to_builtins())
    source.close()


@contextmanager
def source_of(way: str, blocks: int) -> Iterator[Callable[[], Descriptor]]:
    """Run a source in a process of its own; each call publishes again."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source_process, args=(way, blocks, theirs), daemon=True)
    process.start()

    def publish() -> Descriptor:
        ours.send(True)
        assert ours.poll(DEADLINE_S), "the source is silent"
        return Descriptor.read(ours.recv())

    try:
        yield publish
    finally:
        ours.send(False)
        process.join(10)
        process.kill()


def member_of(way: str, region: Region) -> PullMember:
    """Return the puller's side of a transport."""
    if way == "shm":
        return SharedMemoryPuller(region)
    tcp = TcpPuller(region, is_checked=way == "tcp+digest")
    return NixlPuller(NixlAgent(region), tcp) if way == "nixl" else tcp


def pairs_of(blocks: int) -> list[tuple[int, int]]:
    """Return runs of eight blocks, in another order than at the source."""
    runs = [range(first, min(first + 8, blocks)) for first in range(0, blocks, 8)]
    order = [block for run in reversed(runs) for block in run]
    return list(enumerate(order))


class Way:
    """Open transport between two processes."""

    def __init__(self, name: str, blocks: int, publish: Callable[[], Descriptor]) -> None:
        self.name = name
        self.size = blocks * LAYOUT.block_bytes
        self._region = Region(LAYOUT, np.zeros(self.size, np.uint8))
        self._puller = Puller(self._region, [member_of(name, self._region)])
        self._pairs = pairs_of(blocks)
        self._publish = publish

    def move(self) -> float:
        """Return the seconds of one transfer, and check the data afterwards."""
        self._region.flat[:] = 0
        descriptor = self._publish()
        began = time.perf_counter()
        self._puller.pull(descriptor, self._pairs, Deadline.after(DEADLINE_S))
        seconds = time.perf_counter() - began
        self._puller.release(descriptor)
        want = np.arange(self.size // 8, dtype=np.uint64).view(np.uint8).reshape(self._region.pages.shape)
        for place, block in self._pairs[:: max(1, len(self._pairs) // 16)]:
            assert (self._region.pages[:, block] == want[:, place]).all(), f"block {block} is wrong"
        return seconds

    def close(self) -> None:
        self._puller.close()


class Memcpy:
    """The same copy within this process."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.size = blocks * LAYOUT.block_bytes
        self._source = Region(LAYOUT, np.arange(self.size // 8, dtype=np.uint64).view(np.uint8))
        self._region = Region(LAYOUT, np.zeros(self.size, np.uint8))
        self._pairs = pairs_of(blocks)

    def move(self) -> float:
        """Return the seconds of one copy."""
        began = time.perf_counter()
        if self.name == ONE_PIECE:
            np.copyto(self._region.flat, self._source.flat)
        else:
            self._region.copy(self._source, self._pairs)
        return time.perf_counter() - began


def measure(blocks: int, rounds: int, names: list[str]) -> list[Row]:
    """Return medians of rounds in which the transports alternate, so that background load affects all of them."""
    with ExitStack() as stack:
        movers: list[Way | Memcpy] = [Memcpy(ONE_PIECE, blocks), Memcpy(BLOCK_BY_BLOCK, blocks)]
        for name in names:
            way = Way(name, blocks, stack.enter_context(source_of(name, blocks)))
            stack.callback(way.close)
            movers.append(way)
        for mover in movers:
            mover.move()  # Opens connections and touches the memory.
        times: dict[str, list[float]] = {mover.name: [] for mover in movers}
        for _ in range(rounds):
            for mover in movers:
                times[mover.name].append(mover.move())
        return [Row(mover.name, statistics.median(times[mover.name]), mover.size) for mover in movers]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="Size of a transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds, and no result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 3
    blocks = max(1, options.mib * MIB // LAYOUT.block_bytes)
    ways = [
        *(["shm"] if shared.is_available() else []),
        "tcp",
        "tcp+digest",
        *(["nixl"] if nixl.is_available() else []),
    ]
    rows = measure(blocks, options.rounds, ways)
    print(f"{blocks} blocks of {LAYOUT.block_bytes // 1024} KiB, {rows[0].size / MIB:.0f} MiB; {platform.processor() or platform.machine()}")  # fmt: skip
    for row in rows:
        print(
            f"  {row.name:24s} {row.gb_s:7.2f} GB/s  {row.seconds * 1000:8.1f} ms  {row.gb_s / rows[1].gb_s:5.2f} of memcpy"
        )
    if "nixl" not in ways:
        print("  nixl                     not installed (.venv/bin/pip install nixl)")
    found = {"mib": options.mib, "ways": {row.name: {"gb_s": row.gb_s, "bytes": row.size} for row in rows}}
    print(write_result("kv_transfer", found, is_whole=not options.quick))


if __name__ == "__main__":
    main()
