"""Bundles: written with a private mode, and read from an archive or a directory."""

import io
import stat
import tarfile
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops import archive
from dynamo.ops.archive import read_files, tail_of, write_archive

FILES = {"report.json": "{}", "logs/run-1/worker-1.log": "line\n"}


def test_written_archive_is_private_and_is_read_without_its_first_directory(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    write_archive(str(path), FILES, 1e9)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_files(str(path)) == FILES
    with tarfile.open(path) as packed:
        assert packed.getnames() == ["b/logs/run-1/worker-1.log", "b/report.json"]
    assert list(tmp_path.iterdir()) == [path]


def test_directory_is_read_like_an_archive_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("x")
    (tmp_path / "link").symlink_to("/etc/hostname")
    assert read_files(str(tmp_path)) == {"logs/a.log": "x"}


def test_non_file_archive_entries_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as packed:
        link = tarfile.TarInfo("b/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
        entry = tarfile.TarInfo("b/a")
        entry.size = 1
        packed.addfile(entry, io.BytesIO(b"x"))
    assert read_files(str(path)) == {"a": "x"}


def test_unreadable_archive_and_unwritable_path_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"bad\.tar\.gz: cannot read the bundle"):
        read_files(str(tmp_path / "bad.tar.gz"))
    with pytest.raises(ConfigError, match="absent: cannot read the bundle: No such file"):
        read_files(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"--bundle .*x\.tar\.gz: No such file"):
        write_archive(str(tmp_path / "no" / "x.tar.gz"), FILES, 0)


def test_number_and_size_of_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("123456789")
    (tmp_path / "b").write_text("x")
    assert tail_of(str(tmp_path / "a"), 4) == b"6789"
    monkeypatch.setattr(archive, "FILES_MAX", 1)
    with pytest.raises(ConfigError, match="not a bundle"):
        read_files(str(tmp_path))
