"""Cost of the endpoint picker: latency and processor time of a pick at a paced load, and of a gRPC server that only answers.

    python -m benchmarks.epp_picks [--rate 1000] [--seconds 5] [--reps 3]

The picker routes chats of about 600 tokens over two mockers, on one core. Each pick is one ext_proc stream as gateways send
it: headers and body, then the destination and the body. The reference is a server of the same library on the same core that
answers the same messages without reading them; the difference is what the picker adds. Servers take turns; the best window of
each is reported, because other programs of the machine only add to it. Latency is measured by the client, from the headers to
the last part of the answer. Both servers record the pauses of their event loops (`benchmarks.pauses`), to compare with what
the client measures. On a machine that other programs use, `chrt --fifo 10 python -m benchmarks.epp_picks` keeps them from it.
Ends with status 1 if the picker's rate is below the load or its 99th percentile above 5 ms.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.grpc_load import LoadClient
from benchmarks.pauses import pauses_of, summary
from benchmarks.ports import free_port
from benchmarks.report import print_line, table, write_result
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.epp.messages import CLASSES, FULL_DUPLEX_STREAMED, SERVICE

P99_MS_MAX = 5.0
READY_S = 60.0
PROMPTS = 50
ANSWERS = 2
"""Messages of an answer: destination and body."""
WORDS = " ".join(f"item {number}" for number in range(200))
PICKER, ECHO = "picker", "bare gRPC server"


@dataclass(frozen=True, slots=True, kw_only=True)
class EppBench:
    """Latency and processor time of the endpoint picker."""

    rate: int = option(1000, "--rate", None, "Picks per second")
    seconds: float = option(5.0, "--seconds", None, "Length of a window")
    reps: int = option(3, "--reps", None, "Windows of each server")
    core: int = option(0, "--core", None, "Core of the servers")


@dataclass(frozen=True, slots=True)
class Window:
    """Result of one window."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    refused: int
    pauses: dict[str, Any]
    """Pauses of the server's event loop (`benchmarks.pauses.summary`)."""
    client_late_p99_ms: float
    """Delay of the client: the time by which it started requests late."""


@dataclass(frozen=True, slots=True)
class Server:
    """Running server: its port, process, and the file of its loop's pauses."""

    port: int
    pid: int
    pauses: Path


def messages(number: int) -> tuple[bytes, bytes]:
    """Return the messages of one request."""
    headers, body = CLASSES["ProcessingRequest"](), CLASSES["ProcessingRequest"]()
    given = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    for key, value in given.items():
        headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    headers.protocol_config.request_body_mode = FULL_DUPLEX_STREAMED
    chat = {"model": "m", "messages": [{"role": "user", "content": f"{number % PROMPTS} {WORDS}"}]}
    body.request_body.body, body.request_body.end_of_stream = json.dumps(chat).encode(), True
    return headers.SerializeToString(), body.SerializeToString()


async def window(server: Server, rate: int, seconds: float) -> Window:
    """Send picks at a rate and measure them."""
    client = LoadClient(f"/{SERVICE}/Process", [messages(number) for number in range(PROMPTS)], ANSWERS)
    before, at, began = cpu_s(server.pid), time.time(), time.perf_counter()
    load = await client.run(server.port, rate, seconds)
    elapsed = time.perf_counter() - began
    latencies, late = sorted(load.latencies_s) or [math.inf], sorted(load.late_s) or [math.inf]
    count = len(latencies)
    return Window(
        count / elapsed,
        latencies[count // 2] * 1e3,
        latencies[int(count * 0.99)] * 1e3,
        (cpu_s(server.pid) - before) / count * 1e6,
        load.refused,
        summary(pauses_of(server.pauses, at, time.time())),
        late[int(len(late) * 0.99)] * 1e3,
    )


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def servers(core: int) -> Iterator[dict[str, Server]]:
    """Start the picker with two workers, and the reference."""
    ports = [free_port() for _ in range(4)]
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "DYN_FILE_KV": f"{folder}/kv", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "warn"}
        paths = Path(folder) / "picker", Path(folder) / "echo"
        program = [python, "-m", "benchmarks.epp_servers"]
        picker = ["--host", "127.0.0.1", "--grpc-port", str(ports[0]), "--grpc-health-port", str(ports[1])]
        commands = [
            [python, "-m", "dynamo.mocker", "--model-name", "m", "--speedup-ratio", "0"],
            [python, "-m", "dynamo.mocker", "--model-name", "m", "--speedup-ratio", "0"],
            [*program, "picker", str(paths[0]), *picker, "--metrics-port", str(ports[2]), "--no-secure-serving"],
            [*program, "echo", str(paths[1]), str(ports[3])],
        ]
        made = [subprocess.Popen(command, env=variables) for command in commands]
        try:
            deadline = time.monotonic() + READY_S
            while not is_ready(ports[2]):
                if time.monotonic() > deadline:
                    raise ConnectionError("the picker found no worker")
                time.sleep(0.1)
            for process in made[2:]:
                for task in os.listdir(f"/proc/{process.pid}/task"):
                    os.sched_setaffinity(int(task), {core})
            yield {PICKER: Server(ports[0], made[2].pid, paths[0]), ECHO: Server(ports[3], made[3].pid, paths[1])}
        finally:
            for process in made:
                process.terminate()
            for process in made:
                process.wait(30)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> int:
    """Measure both servers in turns and print the best windows."""
    options = load(EppBench, sys.argv[1:], prog="python -m benchmarks.epp_picks")
    found: dict[str, list[Window]] = {PICKER: [], ECHO: []}
    with servers(options.core) as running:
        for _ in range(options.reps):
            for name, server in running.items():
                found[name].append(asyncio.run(window(server, options.rate, options.seconds)))
    best = {name: min(windows, key=lambda one: one.p99_ms) for name, windows in found.items()}
    rows = [
        [n, f"{w.rate:.0f}", f"{w.p50_ms:.2f}", f"{w.p99_ms:.2f}", f"{w.cpu_us:.0f}", str(w.refused)]
        for n, w in best.items()
    ]
    print_line(table(["server", "picks/s", "p50 ms", "p99 ms", "CPU us/pick", "refused"], rows))
    policy = "realtime" if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR) else "ordinary"
    result = {
        "rate": options.rate,
        "scheduling": policy,
        **{name: [asdict(one) for one in windows] for name, windows in found.items()},
    }
    print_line(write_result("epp_picks", result, is_whole=replace(options, core=0) == EppBench()))
    picker = best[PICKER]
    return int(picker.rate < 0.98 * options.rate or picker.p99_ms > P99_MS_MAX)


if __name__ == "__main__":
    exit_on_config_error(main)
