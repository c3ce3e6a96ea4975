"""Intact blocks are read back, torn or foreign ones are detected, and a full disk is reported."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.physical import disk as module
from dynamo.kvbm.physical.disk import Disk, DiskFull
from dynamo.kvbm.physical.host import HostArena
from dynamo.kvbm.physical.layout import PAGE_BYTES, BlockLayout

LAYOUT = BlockLayout((3, 500), "float32", "model")
STRIDE = PAGE_BYTES + LAYOUT.stride_bytes


@pytest.fixture
def arena() -> HostArena:
    arena = HostArena(LAYOUT, 8)
    for slot in range(4):
        arena.array(slot)[...] = slot + 1
    return arena


def block(key: int) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None, 7)


def written(tmp_path: Path, arena: HostArena, *slots: int, **options: Any) -> Disk:
    disk = Disk(str(tmp_path), LAYOUT, 8, **options)
    disk.write([(slot, block(slot + 1), arena.padded(slot)) for slot in slots])
    return disk


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 2)])
def test_disk_tier_round_trips_blocks(
    tmp_path: Path, arena: HostArena, is_direct: bool, slots: tuple[int, ...]
) -> None:
    disk = written(tmp_path, arena, *slots, is_direct=is_direct, syncs=True)
    outcomes = disk.read([(slot, slot + 1, arena.padded(4 + at)) for at, slot in enumerate(slots)])
    assert outcomes == [None] * len(slots)
    for at, slot in enumerate(slots):
        np.testing.assert_array_equal(arena.array(4 + at), np.full(LAYOUT.shape, slot + 1, np.float32))
    disk.close()


def test_disk_tier_restart_finds_intact_blocks_parents_first(tmp_path: Path, arena: HostArena) -> None:
    disk = Disk(str(tmp_path), LAYOUT, 8)
    disk.write([(5, block(1), arena.padded(0)), (2, block(2), arena.padded(1))])
    disk.close()
    again = Disk(str(tmp_path), LAYOUT, 8)
    assert list(again.restore().items()) == [(5, block(1)), (2, block(2))]
    again.close()


@pytest.mark.parametrize("place", [0, 30, PAGE_BYTES, PAGE_BYTES + LAYOUT.block_bytes - 1])
def test_disk_tier_detects_a_torn_block(tmp_path: Path, arena: HostArena, place: int) -> None:
    disk = written(tmp_path, arena, 0, 1)
    with open(disk.path, "r+b") as file:
        file.seek(PAGE_BYTES + STRIDE + place)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    first, second = disk.read([(0, 1, arena.padded(4)), (1, 2, arena.padded(5))])
    assert first is None
    assert second is not None
    disk.close()


def test_disk_tier_detects_a_block_under_a_wrong_name(tmp_path: Path, arena: HostArena) -> None:
    disk = written(tmp_path, arena, 0)
    assert disk.read([(0, 99, arena.padded(4))]) != [None]
    disk.close()


def test_disk_tier_truncated_file_keeps_its_leading_blocks(tmp_path: Path, arena: HostArena) -> None:
    disk = written(tmp_path, arena, 0, 1, 2)
    disk.close()
    os.truncate(disk.path, PAGE_BYTES + STRIDE + 5000)
    again = Disk(str(tmp_path), LAYOUT, 8)
    assert set(again.restore()) == {0, 1}
    assert [outcome is None for outcome in again.read([(0, 1, arena.padded(4)), (1, 2, arena.padded(5))])] == [
        True,
        False,
    ]
    again.close()


def test_disk_tier_erased_blocks_are_absent_after_restart(tmp_path: Path, arena: HostArena) -> None:
    disk = written(tmp_path, arena, 0, 1)
    disk.erase(0)
    assert set(disk.restore()) == {1}
    disk.clear()
    assert disk.restore() == {}
    disk.close()


def test_disk_tier_has_one_file_per_layout(tmp_path: Path, arena: HostArena) -> None:
    disk = written(tmp_path, arena, 0)
    disk.close()
    other = Disk(str(tmp_path), BlockLayout((3, 500), "float32", "another model"), 8)
    assert other.path != disk.path
    assert other.restore() == {}
    other.close()


def test_disk_tier_file_belongs_to_one_process(tmp_path: Path) -> None:
    one, other = Disk(str(tmp_path), LAYOUT, 8), Disk(str(tmp_path), LAYOUT, 8)
    assert one.path != other.path
    one.close()
    other.close()


def test_disk_tier_file_may_grow_and_shrink(tmp_path: Path, arena: HostArena) -> None:
    written(tmp_path, arena, 0, 1, 2).close()
    small = Disk(str(tmp_path), LAYOUT, 2)
    assert set(small.restore()) == {0, 1}
    small.close()
    large = Disk(str(tmp_path), LAYOUT, 64)
    assert set(large.restore()) == {0, 1}
    large.close()


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, OSError)]
)
def test_disk_tier_reports_a_failed_write(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    disk = Disk(str(tmp_path), LAYOUT, 8)

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "pwritev", refuse)
    with pytest.raises(expected):
        disk.write([(0, block(1), arena.padded(0))])
    monkeypatch.setattr(module.os, "pwritev", lambda *_: 100)
    with pytest.raises(DiskFull):
        disk.write([(0, block(1), arena.padded(0))])
    disk.close()


def test_disk_tier_reports_a_full_disk_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    with pytest.raises(DiskFull):
        Disk(str(tmp_path), LAYOUT, 8)


@pytest.mark.parametrize("fills_with_zeros", [True, False])
def test_disk_tier_works_without_preallocation(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch, fills_with_zeros: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    disk = written(tmp_path, arena, 1, fills_with_zeros=fills_with_zeros)
    assert os.path.getsize(disk.path) == disk.size_bytes
    assert disk.read([(1, 2, arena.padded(4))]) == [None]
    disk.close()


def test_disk_tier_error_names_an_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DYN_KVBM_DISK_CACHE_DIR"):
        Disk(str(tmp_path / "file" / "below"), LAYOUT, 8)


def test_disk_tier_passes_over_files_that_other_users_can_write(tmp_path: Path) -> None:
    first = Disk(str(tmp_path), LAYOUT, 2)
    first.close()
    os.chmod(first.path, 0o666)
    other = Disk(str(tmp_path), LAYOUT, 2)
    assert other.path != first.path
    other.close()


def test_disk_tier_does_not_follow_a_link(tmp_path: Path) -> None:
    first = Disk(str(tmp_path), LAYOUT, 2)
    first.discard()
    target = tmp_path / "a file of this user"
    target.write_text("content")
    os.symlink(target, first.path)
    other = Disk(str(tmp_path), LAYOUT, 2)
    assert other.path != first.path
    assert target.read_text() == "content"
    other.close()


def test_disk_tier_passes_over_files_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "user_id", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="used by 64 processes, or contains other users' files"):
        Disk(str(tmp_path), LAYOUT, 2)
