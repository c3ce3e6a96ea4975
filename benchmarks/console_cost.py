"""Cost of the console: CPU of an idle frontend without viewers, with one and with many, and the time to record a request.

    python -m benchmarks.console_cost [--seconds 30] [--viewers 16] [--workers 4]

The frontend serves mockers that are idle. The states alternate, so that a change of the machine's load affects all of them.
"""

import http.client
import os
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import guarded, write_result
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.cpu.config import DEMO_MODEL
from dynamo.serving.recent_requests import RecentRequests
from dynamo.serving.request_facts import RequestFacts

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RECORDS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleCostBench:
    """Cost of the console."""

    seconds: float = option(30.0, "--seconds", None, "Duration of each measurement")
    rounds: int = option(3, "--rounds", None, "Measurements of each state")
    viewers: int = option(16, "--viewers", None, "Streams of the state with many viewers")
    workers: int = option(4, "--workers", None, "Mockers behind the frontend")


@contextmanager
def viewers(port: int, count: int) -> Iterator[None]:
    """Hold streams of live samples open and read them."""
    connections = [http.client.HTTPConnection(HOST, port, timeout=60) for _ in range(count)]
    with ExitStack() as stack:
        for connection in connections:
            connection.request("GET", "/console/api/live")
            response = connection.getresponse()
            assert response.status == 200, response.status
            thread = threading.Thread(target=_read, args=(response,), daemon=True)
            thread.start()
            stack.callback(connection.close)
        yield


def _read(response: http.client.HTTPResponse) -> None:
    try:
        while response.read1(1 << 16):
            pass
    except (OSError, ValueError, http.client.HTTPException, AttributeError):
        return  # The connection was closed by `viewers`.


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def share(pids: list[int], port: int, count: int, seconds: float) -> float:
    """Return the share of a core that processes use with `count` viewers."""
    with viewers(port, count):
        time.sleep(2.0)  # The first samples include the start of the stream.
        before, began = cpu_s(pids), time.monotonic()
        time.sleep(seconds)
        return (cpu_s(pids) - before) / (time.monotonic() - began)


def record_us() -> float:
    """Return the time to make and keep the record of one request, in microseconds."""
    recent = RecentRequests()

    def record() -> None:
        recent.ended(
            RequestFacts(
                request_id="r",
                model="m",
                endpoint="e",
                request_type="stream",
                started_s=1.0,
                ended_at=time.time(),
                ended_s=3.0,
                prepared_s=1.1,
                route_s=(1.1, 1.2),
                sent_s=1.3,
                first_s=2.0,
                last_s=2.9,
                prompt_tokens=9,
                output_tokens=9,
                workers=(1,),
            )
        )

    return timeit.timeit(record, number=RECORDS) / RECORDS * 1e6


def main() -> int:
    config = load(ConsoleCostBench, sys.argv[1:], prog="python -m benchmarks.console_cost")
    states = {"no viewer": 0, "one viewer": 1, f"{config.viewers} viewers": config.viewers}
    found: dict[str, list[float]] = {name: [] for name in states}
    recipe = Recipe(name="console", frontend=ours(), engine=ours(), workers=config.workers, router_mode="kv", speedup=1)
    with Stack(recipe, DEMO_MODEL) as stack:
        assert stack.port, MODEL_NAME
        for _ in range(config.rounds):
            for name, count in states.items():
                found[name].append(share(stack.pids["frontend"], stack.port, count, config.seconds))
    figures: dict[str, Any] = {
        "core_share": {name: mean(shares) for name, shares in found.items()},
        "record_us": record_us(),
    }
    for name, value in figures["core_share"].items():
        print(f"{name:<14}{value:8.3%} of a core")
    print(f"record of a request {figures['record_us']:.2f} µs")
    kept = {"settings": asdict(config), "figures": figures}
    print(f"written to {write_result('console_cost', kept, is_whole=config == ConsoleCostBench())}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
