"""Graphs of this machine: `dynamo status`, `dynamo logs` and `dynamo stop`."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.ops.archive import tail_of
from dynamo.ops.graphs import FoundGraph, find_graphs, is_alive, label_of, select, send_stop
from dynamo.ops.report import CheckStatus

FOLLOW_S = 0.25
STOP_TIMEOUT_S = 60.0  # Longer than the time in which `dynamo serve` ends its processes, and kills those that do not.
STOP_POLL_S = 0.05
TAIL_BYTES = 1 << 20
LINES_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatusConfig:
    """Show the graphs of dynamo serve on this machine; exit status 1 if one is not healthy."""

    graph: str | None = option(None, "NAME", None, "Name, port or directory of one graph; default: all")
    all: bool = option(False, "--all", None, "Also show graphs that have ended and left logs")
    json: bool = option(False, "--json", None, "Print JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLogsConfig:
    """Print the last lines of the logs of a graph's processes."""

    graph: str | None = option(None, "NAME", None, "Name, port or directory of the graph; default: the newest")
    process: str | None = option(None, "--process", None, "Only this process, such as worker-1 or frontend")
    tail: int = option(20, "--tail", None, "Number of lines of each process")
    follow: bool = option(False, "--follow", None, "Continue to print new lines until the graph ends", aliases=("-f",))
    json: bool = option(False, "--json", None, "Print one JSON object for each line")

    def __post_init__(self) -> None:
        if not 1 <= self.tail <= LINES_MAX:
            raise ConfigError(f"--tail {self.tail}: must be from 1 to {LINES_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStopConfig:
    """Stop a graph of dynamo serve: requests are completed, then its processes end."""

    graph: str | None = option(None, "NAME", None, "Name, port or directory of the graph; default: the only one")
    all: bool = option(False, "--all", None, "Stop all graphs of this user")
    json: bool = option(False, "--json", None, "Print JSON")


def status(argv: Sequence[str]) -> int:
    """Run `dynamo status`; return 1 if a graph is not healthy."""
    config = load(MachineStatusConfig, argv, prog="dynamo status")
    from dynamo.http.client import environment_key
    from dynamo.ops.graph_status import as_lines, statuses

    graphs = find_graphs()
    if config.graph is not None:
        graphs = [select(graphs, config.graph)]
    elif not config.all:
        graphs = [one for one in graphs if one.is_running]
    found = statuses(graphs, environment_key())
    if config.json:
        print(json.dumps({"graphs": [one.value(time.time()) for one in found]}, indent=2))
    elif not found:
        print("No graph of dynamo serve runs on this machine.")
    else:
        print("\n".join(as_lines(found)))
    return int(any(one.status is CheckStatus.FAIL for one in found))


def logs(argv: Sequence[str]) -> int:
    """Run `dynamo logs`."""
    config = load(MachineLogsConfig, argv, prog="dynamo logs")
    graphs = find_graphs()
    graph = newest(graphs) if config.graph is None and graphs else select(graphs, config.graph)
    paths = {path.stem: path for path in sorted(graph.logs.glob("*.log")) if not path.is_symlink()}
    if config.process is not None:
        if config.process not in paths:
            known = ", ".join(paths) or "none"
            raise ConfigError(f"--process {config.process}: no log of this process; known: {known}")
        paths = {config.process: paths[config.process]}
    if not graph.record.has_logs:
        sys.stderr.write("dynamo serve --verbose shows the logs in its own terminal\n")
        return 0
    offsets = {}
    for name, path in paths.items():
        with contextlib.suppress(OSError):
            offsets[name] = path.stat().st_size
            for line in tail_of(str(path), TAIL_BYTES).decode(errors="replace").splitlines()[-config.tail :]:
                print_line(name, line, is_json=config.json)
    if not any(offsets.values()):
        which = config.process or "the processes"
        sys.stderr.write(f"{graph.record.name}: {which} logged no warning; dynamo serve --verbose shows all messages\n")
    if config.follow:
        follow(graph, paths, offsets, is_json=config.json)
    return 0


def newest(graphs: Sequence[FoundGraph]) -> FoundGraph:
    """Return the newest graph that runs, or the newest that ended; name it if there are several."""
    running = [one for one in graphs if one.is_running]
    chosen, *others = running or graphs
    if others:
        names = ", ".join(map(label_of, others))
        sys.stderr.write(f"{label_of(chosen)}, the newest; also known: {names}\n")
    return chosen


def follow(graph: FoundGraph, paths: dict[str, Path], offsets: dict[str, int], *, is_json: bool) -> None:
    """Print what is appended to logs until the graph ends."""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(path, "rb")) for name, path in paths.items()}
        for name, file in files.items():
            file.seek(offsets.get(name, 0))
        while True:
            is_last = not is_alive(graph.record.pid, graph.record.ticks)
            for name, file in files.items():
                for line in file.read().decode(errors="replace").splitlines():
                    print_line(name, line, is_json=is_json)
            sys.stdout.flush()
            if is_last:
                return
            time.sleep(FOLLOW_S)


def print_line(name: str, line: str, *, is_json: bool) -> None:
    """Print one line of a log with the name of its process."""
    print(json.dumps({"process": name, "line": line}, ensure_ascii=False) if is_json else f"{name}: {line}")


def stop(argv: Sequence[str]) -> int:
    """Run `dynamo stop`; return 1 if a graph does not end in time."""
    config = load(MachineStopConfig, argv, prog="dynamo stop")
    if config.all and config.graph is not None:
        raise ConfigError("--all and NAME are mutually exclusive")
    running = [one for one in find_graphs() if one.is_running]
    chosen = running if config.all else [select(running, config.graph)]
    for one in chosen:
        send_stop(one.record)
    results = [(one.record.name, await_end(one)) for one in chosen]
    if config.json:
        print(json.dumps({"graphs": [{"name": name, "is_stopped": ended} for name, ended in results]}, indent=2))
    else:
        for line in stop_lines(results):
            print(line)
    return int(not all(ended for _, ended in results))


def stop_lines(results: Sequence[tuple[str, bool]]) -> Iterator[str]:
    """Yield a line for each graph."""
    if not results:
        yield "No graph of dynamo serve runs on this machine."
    for name, ended in results:
        yield (
            f"{name}: stopped"
            if ended
            else f"{name}: still running after {STOP_TIMEOUT_S:.0f} s; see dynamo logs {name}"
        )


def await_end(graph: FoundGraph) -> bool:
    """Return whether the process of a graph ends within the time limit."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_alive(graph.record.pid, graph.record.ticks):
        if time.monotonic() > deadline:
            return False
        time.sleep(STOP_POLL_S)
    return True
