"""Free memory is returned to the system where the C library can."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from dynamo.core.memory import free_buffer, free_lists, release_pages, resident_bytes, trim_memory, unwritten_buffer
from dynamo.core.slices import SLICE_VALUES


def test_memory_trim_releases_all_free_memory() -> None:
    requested: list[int] = []

    def trim(keep: int) -> int:
        requested.append(keep)
        return 1

    assert trim_memory(lambda: trim)
    assert requested == [0]


def test_memory_trim_skips_a_libc_without_support() -> None:
    def missing() -> object:
        raise AttributeError("malloc_trim")

    assert trim_memory(missing) is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is promised")
def test_memory_discard_returns_pages_that_read_as_zero() -> None:
    size = 1 << 20
    memory = ctypes.create_string_buffer(b"x" * size, size)
    address = ctypes.addressof(memory)
    assert release_pages(address, size)
    assert memory.raw.count(b"\0") >= size - 2 * 65536, "all but what shares a page with others"
    assert memory.raw[0:1] == b"x" or address % 4096 == 0, "what shares a page with others stays"
    ctypes.memset(address, ord("y"), size)
    assert memory.raw.count(b"y") == size
    assert release_pages(address, 10), "there is no whole page in it"
    assert memory.raw.count(b"y") == size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is promised")
def test_a_buffer_is_released_only_if_nothing_else_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.core.memory.FREE_WAITS_S", (0.0,))
    size = 1 << 20
    assert free_buffer([bytearray(b"x") * size])
    shared, viewed = bytearray(b"x") * size, bytearray(b"x") * size
    view, held = memoryview(viewed), [shared]
    assert not free_buffer(held) and not held
    held = [viewed]
    del viewed
    assert not free_buffer(held)
    assert shared.count(b"x") == bytes(view).count(b"x") == size
    assert not free_buffer([bytearray()])


def test_an_unwritten_buffer_takes_memory_only_where_it_is_written() -> None:
    before, size = resident_bytes(), 256 << 20
    buffer = unwritten_buffer(size)
    assert len(buffer) == size
    assert resident_bytes() - before < size // 4
    buffer[-3:] = b"end"
    assert bytes(buffer[-3:]) == b"end"
    assert unwritten_buffer(0) == b""


def test_lists_are_freed_in_parts_only_if_nothing_else_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("dynamo.core.memory.FREE_WAITS_S", (0.1, 0.2))
    monkeypatch.setattr("dynamo.core.memory.time", SimpleNamespace(sleep=waits.append))
    shared = [1, 2]
    held: list[list[int]] = [list(range(3 * SLICE_VALUES)), shared, [], [0]]
    assert free_lists(held) == 3
    assert (shared, held, waits) == ([1, 2], [], [0.1, 0.2])
