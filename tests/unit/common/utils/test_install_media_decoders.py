"""Installer of media decoders."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.utils import install_media_decoders as installer


class Pip:
    """Record of the commands; `installed` are the modules that a new interpreter can import."""

    def __init__(self, provides: tuple[str, ...] = ()) -> None:
        self.commands: list[list[str]] = []
        self.installed: set[str] = set()
        self.provides = provides
        self.opencv_version = ""
        self.fails = False

    def __call__(self, command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        if command[1] == "-c":
            is_usable = command[-1] in self.installed
            return subprocess.CompletedProcess(command, 0 if is_usable else 1, self.opencv_version)
        self.commands.append(command)
        if self.fails:
            raise subprocess.CalledProcessError(1, command)
        self.installed.update(self.provides)
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    fake = Pip(("cv2", "av", "decord"))
    monkeypatch.setattr(installer.subprocess, "run", fake)
    monkeypatch.setattr(installer, "_LOCK_PATH", tmp_path / "lock")
    return fake


def test_installed_decoders_do_not_call_pip(pip: Pip) -> None:
    pip.installed = {"cv2", "av"}
    assert installer.install_media_decoders("vllm") == []
    assert pip.commands == []


def test_opencv_of_vllm_is_replaced_by_a_wheel_of_the_same_version(pip: Pip) -> None:
    pip.opencv_version = "5.0.0.93\n"
    specs = installer.install_media_decoders("vllm", pip_args=["--no-index"])
    assert specs == ["opencv-python-headless==5.0.0.93", installer.VALIDATED_SPECS["av"]]
    (command,) = pip.commands
    assert {"--no-deps", "--force-reinstall", "--only-binary", "--no-index", *specs} <= set(command)


def test_only_missing_decoders_are_installed_at_the_validated_version(pip: Pip) -> None:
    pip.installed = {"cv2"}
    assert installer.install_media_decoders("vllm", dry_run=True) == [installer.VALIDATED_SPECS["av"]]
    assert pip.commands == []
    assert installer.install_media_decoders("sglang") == [installer.VALIDATED_SPECS["decord2"]]


def test_unknown_engine_and_unimportable_module_are_errors(pip: Pip) -> None:
    with pytest.raises(ValueError, match="unknown backend 'mocker'"):
        installer.install_media_decoders("mocker")
    pip.provides = ()
    with pytest.raises(RuntimeError, match="decord still not importable"):
        installer.install_media_decoders("sglang")


def test_command_returns_1_and_hides_credentials_when_pip_fails(pip: Pip, caplog: pytest.LogCaptureFixture) -> None:
    pip.fails = True
    assert installer.main(["sglang", "--pip-args=--index-url https://user:password@host/simple"]) == 1
    assert "password" not in caplog.text
    assert "https://***@host/simple" in caplog.text


@pytest.mark.parametrize("argv", [["mocker"], ["vllm", "--pip-args", "'open"], ["vllm", "--timeout-s", "-1"]])
def test_invalid_arguments_are_usage_errors(pip: Pip, argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        installer.main(argv)


def test_lock_does_not_follow_a_symbolic_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    os.symlink(tmp_path / "file", tmp_path / "link")
    monkeypatch.setattr(installer, "_LOCK_PATH", tmp_path / "link")
    with installer._cross_process_lock():
        assert (tmp_path / "file").read_text() == "content"


def test_installer_states_its_packages() -> None:
    assert installer.installer_covers("vllm", "av")
    assert not installer.installer_covers("sglang", "av")
    assert not installer.installer_covers("unknown", "av")
