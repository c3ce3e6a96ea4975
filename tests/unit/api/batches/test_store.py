"""Files and batches in a directory."""

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo.api.batches import store as store_module
from dynamo.api.batches.records import BatchObject, BatchRecord, FileObject, new_id
from dynamo.api.batches.store import KEPT_S, BatchStore, StorageLimits, lines_of
from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, HttpError, NotFound


def store_of(folder: Path, clock: ManualClock | None = None, **limits: int) -> BatchStore:
    return BatchStore(str(folder), StorageLimits(**limits), clock or ManualClock())


def put(
    store: BatchStore, data: bytes = b"x\n", owner: str | None = None, created: int = 0, expires: int | None = None
) -> str:
    file = FileObject(
        id=new_id("file-"), bytes=0, created_at=created, filename="f", purpose="batch", expires_at=expires
    )
    return store.add_file(io.BytesIO(data), file, owner).id


def begin(store: BatchStore, file_id: str, owner: str | None = None, status: str = "in_progress") -> BatchRecord:
    batch = BatchObject(
        id=new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=file_id,
        created_at=1,
        expires_at=2,
        status=status,
    )
    record = BatchRecord(batch=batch, owner=owner)
    store.add_batch(record)
    return record


def test_file_is_available_to_its_owner_until_it_expires(tmp_path: Path) -> None:
    clock = ManualClock(wall=1000.0)
    store = store_of(tmp_path, clock)
    mine, other = put(store, b"a\nb", "ann", created=1, expires=2000), put(store, b"", "ben")
    assert store.file(mine, "ann").bytes == 3
    assert list(lines_of(store.path(mine))) == [b"a\n", b"b"]
    assert [file.id for file in store.files("ann")] == [mine]
    for owner, file_id in (("ben", mine), ("ann", other), (None, mine), ("ann", "../keys")):
        with pytest.raises(NotFound):
            store.file(file_id, owner)
    clock.advance(1000)
    with pytest.raises(NotFound):
        store.file(mine, "ann")
    assert store.files("ann") == []


def test_stored_files_are_readable_only_by_the_process_user(tmp_path: Path) -> None:
    store = store_of(tmp_path / "new")
    put(store)
    modes = [os.stat(path).st_mode & 0o077 for path in (tmp_path / "new").rglob("*")]
    assert modes and not any(modes)


def test_store_refuses_files_beyond_its_limits(tmp_path: Path) -> None:
    store = store_of(tmp_path, bytes_max=2000, files_max=2)
    with pytest.raises(HttpError, match="not enough space"):
        put(store, b"x" * 3000)
    assert store.usage() == (0, 0)
    put(store), put(store)
    with pytest.raises(HttpError, match="2 files"):
        put(store)


def test_unusable_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="--batch-dir"):
        store_of(tmp_path / "taken")


