"""Responses as files that frontends share."""

import os
from pathlib import Path

import pytest

from dynamo.api.responses.directory_store import LEFTOVER_S, SWEEP_S, DirectoryStore
from dynamo.api.responses.store import Dropped, StoreLimits
from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry

A, B, C = ("a" * 24, "b" * 24, "c" * 24)


def opened(folder: Path, clock: ManualClock | None = None, **limits: float) -> DirectoryStore:
    bounds = StoreLimits(**limits)  # type: ignore[arg-type]
    return DirectoryStore(str(folder), bounds, Dropped(MetricsRegistry(), "x"), clock or ManualClock(), grace_s=0.0)


async def test_stored_response_is_visible_to_other_frontends(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "store"), opened(tmp_path / "store")
    first.put(A, b"1")
    assert await first.get(A) == b"1"
    assert await second.get(A) == b"1"
    assert await second.delete(A) and not await first.delete(A)
    assert await first.get(A) is None
    await first.close()
    await second.close()


async def test_store_close_waits_for_pending_writes(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(20):
        store.put(f"{number:024x}", b"x")
    await store.close()
    assert len(os.listdir(tmp_path)) == 20


async def test_store_files_are_private_and_no_temporary_file_remains(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.put(A, b"1")
    assert await store.get(A) == b"1"
    assert os.stat(tmp_path / "store").st_mode & 0o777 == 0o700
    assert [(one.name, one.stat().st_mode & 0o777) for one in (tmp_path / "store").iterdir()] == [(f"{A}.json", 0o600)]
    await store.close()


async def test_unread_entries_expire_and_a_read_extends_the_lifetime(tmp_path: Path) -> None:
    clock = ManualClock()
    store = opened(tmp_path, clock, unused_s=100.0)
    store.put(A, b"1")
    store.put(B, b"2")
    assert await store.get(A) == b"1"
    clock.advance(90.0)
    assert await store.get(A) == b"1"
    clock.advance(90.0)
    assert await store.get(A) == b"1" and await store.get(B) is None
    clock.advance(SWEEP_S + 1)
    store.put(C, b"3")
    assert await store.get(C) == b"3"
    assert {name[0] for name in os.listdir(tmp_path)} == {"a", "c"}
    await store.close()


async def test_full_store_evicts_the_least_recently_read_entry(tmp_path: Path) -> None:
    clock = ManualClock()
    store = opened(tmp_path, clock, entries_max=2)
    for key in (A, B):
        store.put(key, b"x")
        assert await store.get(key) is not None
        clock.advance(1.0)
    assert await store.get(A) is not None
    clock.advance(SWEEP_S + 1)
    store.put(C, b"x")
    assert await store.get(C) is not None
    assert await store.get(B) is None
    assert store.entries <= 2
    await store.close()


async def test_abandoned_temporary_file_is_removed_at_start(tmp_path: Path) -> None:
    old, new, other = tmp_path / "x-1.part", tmp_path / "x-2.part", tmp_path / "notes.txt"
    for one in (old, new, other):
        one.write_bytes(b"x")
    os.utime(old, (os.stat(new).st_mtime - LEFTOVER_S - 60,) * 2)
    store = opened(tmp_path)
    assert not old.exists() and new.exists() and other.exists()
    await store.close()


async def test_failed_disk_write_loses_only_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    store = opened(folder)
    folder.rmdir()
    store.put(A, b"1")
    assert await store.get(A) is None
    await store.close()
    assert "failed to store a response" in caplog.text


def test_store_path_that_is_not_a_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--responses-store"):
        opened(tmp_path / "file")
