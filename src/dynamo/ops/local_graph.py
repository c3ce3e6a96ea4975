"""Local graph: Dynamo processes of this machine, their versions, and the directories and logs of `dynamo serve`."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.core.private_paths import temporary_directory, user_id
from dynamo.ops.archive import tail_of
from dynamo.ops.redaction import redacted_text, redacted_variables
from dynamo.ops.settings_in_force import settings_in_force

SERVE_PREFIX = "dynamo-serve-"
"""Directories of `dynamo serve` in the temporary directory."""
FAILED_PREFIX = "dynamo-failed-"
"""Directories of starts of `dynamo serve` that failed before there was a graph."""
LOG_BYTES_MAX = 2 << 20  # The end of each log.
MODULE = re.compile(r"dynamo\.[a-z_]+|dynamo\.(?:common\.)?backend\.[a-z_]+")
"""Modules of components; those of their child processes are deeper."""
GRAPH_PREFIXES = ("DYN_", "ETCD_", "NATS_", "CUDA_VISIBLE_DEVICES", "POD_")
DISTRIBUTION_INFO = re.compile(r"(dynamo_serve|ai_dynamo)-(\d[^-]*)\.dist-info")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process of a graph."""

    pid: int
    module: str
    """Module of `python -m`, such as `dynamo.frontend`."""
    command: tuple[str, ...]


def local_processes(proc: str = "/proc") -> list[LocalProcess]:
    """Return the Dynamo processes of this user, by their command lines; none on systems without /proc."""
    found = []
    for pid in _pids(proc):
        with suppress(OSError):
            if os.stat(f"{proc}/{pid}").st_uid != user_id() or pid == os.getpid():
                continue
            command = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            module = module_of(command)
            if module:
                found.append(LocalProcess(pid, module, tuple(command)))
    return found


def module_of(command: list[str]) -> str:
    """Return the Dynamo module that a command line runs; empty for other programs and for the `dynamo` command."""
    for at, word in enumerate(command[:-1]):
        if word == "-m" and MODULE.fullmatch(command[at + 1]) and not command[at + 1].startswith("dynamo.cli"):
            return command[at + 1]
    return ""


def process_values(processes: Iterable[LocalProcess], proc: str = "/proc") -> list[dict[str, Any]]:
    """Return the processes as JSON objects without secrets: pid, module, state, command, version, variables."""
    return [
        {
            "pid": one.pid,
            "module": one.module,
            "state": state_of(one.pid, proc),
            "command": redacted_text(" ".join(one.command)),
            "version": version_of(one.command)[1],
            "variables": redacted_variables(settings_in_force(variables_of(one.pid, proc), one.command)),
        }
        for one in processes
    ]


def state_of(pid: int, proc: str = "/proc") -> str:
    """Return the letter of a process's state, such as S (sleeping) or T (stopped); empty if it cannot be read."""
    with suppress(OSError, IndexError):
        # The name of the program may contain any character, so the state is sought after its end.
        return Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    return ""


def variables_of(pid: int, proc: str = "/proc") -> dict[str, str]:
    """Return the variables of a process that concern its graph; empty if they cannot be read."""
    try:
        words = Path(f"{proc}/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs if name.startswith(GRAPH_PREFIXES)}


def version_of(command: tuple[str, ...]) -> tuple[str, str]:
    """Return product and version of the package in a process's environment; empty if they cannot be determined."""
    prefix = Path(command[0]).parent.parent
    for library in sorted(prefix.glob("lib/python3*/site-packages")):
        with suppress(OSError):
            for name in sorted(os.listdir(library)):
                match = DISTRIBUTION_INFO.fullmatch(name)
                if match:
                    return match[1].replace("_", "-"), match[2]
    return "", ""


def serve_directories(folder: str | None = None, prefix: str = SERVE_PREFIX) -> list[Path]:
    """Return the directories of `dynamo serve` of this user, the newest first. Raise `StartupError` without `folder`."""
    found: list[tuple[float, Path]] = []
    for path in Path(folder or temporary_directory()).glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.lstat()
            if path.is_dir() and not path.is_symlink() and status.st_uid == user_id():
                found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def logs_in(directory: Path) -> dict[str, str]:
    """Return the ends of the logs in a directory of `dynamo serve`, or of `*.log` files in any directory."""
    found: dict[str, str] = {}
    for folder in (directory / "logs", directory):
        for path in sorted(folder.glob("*.log")):
            with suppress(OSError):
                found[path.name] = tail_of(str(path), LOG_BYTES_MAX).decode(errors="replace")
    return found


def _pids(proc: str) -> Iterator[int]:
    try:
        names = os.listdir(proc)
    except OSError:
        return
    yield from sorted(int(name) for name in names if name.isdigit())
