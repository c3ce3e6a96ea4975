"""Start: seconds until a frontend is ready, its processor time, memory and modules; and until `dynamo serve` answers a chat.

    python -m benchmarks.start [--quick]

*Frontend*: our frontend and the released one start in turn, alone, with file discovery; ready is the first answer of
`/v1/models`. Processor time and memory are read then. *With a model*: each with its own mocker and the benchmark's model,
after the first chat, and while 64 streams run. *Serve*: one `dynamo serve` of the bundled demo model, until its first chat is
answered. Figures are medians over the repetitions.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from benchmarks.corpus import bench_model, read_prompts
from benchmarks.frontend_memory import rss_mib
from benchmarks.loadgen import Load, build_requests, family, measure, read_parents, read_usage
from benchmarks.ports import free_port
from benchmarks.report import OURS, THEIRS, guarded, implementations, number, print_line, ratio, table, write_result
from benchmarks.stacks import FRONTEND, HOST, MODEL_NAME, Implementation, Recipe, Stack, StackFailed, stack_environment
from dynamo.core.config import environ, exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.cpu.config import DEMO_MODEL_NAME

READY_TIMEOUT_S = 60.0
POLL_S = 0.004
STOP_TIMEOUT_S = 15.0
COUNT_TIMEOUT_S = 30.0
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 512, 128
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """Start of our frontend and of the released one."""

    quick: bool = option(False, "--quick", None, "Three repetitions, and no results file: under a minute")
    reps: int = option(0, "--reps", None, "Starts of each frontend [15, quick 3]")

    def __post_init__(self) -> None:
        if self.reps < 0:
            raise ConfigError("--reps must be at least 1")

    @property
    def repetitions(self) -> int:
        return self.reps or (3 if self.quick else 15)


@dataclass(frozen=True, slots=True)
class Started:
    """One start of a frontend without a model."""

    ready_s: float
    cpu_s: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """Memory of a frontend with a model, in MiB."""

    model_mib: float
    busy_mib: float


class Process:
    """A server in a directory and a session of its own, ended with its children on exit."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.port = port
        self._home = tempfile.mkdtemp(prefix="dynamo-bench-start-")
        self._log = os.path.join(self._home, "log")
        self.began_s = time.perf_counter()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, env=stack_environment(self._home, environ()), cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def wait_until(self, method: str, path: str, body: Mapping[str, object] | None = None) -> float:
        """Return the seconds from the start to the first answer with status 200."""
        data = None if body is None else json.dumps(body).encode()
        while time.perf_counter() - self.began_s < READY_TIMEOUT_S:
            if self._process.poll() is not None:
                break
            connection = http.client.HTTPConnection(HOST, self.port, timeout=10.0)
            try:
                connection.request(method, path, data, {"content-type": "application/json"})
                if connection.getresponse().status == 200:
                    return time.perf_counter() - self.began_s
            except (OSError, http.client.HTTPException):
                pass  # Not listening yet.
            finally:
                connection.close()
            time.sleep(POLL_S)
        with open(self._log, encoding="utf-8", errors="replace") as file:
            raise StackFailed(f"no answer of {method} {path} in {READY_TIMEOUT_S:.0f} s\n{file.read()[-2000:]}")


def start_frontend(python: str) -> Started:
    """Start a frontend alone, and stop it when it is ready."""
    port = free_port()
    command = [python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
    with Process(command, port) as process:
        ready_s = process.wait_until("GET", "/v1/models")
        cpu_s = sum(read_usage(pid).cpu_s for pid in family(process.pids, read_parents()))
        return Started(ready_s, cpu_s, rss_mib(process.pids))


def serve_demo() -> float:
    """Return the seconds from the start of `dynamo serve` to the answer of the first chat of the bundled model."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.cli", "serve"]
    with Process([*command, "--http-host", HOST, "--http-port", str(port)], port) as process:
        return process.wait_until("POST", "/v1/chat/completions", {"model": DEMO_MODEL_NAME, **CHAT})


def load_model(name: str, implementation: Implementation) -> Loaded:
    """Return the memory of a frontend with a model, after its first chat and while streams run."""
    model = bench_model()
    prompts = read_prompts(model, PROMPT_TOKENS)
    with Stack(Recipe(name=name, frontend=implementation, engine=implementation), model) as stack:
        model_mib = rss_mib(stack.pids[FRONTEND])
        work = Load(
            host=HOST, port=stack.port, concurrency=STREAMS, warmup_s=1.0, window_s=2.0, prompt_tokens=PROMPT_TOKENS,
            completion_tokens=OUTPUT_TOKENS,
        )  # fmt: skip
        report = measure(work, build_requests(work, MODEL_NAME, prompts.texts, prompts.words), stack.pids)
        return Loaded(model_mib, report.costs[FRONTEND].rss_mib)


def count_modules(python: str) -> int:
    """Return the number of modules after the import of the frontend; 0 if it cannot be imported."""
    code = "import sys, dynamo.frontend.main; print(len(sys.modules))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=COUNT_TIMEOUT_S, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def summarise(starts: Sequence[Started], loaded: Loaded, modules: int) -> dict[str, float]:
    """Return the medians of one frontend."""
    return {
        "ready_s": median(one.ready_s for one in starts),
        "ready_s_min": min(one.ready_s for one in starts),
        "cpu_s": median(one.cpu_s for one in starts),
        "rss_mib": median(one.rss_mib for one in starts),
        "rss_with_model_mib": loaded.model_mib,
        "rss_busy_mib": loaded.busy_mib,
        "modules": modules,
    }


COLUMNS = {
    "ready, s": "ready_s",
    "fastest, s": "ready_s_min",
    "processor time, s": "cpu_s",
    "RSS, MiB": "rss_mib",
    "with a model": "rss_with_model_mib",
    f"with {STREAMS} streams": "rss_busy_mib",
    "modules": "modules",
}


def markdown(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the figures of both, and the ratios of ours to theirs."""
    rows = [[name, *(number(one[key]) for key in COLUMNS.values())] for name, one in found.items()]
    if OURS in found and THEIRS in found:
        rows.append(["**ours/theirs**", *(ratio(found[OURS][key], found[THEIRS][key]) for key in COLUMNS.values())])
    return table(["frontend", *COLUMNS], rows)


def main() -> int:
    config = load(StartConfig, sys.argv[1:], prog="python -m benchmarks.start")
    systems = implementations()
    starts: dict[str, list[Started]] = {name: [] for name in systems}
    serves: list[float] = []
    for rep in range(config.repetitions):
        for name in systems if rep % 2 == 0 else reversed(systems):
            starts[name].append(start_frontend(systems[name].python))
        serves.append(serve_demo())
    found = {
        name: summarise(starts[name], load_model(name, one), count_modules(one.python)) for name, one in systems.items()
    }
    whole = {**found, "serve_demo_s": median(serves), "serve_demo_s_min": min(serves), "reps": config.repetitions}
    if OURS in found and THEIRS in found:
        whole["ratios"] = {key: found[OURS][key] / found[THEIRS][key] for key in COLUMNS.values() if found[THEIRS][key]}
    path = write_result("start", whole, is_whole=not config.quick and THEIRS in found)
    print_line(
        f"\n{markdown(found)}\n\n`dynamo serve` with the demo model, start to first chat: {median(serves):.2f} s"
    )
    print_line(f"written to {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
