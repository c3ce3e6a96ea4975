"""Facts about a discovery directory."""

import os
from pathlib import Path

from dynamo.ops.doctor.directory import directory_facts, records
from dynamo.runtime.discovery.file import PERSISTENT_AHEAD_S, encode_name

NOW = 1e9


def record(root: Path, key: str, modified: float, text: str = "{}") -> Path:
    folder = root / "v1" / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / key
    path.write_text(text)
    os.utime(path, (modified, modified))
    return path


def test_live_stale_persistent_and_foreign_files_are_distinguished(tmp_path: Path) -> None:
    record(tmp_path, encode_name("a/b/c/1"), NOW)
    record(tmp_path, encode_name("a/b/c/2"), NOW - 100)
    record(tmp_path, encode_name("a/b/c/3"), NOW + PERSISTENT_AHEAD_S)
    record(tmp_path, encode_name("a/b/c/4"), NOW, "{")
    record(tmp_path, ".new-1", NOW)
    facts = directory_facts({"DYN_FILE_KV": "x"}, NOW, str(tmp_path))
    assert (facts.live, facts.stale, facts.foreign) == (2, ("v1/instances/a/b/c/2",), ())
    assert facts.unreadable == ("v1/instances/a/b/c/4",)
    assert facts.exists
    assert facts.is_named
    assert facts.is_writable
    assert facts.problem == ""


def test_directory_that_others_can_write_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    facts = directory_facts({}, NOW, str(tmp_path))
    assert "lets other users write" in facts.problem
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("")
    assert "Not a directory" in directory_facts({}, NOW, str(tmp_path / "file")).problem


def test_directory_that_does_not_exist_can_be_created_in_its_parent(tmp_path: Path) -> None:
    facts = directory_facts({}, NOW, str(tmp_path / "a" / "b"))
    assert (facts.exists, facts.is_writable, facts.problem) == (False, True, "")


def test_records_have_their_decoded_keys(tmp_path: Path) -> None:
    record(tmp_path, encode_name("n/c/e/ff"), NOW, '{"x": 1}')
    ((key, status, data),) = records(str(tmp_path))
    assert (key, status.st_mtime, data) == ("v1/instances/n/c/e/ff", NOW, b'{"x": 1}')
