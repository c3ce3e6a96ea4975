"""Common parts of comparison programs: the machine, tables with ratios, result files, and their start."""

import contextlib
import datetime as dt
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from benchmarks.corpus import ROOT, cache_dir
from benchmarks.peer import VERSION, PeerMissing, ensure_peer
from benchmarks.stacks import Implementation, StackFailed, ours, theirs

OURS, THEIRS = "ours", "theirs"
RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")


def print_line(line: str) -> None:
    print(line, flush=True)


def number(value: float) -> str:
    """Format a number with three significant digits."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio(mine: float, other: float | None) -> str:
    """Format the ratio of ours to theirs in bold; empty without a comparison, as values below zero are noise."""
    return f"**{mine / other:.2f}**" if other is not None and other > 0 and mine >= 0 else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a Markdown table; the first `words` columns are text, the others figures."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * words + "---:|" * (len(head) - words)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Processor seconds that the whole machine and this program with its ended children have used."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> "MachineUse":
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:]]
        own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        own_s = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
        return cls(time.monotonic(), (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), own_s)

    def other_cores(self) -> float:
        """Return the cores that other programs have used on average since then."""
        now = MachineUse.now()
        used_s = (now.all_s - self.all_s) - (now.own_s - self.own_s)
        return max(0.0, used_s / max(now.at_s - self.at_s, 1e-9))


_BEGUN = MachineUse.now()


def commit() -> str:
    """Return the commit of the working tree, with `+` if tracked files differ; empty outside a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        state = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "src"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if state.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """Return a description of the machine; absolute figures apply to it only.

    `other_cores` is the average number of cores that other programs used during the last `seconds`, since the start.
    """
    model = "unknown"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 1),
        "other_cores": round(_BEGUN.other_cores(), 2),
        "seconds": round(time.monotonic() - _BEGUN.at_s),
        "commit": commit(),
    }


def write_result(name: str, found: Any, *, is_whole: bool) -> str:
    """Write the results and return the path; partial runs do not replace the cited figures."""
    path = os.path.join(RESULTS if is_whole else cache_dir(), f"{name}.json")
    write_json(path, {"machine": machine(), "peer": f"ai-dynamo {VERSION}", **found})
    return path


def write_json(path: str, value: Any) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def implementations() -> dict[str, Implementation]:
    """Return our implementation, and the released one if it is installed."""
    found = {OURS: ours()}
    try:
        found[THEIRS] = theirs(ensure_peer())
    except PeerMissing as error:
        print_line(f"the released ai-dynamo {VERSION} is not measured: {error}")
    return found


def guarded(main: Callable[[], int]) -> int:
    """Run a program whose stacks must be closed at any end; return the exit status."""
    signal.signal(signal.SIGTERM, _end)
    try:
        return main()
    except (StackFailed, ConnectionError) as error:
        print_line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        print_line("interrupted")
        return 130


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # Unwinds, so that every stack is closed.
