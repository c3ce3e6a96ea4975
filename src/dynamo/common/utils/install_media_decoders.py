"""Installer of the packages with which engines decode media: `python -m dynamo.common.utils.install_media_decoders ENGINE`.

Images of engines have few software decoders. Nothing in this package runs the installer: an operator does.
"""

import argparse
import contextlib
import fcntl
import importlib
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600
VALIDATED_SPECS = {
    "opencv-python-headless": "opencv-python-headless>=4.13.0.92,<5",
    "av": "av>=18.0.0,<19",
    "decord2": "decord2>=3.4.0,<4",
}
"""Requirement of each package: the version tested with 1.6.1, and no other major version."""

_PROBE_TIMEOUT_S = 120  # The first import of OpenCV from a cold disk takes tens of seconds.
_LOCK_PATH = Path(tempfile.gettempdir()) / "dynamo_media_decoders.lock"

_IMPORT_PROBE = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
if sys.argv[1] == "cv2" and module.CAP_FFMPEG not in module.videoio_registry.getBackends():
    sys.exit("cv2 has no video backend")
"""

_OPENCV_VERSION_PROBE = """
import importlib.metadata
try:
    print(importlib.metadata.version("opencv-python-headless"))
except importlib.metadata.PackageNotFoundError:
    try:
        import cv2
        print(cv2.__version__ + ".*")
    except (ImportError, AttributeError, OSError):
        pass
"""


@dataclass(frozen=True)
class _Decoder:
    """A package, the module that it provides, its requirement, and the kind of media."""

    package: str
    module: str
    spec: str
    kind: str


_OPENCV = _Decoder("opencv-python-headless", "cv2", VALIDATED_SPECS["opencv-python-headless"], "video")
_PYAV = _Decoder("av", "av", VALIDATED_SPECS["av"], "audio")
_DECORD = _Decoder("decord2", "decord", VALIDATED_SPECS["decord2"], "video")
_BACKEND_DECODERS = {"vllm": (_OPENCV, _PYAV), "sglang": (_DECORD,), "trtllm": (_OPENCV,)}


def installer_covers(backend: str, package: str) -> bool:
    """Return whether the installer installs a package for an engine."""
    return any(decoder.package == package for decoder in _BACKEND_DECODERS.get(backend, ()))


def install_media_decoders(
    backend: str,
    *,
    pip_args: Sequence[str] = (),
    timeout_s: int | None = DEFAULT_TIMEOUT_S,
    dry_run: bool = False,
) -> list[str]:
    """Install the missing decoders of an engine without their dependencies. Return the requirements installed.

    With `dry_run`, return them only. Raise `ValueError` for an unknown engine, `subprocess.CalledProcessError` or
    `TimeoutExpired` if pip fails, and `RuntimeError` if a module cannot be imported after the installation.
    """
    if backend not in _BACKEND_DECODERS:
        raise ValueError(f"unknown backend {backend!r}: must be one of {', '.join(sorted(_BACKEND_DECODERS))}")
    decoders = _missing(backend)
    if not decoders or dry_run:
        return [_spec(backend, decoder) for decoder in decoders]
    with _cross_process_lock():
        decoders = _missing(backend)  # Another process may have installed them.
        if not decoders:
            return []
        specs = [_spec(backend, decoder) for decoder in decoders]
        _pip_install(specs, pip_args, timeout_s=timeout_s)
        importlib.invalidate_caches()
        if unusable := _modules_missing_fresh([decoder.module for decoder in decoders]):
            raise RuntimeError(f"{', '.join(unusable)} still not importable after pip install {' '.join(specs)}")
    return specs


def _missing(backend: str) -> list[_Decoder]:
    missing = _modules_missing_fresh([decoder.module for decoder in _BACKEND_DECODERS[backend]])
    return [decoder for decoder in _BACKEND_DECODERS[backend] if decoder.module in missing]


def _spec(backend: str, decoder: _Decoder) -> str:
    """Return a requirement. vLLM requires its own version of OpenCV, which is built without video."""
    return _vllm_opencv_spec() if backend == "vllm" and decoder is _OPENCV else decoder.spec


def _modules_missing_fresh(modules: Sequence[str]) -> list[str]:
    """Return the modules that a new interpreter cannot import, and OpenCV if it cannot read video.

    A directory of packages created after the start of this process is visible only to a new interpreter.
    """
    return [module for module in modules if not _is_usable(module)]


def _is_usable(module: str) -> bool:
    command = [sys.executable, "-c", _IMPORT_PROBE, module]
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=_PROBE_TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _vllm_opencv_spec() -> str:
    """Return the requirement of the installed version of OpenCV; the validated one if the version cannot be read."""
    command = [sys.executable, "-c", _OPENCV_VERSION_PROBE]
    try:
        done = subprocess.run(  # noqa: S603
            command, check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.SubprocessError:
        return _OPENCV.spec
    version = done.stdout.strip()
    return f"{_OPENCV.package}=={version}" if version else _OPENCV.spec


def _pip_install(packages: Sequence[str], extra_args: Sequence[str], *, timeout_s: int | None) -> None:
    """Install packages as wheels of OpenCV where it is one of them: pip could rebuild the source without video."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--break-system-packages"]
    if any(package.startswith(_OPENCV.package) for package in packages):
        command += ["--force-reinstall", "--only-binary", _OPENCV.package]
    command += [*packages, *extra_args]
    logger.info("running %s", _redact(shlex.join(command)))
    subprocess.run(command, check=True, timeout=timeout_s)  # noqa: S603


@contextlib.contextmanager
def _cross_process_lock() -> Iterator[None]:
    """Hold the lock of installations. Without a usable lock file, log a warning and continue."""
    with contextlib.ExitStack() as stack:
        try:
            # The directory is writable for all users: a symbolic link is not followed.
            descriptor = os.open(_LOCK_PATH, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("cannot lock %s: %s; installing without a lock", _LOCK_PATH, error)
        yield


def _redact(text: str) -> str:
    """Return text without the credentials of URLs."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dynamo.common.utils.install_media_decoders",
        description="Install the packages with which an engine decodes audio and video.",
    )
    parser.add_argument("backend", choices=sorted(_BACKEND_DECODERS), help="Engine whose decoders are installed")
    parser.add_argument("--pip-args", default="", help='Additional arguments of pip, e.g. --pip-args="--no-index"')
    parser.add_argument(
        "--timeout-s", type=int, default=DEFAULT_TIMEOUT_S, help="Limit of pip in seconds; 0 for none (default: 600)"
    )
    parser.add_argument("--dry-run", action="store_true", help="Print what would be installed")
    args = parser.parse_args(argv)
    if args.timeout_s < 0:
        parser.error(f"--timeout-s {args.timeout_s}: must be 0 or more")
    try:
        args.pip_args = shlex.split(args.pip_args)
    except ValueError as error:
        parser.error(f"--pip-args: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Install as the arguments state. Return 0, or 1 with the error in the log."""
    args = _parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        specs = install_media_decoders(
            args.backend, pip_args=args.pip_args, timeout_s=args.timeout_s or None, dry_run=args.dry_run
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.error("failed to install the decoders of %s: %s", args.backend, _redact(str(error)))  # noqa: TRY400
        return 1
    if not specs:
        logger.info("all decoders of %s are installed", args.backend)
    else:
        logger.info("%s %s", "would install" if args.dry_run else "installed", ", ".join(specs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
