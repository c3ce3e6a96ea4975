"""KV transfer between processes that fail: no state is left of them, and partial data is not used."""

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from dynamo.kvbm.transfer.base import Deadline, Descriptor, Layout, Region, TransferError
from dynamo.kvbm.transfer.puller import Puller
from dynamo.kvbm.transfer.shared import SharedMemoryPages, SharedMemoryPuller
from dynamo.kvbm.transfer.source import SourceOptions, TransferSource
from dynamo.kvbm.transfer.tcp import TcpPuller

pytestmark = pytest.mark.integration

LAYOUT = Layout(model="m", dtype="float32", item_bytes=4, block_tokens=4, layers=2, kv_heads=2, head_dim=8)
BLOCKS = 64
WAIT_S = 30.0


def serve(line: Connection) -> None:
    """Run a source that publishes all of its blocks, each filled with its number."""
    pages = SharedMemoryPages(BLOCKS * LAYOUT.block_bytes)
    region = Region(LAYOUT, pages.array)
    region.pages[:] = np.arange(BLOCKS, dtype=np.uint8)[None, :, None]
    source = TransferSource(region, lambda _: None, SourceOptions(host="127.0.0.1"), pages=pages)
    source.start()
    while line.recv():
        descriptor = source.publish(range(BLOCKS))
        assert descriptor is not None
        line.send(descriptor.to_builtins())


class Remote:
    """Source in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()

    def publish(self) -> Descriptor:
        self._line.send(True)
        assert self._line.poll(WAIT_S), "the source is silent"
        return Descriptor.read(self._line.recv())

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -9


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote()
    yield made
    if made.process.is_alive():
        made.kill()


@pytest.fixture
def region() -> Region:
    return Region(LAYOUT, np.full(BLOCKS * LAYOUT.block_bytes, 255, np.uint8))


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def shared_files() -> set[str]:
    """Return the files of transfers in shared memory; those of browsers, which other tests start, are left out."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("dynamo", "psm_"))}


def everything() -> list[tuple[int, int]]:
    return [(place, BLOCKS - 1 - place) for place in range(BLOCKS)]


def test_memory_of_a_killed_source_is_unmapped_by_its_readers(remote: Remote, region: Region) -> None:
    before = shared_files()
    member = SharedMemoryPuller(region)
    puller = Puller(region, [member])
    puller.pull(remote.publish(), everything(), Deadline.after(WAIT_S, stall_s=WAIT_S))
    assert region.pages[0, :, 0].tolist() == list(range(BLOCKS))[::-1]
    assert member.mapped == 1
    descriptor = remote.publish()
    remote.kill()
    until(lambda: member.mapped == 0, "the memory of a dead process is still mapped")
    with pytest.raises(TransferError):
        puller.pull(descriptor, everything(), Deadline.after(WAIT_S))
    assert shared_files() <= before
    puller.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_blocks_of_a_killed_source_are_complete_or_refused(region: Region, way: str) -> None:
    """The source is killed at a random time while its blocks are pulled repeatedly."""
    whole = 0
    patient = functools.partial(Deadline.after, WAIT_S, stall_s=WAIT_S)
    for delay_s in (0.0, 0.002, 0.01, 0.03):
        remote = Remote()
        members: Any = [SharedMemoryPuller(region)] if way == "shm" else [TcpPuller(region)]
        puller = Puller(region, members)
        descriptor = remote.publish()
        puller.pull(descriptor, everything(), patient())
        end = time.monotonic() + delay_s
        is_killed, last = False, 0.0
        try:
            while not is_killed or time.monotonic() < last:
                region.pages[:] = 255
                puller.pull(descriptor, everything(), patient())
                assert (region.pages == np.arange(BLOCKS, dtype=np.uint8)[::-1][None, :, None]).all()
                whole += 1
                if not is_killed and time.monotonic() >= end:
                    remote.process.kill()
                    is_killed, last = True, time.monotonic() + WAIT_S
        except TransferError:
            assert is_killed, "it failed while the source lived"
        else:
            raise AssertionError("a dead source went on for ever")
        puller.close()
        remote.process.join(WAIT_S)
    assert whole >= 4
