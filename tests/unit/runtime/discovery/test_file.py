"""Discovery in a directory: upstream's layout, refresh, expiry, and disk errors."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.tasks import RESTART_FIRST_S
from dynamo.runtime.discovery import file as file_module
from dynamo.runtime.discovery.base import Delete, Put, Synced
from dynamo.runtime.discovery.file import (
    RECORD_BYTES_MAX,
    REFRESH_S,
    REMOVE_S,
    FileDiscovery,
    decode_name,
    default_root,
    encode_name,
)

BUCKET = "v1/instances"


class Registry(FileDiscovery):
    """On a manual clock, and polling only on demand."""

    def _start_watching(self, bucket: str) -> None:
        """Do nothing: the test polls explicitly."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def path_of(root: Path, key: str) -> Path:
    return root / "v1" / "instances" / encode_name(key)


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def age(path: Path, clock: ManualClock, seconds: float) -> None:
    os.utime(path, (clock.wall() - seconds, clock.wall() - seconds))


def test_file_discovery_names_equal_those_of_released_dynamo() -> None:
    assert encode_name("ns-a/back_end/generate/9dca") == "ns%2Da%2Fback%5Fend%2Fgenerate%2F9dca"
    assert encode_name("ü.~") == "%C3%BC%2E%7E"


@given(st.text(max_size=30))
def test_file_discovery_names_round_trip_every_key(key: str) -> None:
    name = encode_name(key)
    assert name.replace("%", "").isascii()
    assert decode_name(name) == key


@pytest.mark.parametrize("name", ["a-b", ".123-4", "a%2", "a%zz", "a%2d", "%FF", "a%41", "ü"])
def test_file_discovery_ignores_other_files(name: str) -> None:
    assert decode_name(name) is None


async def test_file_discovery_writes_one_file_per_record(tmp_path: Path, clock: ManualClock) -> None:
    registry = Registry(str(tmp_path), clock)
    await registry.put(BUCKET, "n/c/e/1", b"{}")
    files = files_under(tmp_path)
    assert files == [path_of(tmp_path, "n/c/e/1")]
    assert files[0].read_bytes() == b"{}"
    await registry.close()
    assert not files[0].exists()


async def test_file_discovery_removes_unfinished_records_of_a_killed_process(tmp_path: Path) -> None:
    (tmp_path / ".new-1").touch()
    os.utime(tmp_path / ".new-1", (1, 1))
    FileDiscovery(str(tmp_path))
    assert files_under(tmp_path) == []


async def test_file_discovery_expires_and_removes_a_stale_record(tmp_path: Path, clock: ManualClock) -> None:
    owner, reader = Registry(str(tmp_path), clock), Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    age(path_of(tmp_path, "k"), clock, 0)
    watch = reader.watch(BUCKET)
    assert [await anext(watch), await anext(watch)] == [Put("k", b"v"), Synced()]
    for _ in range(3):
        clock.advance(4)
        owner.refresh()
        reader.look()
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    for _ in range(11):
        clock.advance(1)
        reader.look()
    assert await anext(watch) == Delete("k")
    clock.advance(REMOVE_S - 12)
    reader.look()  # After a pause of the reader, the record gets a second chance.
    assert path_of(tmp_path, "k").exists()
    for _ in range(13):
        clock.advance(1)
        reader.look()
    assert not path_of(tmp_path, "k").exists()
    await owner.close()
    await reader.close()