def test_input_of_an_open_batch_cannot_be_deleted(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    file_id = put(store)
    record = begin(store, file_id)
    with pytest.raises(HttpError) as raised:
        store.delete_file(file_id, None)
    assert raised.value.code == 409
    record.batch.status = "completed"
    store.save(record)
    store.delete_file(file_id, None)
    assert store.usage()[1] == 0


def test_batches_are_listed_by_owner_and_open_batches_for_the_runner(tmp_path: Path) -> None:
    store = store_of(tmp_path, open_batches_max=2)
    mine, other = begin(store, put(store), "ann"), begin(store, put(store), "ben")
    assert [one.batch.id for one in store.batches("ann")] == [mine.batch.id]
    with pytest.raises(NotFound):
        store.batch(other.batch.id, "ann")
    with pytest.raises(HttpError, match="not ended"):
        begin(store, put(store))
    mine.batch.status = "completed"
    store.save(mine)
    for _ in range(2):
        assert [one.batch.id for one in store.open_batches()] == [other.batch.id]


def test_cancellation_is_visible_to_every_process(tmp_path: Path) -> None:
    store, other = store_of(tmp_path), store_of(tmp_path)
    record = begin(store, put(store))
    store.cancel(record.batch.id)
    store.cancel(record.batch.id)
    shown = other.batch(record.batch.id, None).batch
    assert (shown.status, shown.cancelling_at) == ("cancelling", other.cancelled_s(record.batch.id))


def test_results_are_recovered_without_a_truncated_line(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    key = begin(store, put(store)).batch.id
    store.append_result(key, {"custom_id": "a"}, False)
    store.append_result(key, {"custom_id": "b"}, True)
    with open(tmp_path / "batches" / f"{key}.output", "ab") as file:
        file.write(b'{"custom_id": "c"')
    assert store.results(key) == ({"a"}, {"b"})
    store.append_result(key, {"custom_id": "c"}, False)
    assert store.results(key) == ({"a", "c"}, {"b"})


def test_results_become_files_once(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    record = begin(store, put(store), "ann")
    store.append_result(record.batch.id, {"custom_id": "a"}, False)
    store.publish(record)
    first = record.batch.output_file_id
    assert first is not None and record.batch.error_file_id is None
    assert store.file(first, "ann").purpose == "batch_output"
    record.batch.output_file_id = None
    store.publish(record)
    assert record.batch.output_file_id == first
    assert list(lines_of(store.path(first))) == [b'{"custom_id":"a"}\n']


def test_sweep_removes_expired_files_except_inputs_of_open_batches(tmp_path: Path) -> None:
    clock = ManualClock(wall=1000.0)
    store = store_of(tmp_path, clock)
    used, unused = put(store, expires=1001), put(store, expires=1001)
    record = begin(store, used)
    ended = begin(store, used, status="completed")
    clock.advance(10)
    store.sweep()
    assert os.path.exists(store.path(used)) and not os.path.exists(store.path(unused))
    clock.advance(KEPT_S)
    store.sweep()
    assert [one.batch.id for one in store.batches(None)] == [record.batch.id]
    assert ended.has_ended


def test_batch_directory_is_locked_by_one_process(tmp_path: Path) -> None:
    first, second = store_of(tmp_path), store_of(tmp_path)
    assert first.try_lock() and first.try_lock() and not second.try_lock()
    first.unlock()
    assert second.try_lock()
    second.unlock()


def test_unreadable_batch_record_is_skipped(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    begin(store, put(store))
    (tmp_path / "batches" / "batch_broken.json").write_text("{")
    assert len(store.batches(None)) == 1


def fill_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> None:
    """Make writes fail as on a full disk, after that many bytes."""
    space = [after_bytes]

    def write_whole(out: Any, data: bytes) -> None:
        space[0] -= out.write(data[: max(0, space[0])])
        if space[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "write_whole", write_whole)


@pytest.mark.parametrize("after_bytes", [0, 3, 12])
def test_file_that_exceeds_disk_space_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_bytes: int
) -> None:
    store = store_of(tmp_path)
    kept = put(store)
    fill_disk(monkeypatch, after_bytes)
    with pytest.raises(OSError, match="No space left"):
        put(store, b"0123456789")
    assert sorted(os.listdir(tmp_path / "files")) == sorted([f"{kept}.data", f"{kept}.json"])


def test_result_that_exceeds_disk_space_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path)
    batch_id = begin(store, put(store)).batch.id
    store.append_result(batch_id, {"custom_id": "a"}, is_error=False)
    with monkeypatch.context() as patch:
        fill_disk(patch, 5)
        with pytest.raises(OSError, match="No space left"):
            store.append_result(batch_id, {"custom_id": "b"}, is_error=False)
    store.append_result(batch_id, {"custom_id": "c"}, is_error=False)
    assert store.results(batch_id) == ({"a", "c"}, set())


@pytest.mark.parametrize("damaged", [b"\0" * 30, b"{", b"[]", b"{}", b'{"custom_id": 1}', b"\xff", b'{"custom_id":"x'])
def test_unreadable_result_lines_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes) -> None:
    store = store_of(tmp_path)
    batch_id = begin(store, put(store)).batch.id
    path = tmp_path / "batches" / f"{batch_id}.output"
    path.write_bytes(b'{"custom_id":"a"}\n' + damaged + b'\n{"custom_id":"b"}\n{"custom_id":"torn')
    for _ in range(2):
        assert store.results(batch_id) == ({"a", "b"}, set())
    assert path.read_bytes() == b'{"custom_id":"a"}\n{"custom_id":"b"}\n'
    assert caplog.text.count("removing 1 unreadable lines") == 1


def test_acknowledged_data_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recorded(file: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    store = store_of(tmp_path)
    file_id = put(store)
    assert len([name for name in synced if name.endswith(".part")]) == 2 and "files" in synced, "data, record, names"
    synced.clear()
    record = begin(store, file_id)
    assert synced[0].startswith(record.batch.id) and synced[1:] == ["batches"]
    synced.clear()
    store.append_result(record.batch.id, {"custom_id": "a"}, is_error=False)
    assert synced == [f"{record.batch.id}.output", "batches"]
    synced.clear()
    store.publish(record)
    assert synced[-1] == "files"


def test_unreadable_record_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(tmp_path)
    (tmp_path / "batches" / "batch_damaged.json").write_bytes(b"{")
    for _ in range(3):
        assert store.open_batches() == []
    assert caplog.text.count("cannot be read") == 1


def test_owner_names_of_earlier_releases_are_mapped_to_their_keys(tmp_path: Path) -> None:
    before = store_of(tmp_path)
    named, placed = put(before, owner="team-a"), put(before, owner="key-1")
    batch_id = begin(before, named, "team-a").batch.id
    store = BatchStore(str(tmp_path), clock=ManualClock(), owner_of_name={"team-a": "key:0123"}.get)
    assert store.file(named, "key:0123").id == named
    assert store.batch(batch_id, "key:0123").owner == "key:0123"
    with pytest.raises(NotFound):
        store.file(named, "key:4567")
    assert [one.id for one in store.files("key:0123")] == [named]
    with pytest.raises(NotFound):
        store.file(placed, "key:0123")
