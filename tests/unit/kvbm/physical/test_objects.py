import os
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.kvbm.physical.objects import LocalObjects, ObjectFailure


def test_object_store_may_be_a_directory(tmp_path: Path) -> None:
    store = LocalObjects(str(tmp_path / "deep" / "store"))
    assert store.get("a/b", 10, 1.0) is None
    store.put("a/b", (b"one", memoryview(b"two")), 1.0)
    store.put("a/b", (b"other", memoryview(b"")), 1.0)
    assert store.get("a/b", 10, 1.0) == b"onetwo"
    assert store.has("a/b", 1.0)
    assert not store.has("a/c", 1.0)
    assert [path.name for path in (tmp_path / "deep" / "store" / "a").iterdir()] == ["b"]
    assert list((tmp_path / "deep" / "store" / ".unfinished").iterdir()) == []
    store.close()


def test_object_store_write_error_is_a_failure(tmp_path: Path) -> None:
    store = LocalObjects(str(tmp_path))
    (tmp_path / "a").write_text("a file where a directory is needed")
    with pytest.raises(ObjectFailure):
        store.put("a/b", (b"", memoryview(b"")), 1.0)
    with pytest.raises(ObjectFailure):
        store.get("a/b", 10, 1.0)
    with pytest.raises(ConfigError):
        LocalObjects(str(tmp_path / "a" / "c"))


def test_object_store_removes_unfinished_files_of_a_killed_process(tmp_path: Path) -> None:
    LocalObjects(str(tmp_path))
    old, young = tmp_path / ".unfinished" / "new-old", tmp_path / ".unfinished" / "new-young"
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    LocalObjects(str(tmp_path))
    assert list((tmp_path / ".unfinished").iterdir()) == [young]