async def test_file_discovery_rewrites_a_removed_record(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    path_of(tmp_path, "k").unlink()
    owner.refresh()
    assert path_of(tmp_path, "k").read_bytes() == b"v"
    assert "removed by another process" in caplog.text
    await owner.close()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_file_discovery_logs_a_full_disk_once_and_recovers(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    path_of(tmp_path, "k").unlink()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("dynamo.runtime.discovery.file.os.replace", fail)
        for _ in range(3):
            owner.refresh()
    assert caplog.text.count("No space left on device") == 1
    assert caplog.text.count("removed by another process") == 1
    assert files_in(tmp_path) == []
    owner.refresh()
    owner.refresh()
    assert path_of(tmp_path, "k").read_bytes() == b"v"
    assert caplog.text.count("refreshed again") == 1
    await owner.close()


async def test_file_discovery_extends_expiry_after_a_pause_of_the_reader(tmp_path: Path, clock: ManualClock) -> None:
    """A laptop that slept wakes with every record stale; its workers are still there."""
    reader = Registry(str(tmp_path), clock)
    other = Registry(str(tmp_path), clock)
    await other.put(BUCKET, "k", b"v")
    age(path_of(tmp_path, "k"), clock, 0)
    reader.watch(BUCKET)
    reader.look()
    clock.advance(3600)
    reader.look()
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    clock.advance(4)
    reader.look()
    clock.advance(4)
    reader.look()
    assert await reader.snapshot(BUCKET) == {}
    await reader.close()
    await other.close()


async def test_file_discovery_keeps_the_last_view_of_an_unreadable_directory(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    owner, reader = Registry(str(root), clock), Registry(str(root), clock)
    await owner.put(BUCKET, "k", b"v")
    age(path_of(root, "k"), clock, 0)
    reader.watch(BUCKET)
    away = tmp_path / "away"
    root.rename(away)
    reader.look()
    reader.look()
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    assert caplog.text.count("keeping the last view") == 1
    away.rename(root)
    (root / "v1" / "instances" / encode_name("new")).write_bytes(b"n")
    age(path_of(root, "new"), clock, 0)
    reader.look()
    assert await reader.snapshot(BUCKET) == {"k": b"v", "new": b"n"}
    await owner.close()
    await reader.close()


async def test_file_discovery_ignores_an_empty_file(tmp_path: Path, clock: ManualClock) -> None:
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    path = path_of(tmp_path, "k")
    path.touch()
    age(path, clock, 0)
    reader.look()
    assert await reader.snapshot(BUCKET) == {}
    path.write_bytes(b"v")
    age(path, clock, 0)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    await reader.close()


async def test_file_discovery_refuses_a_key_too_long_for_a_file_name(tmp_path: Path) -> None:
    registry = FileDiscovery(str(tmp_path))
    with pytest.raises(InvalidArgument, match="1 to 255"):
        await registry.put(BUCKET, "/" * 100, b"v")
    with pytest.raises(InvalidArgument, match="1 to 255"):
        await registry.put(BUCKET, "", b"v")
    await registry.close()


def test_file_discovery_refuses_a_root_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="DYN_FILE_KV"):
        FileDiscovery(str(tmp_path / "file" / "store"))


def test_file_discovery_refuses_a_root_that_it_cannot_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (str(tmp_path), os.W_OK))
    with pytest.raises(
        ConfigError, match=r"DYN_FILE_KV='.*': cannot write to the directory: no permission, or a read-only"
    ):
        FileDiscovery(str(tmp_path))


def test_file_discovery_root_is_the_variable_or_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", "somewhere")
    assert default_root() == "somewhere"
    monkeypatch.delenv("DYN_FILE_KV")
    assert Path(default_root()).name == "dynamo_store_kv"


async def test_file_discovery_files_are_writable_only_by_their_user(tmp_path: Path, clock: ManualClock) -> None:
    before = os.umask(0)
    try:
        registry = Registry(str(tmp_path / "store"), clock)
        await registry.put(BUCKET, "k", b"v")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path_of(tmp_path / "store", "k").stat().st_mode) == 0o600
    for directory in ("store", "store/v1", "store/v1/instances"):
        assert stat.S_IMODE((tmp_path / directory).stat().st_mode) == 0o700
    await registry.close()


@pytest.mark.parametrize("part", ["", "v1", "v1/instances"])
async def test_file_discovery_refuses_a_directory_writable_by_others(tmp_path: Path, part: str) -> None:
    (tmp_path / BUCKET).mkdir(parents=True)
    (tmp_path / part).chmod(0o777)
    with pytest.raises(ConfigError, match=r"DYN_FILE_KV='.*': mode 0777 lets other users write"):
        await FileDiscovery(str(tmp_path)).put(BUCKET, "k", b"v")
    with pytest.raises(ConfigError, match="lets other users write"):
        FileDiscovery(str(tmp_path)).watch(BUCKET)


def test_file_discovery_refuses_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.core.private_paths.user_id", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="owned by user"):
        FileDiscovery(str(tmp_path))


