"""Private paths: directories that other users can change are refused; created ones are accessible to their user only."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from dynamo.core import private_paths
from dynamo.core.errors import ConfigError, StartupError
from dynamo.core.private_paths import (
    check_trusted_directory,
    make_private_directories,
    private_opener,
    refusal,
    runtime_directory,
    temporary_directory,
)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_directory_writable_only_by_its_user_is_trusted(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    check_trusted_directory(str(tmp_path), "NAME")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o770])
def test_directory_writable_by_others_is_refused(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_paths, "_is_private_group", lambda _: False)
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"NAME='.*': mode \d+ lets other users write; run: chmod go-w"):
        check_trusted_directory(str(tmp_path), "NAME")


def test_directory_of_a_private_group_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has a group of its own, directories are created with mode 0775."""
    monkeypatch.setattr(private_paths, "_is_private_group", lambda _: True)
    tmp_path.chmod(0o775)
    check_trusted_directory(str(tmp_path), "NAME")


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_paths, "user_id", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match=r"NAME='.*': owned by user \d+, expected user \d+"):
        check_trusted_directory(str(tmp_path), "NAME")


def test_private_directories_are_accessible_only_to_their_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_directories(str(tmp_path / "a" / "b"))
        make_private_directories(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / part).stat().st_mode) for part in ("a", "a/b")] == [0o700, 0o700]


def test_file_at_the_path_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        make_private_directories(str(tmp_path / "a"))


def test_runtime_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = Path(runtime_directory())
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        runtime_directory()


def test_runtime_directory_without_xdg_names_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(private_paths.tempfile, "gettempdir", lambda: str(tmp_path))
    assert runtime_directory() == str(tmp_path / f"dynamo-{os.geteuid()}")


def test_runtime_directory_does_not_follow_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "dynamo").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="expected a directory of user"):
        runtime_directory()


def test_private_opener_creates_files_accessible_only_to_their_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open(tmp_path / "file", "ab", opener=private_opener) as file:
            file.write(b"prompt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_directory_without_space_or_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == ""
    assert refusal(str(tmp_path / "absent")) == "No such file or directory"
    assert list(tmp_path.iterdir()) == []


def test_machine_without_a_usable_temporary_directory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in []")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with pytest.raises(StartupError, match=r"no usable temporary directory: \S+/absent: No such file or directory"):
        temporary_directory()
