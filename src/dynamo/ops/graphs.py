"""Graphs of this machine: the record that `dynamo serve` keeps of its processes, and how other commands read it.

A record is in the graph's own directory, which has mode 0700 and is locked while the graph runs. Directories of other users,
or that other users can enter, are ignored; a process is identified by its id and its start time, because ids are reused.
"""

import contextlib
import enum
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.locked_directory import LOGS, LockedDirectory, is_locked, remove_ended
from dynamo.core.private_paths import private_opener, temporary_directory, user_id
from dynamo.ops.local_graph import FAILED_PREFIX, serve_directories
from dynamo.ops.redaction import redacted_text

RECORD = "graph.json"
RECORD_BYTES_MAX = 1 << 20  # Some hundred bytes for each process; larger files were not written by `dynamo serve`.
FAILED_LOG = "dynamo-serve.log"
GRAPHS_MAX = 64  # The newest; a machine has a handful.
DEFAULT_URL = "http://localhost:8000"
CONNECT_TIMEOUT_S = 1.0  # To an address of this machine.
START_TIME_FIELD = 19
"""Index of the start time in /proc/PID/stat, after the name of the program."""


class GraphState(enum.Enum):
    """State of a recorded graph."""

    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


class RecordedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a graph."""

    name: str
    pid: int
    ticks: int
    """Start time, in ticks since the boot of the machine."""
    module: str
    gpus: str = ""


class GraphRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `dynamo serve` records of its graph."""

    name: str
    state: GraphState
    pid: int
    """Process of `dynamo serve`, which ends the graph when it receives SIGTERM."""
    ticks: int
    url: str
    engine: str
    model: str = ""
    started: float
    """Unix time in seconds."""
    needs_key: bool = False
    has_logs: bool = True
    """Whether the processes write to log files, not to the terminal of `dynamo serve`."""
    end: str = ""
    """Why the graph ended."""
    processes: list[RecordedProcess]


class FoundGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph of this machine."""

    directory: Path
    is_running: bool
    record: GraphRecord

    @property
    def logs(self) -> Path:
        """Directory of the log files."""
        return self.directory / LOGS


def write_record(folder: Path, record: GraphRecord) -> None:
    """Replace the record in a directory of logs. Raise `OSError`."""
    temporary = folder / f"{RECORD}.partial"
    with open(temporary, "wb", opener=private_opener) as file:
        file.write(msgspec.json.encode(record))
    os.replace(temporary, folder / RECORD)


def record_failed_start(command: str, message: str) -> None:
    """Keep the error of the last start that failed before there was a graph, for `dynamo troubleshoot`, where it can be written."""
    with contextlib.suppress(OSError, ConfigError):
        home = LockedDirectory(FAILED_PREFIX, logs_kept=1)
        try:
            with open(home.logs / FAILED_LOG, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(redacted_text(f"{command}\nerror: {message}\n"))
        finally:
            home.close(keep_logs=True)


def forget_failed_start() -> None:
    """Remove the error of the last failed start: a graph serves now."""
    with contextlib.suppress(OSError, ConfigError):
        remove_ended(FAILED_PREFIX, Path(temporary_directory()))


def find_graphs(folder: str | None = None) -> list[FoundGraph]:
    """Return the graphs of this user that run, and those that ended and left logs; the newest first."""
    found = []
    for directory in serve_directories(folder)[:GRAPHS_MAX]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # Removed meanwhile, or of a version without records.
            if stat.S_IMODE(directory.lstat().st_mode) & 0o077:
                continue
            record = _read(directory / LOGS / RECORD)
            is_running = is_locked(directory) and is_alive(record.pid, record.ticks)
            found.append(FoundGraph(directory=directory, is_running=is_running, record=record))
    return found


def _read(path: Path) -> GraphRecord:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != user_id() or status.st_size > RECORD_BYTES_MAX:
            raise OSError(f"{path}: not a record")
        return msgspec.json.decode(file.read(RECORD_BYTES_MAX), type=GraphRecord)


def select(graphs: list[FoundGraph], name: str | None) -> FoundGraph:
    """Return the graph of a name, a port or a directory, or the only one; `graphs` has the newest first.

    A running graph comes before those that ended with the same name, and the newest of those before the others.
    Raise `ConfigError` for none, and for several that run.
    """
    named = [one for one in graphs if name is None or name in names_of(one)]
    running = [one for one in named if one.is_running]
    if len(running) == 1:
        return running[0]
    if named and not running and (name is not None or len(named) == 1):
        return named[0]
    known = ", ".join(dict.fromkeys(one.record.name for one in graphs)) or "none"
    if not graphs:
        raise ConfigError(f"{name or 'NAME'}: there is no graph of dynamo serve on this machine")
    if not named:
        raise ConfigError(f"{name or 'NAME'}: no such graph of dynamo serve on this machine; known: {known}")
    if name is None:
        raise ConfigError(f"NAME is missing: expected one of {', '.join(map(label_of, running or named))}")
    ports = ", ".join(port_of(one) for one in running)
    raise ConfigError(f"{name}: {len(running)} graphs run with this name; give the port instead: {ports}")


def port_of(graph: FoundGraph) -> str:
    """Return the port of a graph's frontend."""
    return graph.record.url.rpartition(":")[2]


def label_of(graph: FoundGraph) -> str:
    """Return a graph's name and port, as messages show it."""
    return f"{graph.record.name} (port {port_of(graph)})"


def names_of(graph: FoundGraph) -> set[str]:
    """Return what names a graph: its name, its port, and its directory."""
    return {graph.record.name, port_of(graph), str(graph.directory), graph.directory.name}


def start_ticks(pid: int, proc: str = "/proc") -> int:
    """Return the start time of a process in ticks since boot; 0 if it has ended or on systems without /proc."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name of the program may contain any character, so the fields are counted from its end.
        fields = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] == b"Z" else int(fields[START_TIME_FIELD])
    return 0


def is_alive(pid: int, ticks: int, proc: str = "/proc") -> bool:
    """Return whether the process that was started at this time still runs."""
    if ticks == 0:  # A system without /proc: the id is all that is known.
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return pid > 0
        return False
    return start_ticks(pid, proc) == ticks


def send_stop(record: GraphRecord, number: signal.Signals = signal.SIGTERM) -> bool:
    """Send a signal to the process of a graph; return False if it has ended. No other process can receive it."""
    if not hasattr(os, "pidfd_open"):
        if not is_alive(record.pid, record.ticks):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)
            return True
        return False
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(record.pid)
        try:
            # The descriptor refers to one process, so that its start time cannot change before the signal is sent.
            if is_alive(record.pid, record.ticks):
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def server_url(url: str) -> str:
    """Return the URL of a server: without a server at the default one, that of the only graph on this machine, and say so.

    Raise `ConfigError` if several graphs run.
    """
    urls = sorted(one.record.url for one in find_graphs() if one.is_running) if url == DEFAULT_URL else []
    if not urls or DEFAULT_URL in urls or _is_listening(DEFAULT_URL):
        return url
    if len(urls) > 1:
        raise ConfigError(f"--url {url}: no server is there; {len(urls)} graphs run: name one of {', '.join(urls)}")
    sys.stderr.write(f"no server at {url}; using the graph at {urls[0]}\n")
    return urls[0]


def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