async def test_file_discovery_uses_a_directory_created_by_a_released_process(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Its directories have mode 0755 and its records 0644."""
    (tmp_path / BUCKET).mkdir(parents=True, mode=0o755)
    path = path_of(tmp_path, "k")
    path.write_bytes(b"v")
    path.chmod(0o644)
    age(path, clock, 0)
    reader = Registry(str(tmp_path), clock)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    await reader.close()


async def test_file_discovery_ignores_records_of_other_users(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = Registry(str(tmp_path), clock), Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    monkeypatch.setattr(file_module, "user_id", lambda: os.geteuid() + 1)
    monkeypatch.setattr(file_module, "SUPERUSER", -1)
    assert await reader.snapshot(BUCKET) == {}
    assert await reader.snapshot(BUCKET) == {}
    assert caplog.text.count("owned by user") == 1
    await owner.close()


def damage_truncate(path: Path) -> None:
    path.write_bytes(b"")


def damage_overwrite(path: Path) -> None:
    path.write_bytes(b"x")


def damage_append(path: Path) -> None:
    path.write_bytes(b"vv")


def damage_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def damage_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage_grow(path: Path) -> None:
    os.truncate(path, 300 << 20)


def damage_remove(path: Path) -> None:
    path.unlink()


DAMAGES = [damage_truncate, damage_overwrite, damage_append, damage_link, damage_pipe, damage_grow, damage_remove]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_file_discovery_owner_repairs_its_damaged_record(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    owner = Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    path = path_of(tmp_path, "k")
    damage(path)
    owner.repair()
    assert path.read_bytes() == b"v"
    assert path.stat(follow_symlinks=False).st_size == 1
    owner.repair()
    assert caplog.text.count("by another process; writing it again") == 1
    await owner.close()


@pytest.mark.parametrize("damage", [damage_truncate, damage_link, damage_pipe, damage_grow])
async def test_file_discovery_reader_keeps_the_last_value_of_a_damaged_record_until_it_expires(
    tmp_path: Path, clock: ManualClock, damage: Callable[[Path], None]
) -> None:
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    path = path_of(tmp_path, "k")
    path.write_bytes(b"v")
    age(path, clock, 0)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    damage(path)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    for _ in range(12):
        clock.advance(1)
        reader.look()
    assert await reader.snapshot(BUCKET) == {}
    await reader.close()


async def test_file_discovery_reader_skips_a_huge_record(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    path = path_of(tmp_path, "k")
    path.touch()
    damage_grow(path)
    age(path, clock, 0)
    for _ in range(3):
        assert await reader.snapshot(BUCKET) == {}
    assert caplog.text.count(f"{300 << 20} bytes: must be at most {RECORD_BYTES_MAX}") == 1
    with pytest.raises(InvalidArgument, match="at most"):
        await reader.put(BUCKET, "large", bytes(RECORD_BYTES_MAX + 1))
    await reader.close()


@pytest.mark.parametrize("skew_s", [-3600.0, -15.0, -10.0, 10.0, 15.0, 3600.0])
async def test_file_discovery_keeps_a_record_of_an_owner_with_another_clock(
    tmp_path: Path, clock: ManualClock, skew_s: float
) -> None:
    other_clock = ManualClock(wall=clock.wall() + skew_s)
    owner, reader = Registry(str(tmp_path), other_clock), Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    owner.refresh()
    watch = reader.watch(BUCKET)
    for second in range(120):
        for one in (clock, other_clock):
            one.advance(1)
        if second % int(REFRESH_S) == 0:
            owner.refresh()
        reader.look()
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    changes = [change for change in iter(watch._take, None)]  # noqa: C416 - what a reader of the watch gets
    assert changes.count(Delete("k")) == 0
    await owner.close()
    await reader.close()


@pytest.mark.parametrize("skew_s", [0.0, 3600.0])
async def test_file_discovery_expires_a_record_of_a_dead_owner_regardless_of_its_clock(
    tmp_path: Path, clock: ManualClock, skew_s: float
) -> None:
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    path = path_of(tmp_path, "k")
    path.write_bytes(b"v")
    age(path, clock, -skew_s)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    for _ in range(11):
        clock.advance(1)
        reader.look()
    assert await reader.snapshot(BUCKET) == {}
    await reader.close()


async def test_file_discovery_shows_a_record_that_was_old_when_first_seen_once_it_is_refreshed(
    tmp_path: Path, clock: ManualClock
) -> None:
    path = path_of(tmp_path, "k")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"v")
    age(path, clock, 60)
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    assert await reader.snapshot(BUCKET) == {}
    assert path.exists()
    age(path, clock, 57)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    await reader.close()


async def test_file_discovery_keeps_the_view_of_a_removed_directory_until_records_expire(
    tmp_path: Path, clock: ManualClock
) -> None:
    owner, reader = Registry(str(tmp_path), clock), Registry(str(tmp_path), clock)
    await owner.put(BUCKET, "k", b"v")
    reader.watch(BUCKET)
    shutil.rmtree(tmp_path / "v1")
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    owner.repair()
    assert path_of(tmp_path, "k").read_bytes() == b"v"
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    shutil.rmtree(tmp_path / "v1")
    for _ in range(12):
        clock.advance(1)
        reader.look()
    assert await reader.snapshot(BUCKET) == {}
    await owner.close()
    await reader.close()


async def test_file_discovery_keeps_the_last_value_of_an_unreadable_record(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Registry(str(tmp_path), clock)
    reader.watch(BUCKET)
    path = path_of(tmp_path, "k")
    path.write_bytes(b"v")
    age(path, clock, 0)
    assert await reader.snapshot(BUCKET) == {"k": b"v"}
    path.write_bytes(b"changed")
    age(path, clock, 0)

    def fail(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr("dynamo.runtime.discovery.file._read_file", fail)
        assert await reader.snapshot(BUCKET) == {"k": b"v"}
    assert "cannot read record" in caplog.text
    assert await reader.snapshot(BUCKET) == {"k": b"changed"}
    await reader.close()


async def test_file_discovery_reports_a_full_disk_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FileDiscovery(str(tmp_path))

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynamo.runtime.discovery.file.os.replace", fail)
    with pytest.raises(ConfigError, match=r"DYN_FILE_KV=.*No space left"):
        await registry.put(BUCKET, "k", b"v")
    await registry.close()


async def test_file_discovery_refresh_crash_is_visible_and_restarted(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(str(tmp_path), clock)
    refresh, faults = registry.refresh, iter([ValueError("a slip")])

    def refresh_once_broken() -> None:
        for fault in faults:
            raise fault
        refresh()

    async def after(seconds: float) -> None:
        await turns(10)
        clock.advance(seconds)
        await turns(10)

    monkeypatch.setattr(registry, "refresh", refresh_once_broken)
    await registry.put(BUCKET, "k", b"v")
    await after(REFRESH_S)
    assert not registry.is_sound
    await after(RESTART_FIRST_S)
    age(path_of(tmp_path, "k"), clock, 5.0)
    await after(REFRESH_S)
    assert path_of(tmp_path, "k").stat().st_mtime >= clock.wall() - 1
    assert registry.is_sound
    await registry.close()


async def test_persistent_record_remains_after_its_writer_and_never_expires(tmp_path: Path, clock: ManualClock) -> None:
    writer, reader = Registry(str(tmp_path), clock), Registry(str(tmp_path), clock)
    await writer.put(BUCKET, "k", b"0")
    await writer.put_persistent(BUCKET, "k", b"1")
    await writer.close()
    for _ in range(3):
        assert await reader.snapshot(BUCKET) == {"k": b"1"}
        clock.advance(10 * REMOVE_S)
    await Registry(str(tmp_path), clock).put_persistent(BUCKET, "k", b"2")
    assert await reader.snapshot(BUCKET) == {"k": b"2"}
    assert await Registry(str(tmp_path), clock).snapshot(BUCKET) == {"k": b"2"}
    await reader.delete(BUCKET, "k")
    assert await reader.snapshot(BUCKET) == {}
    await reader.close()


async def test_persistent_record_of_another_process_is_not_reverted(tmp_path: Path, clock: ManualClock) -> None:
    first, second = Registry(str(tmp_path), clock), Registry(str(tmp_path), clock)
    await first.put_persistent(BUCKET, "k", b"1")
    await second.put_persistent(BUCKET, "k", b"2")
    first.repair()
    first.refresh()
    assert await first.snapshot(BUCKET) == {"k": b"2"}
    await first.close()
    assert await second.snapshot(BUCKET) == {"k": b"2"}
    await second.close()
