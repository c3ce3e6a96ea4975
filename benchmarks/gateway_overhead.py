"""Gateway overhead: our frontend and LiteLLM's proxy with a backend that answers each chat after 60 ms, in one run.

    python -m benchmarks.gateway_overhead [--quick]

Both get the same load over HTTP (64 prompt tokens, 16 output tokens, not streamed), each in one process as it is
installed. LiteLLM's backend is `fake_openai.py`, which speaks HTTP; ours is a worker (`metronome.py`) that receives and
returns tokens: our frontend also renders the template, tokenizes the prompt and detokenizes the output, which LiteLLM
does not. Both backends wait with the same timer. LiteLLM runs without a database, keys, logging or telemetry, at the
log level that its documentation recommends for production.

Overhead is the whole latency less 60 ms; the backend alone, called directly, shows the error of that. For a gateway
that falls behind, only responses that end within the window count, which are its fastest: its overhead is
underestimated.
"""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.corpus import bench_model, cache_dir, read_prompts
from benchmarks.fake_openai import OUTPUT_TOKENS, PROMPT_TOKENS
from benchmarks.loadgen import Load, Report, build_requests, measure
from benchmarks.report import OURS, guarded, number, print_line, ratio, table, write_result
from benchmarks.stacks import (
    ENGINE,
    FRONTEND,
    HOST,
    MODEL_NAME,
    POLL_S,
    STOP_TIMEOUT_S,
    Recipe,
    Stack,
    StackFailed,
    free_port,
    ours,
    stack_environment,
)  # fmt: skip
from dynamo.core.config import environ, exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

HERE = os.path.dirname(os.path.abspath(__file__))
LITELLM, ALONE = "litellm", "backend alone"
INSTALL_TIMEOUT_S = 900.0
READY_TIMEOUT_S = 120.0  # Its imports take some time.

CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: http://{host}:{port}/v1
      api_key: none
litellm_settings:
  telemetry: false
  num_retries: 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Latency that our frontend and LiteLLM's proxy add to a backend's."""

    quick: bool = option(False, "--quick", None, "Fewer and shorter windows, and no results file: under a minute")
    concurrency: list[int] = option([1, 16, 64, 256], "--concurrency", None, "Requests in flight")
    delay_ms: float = option(60.0, "--delay-ms", None, "How long the backend takes")
    reps: int = option(2, "--reps", None, "Turns that all take")

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1 or self.reps < 1 or self.delay_ms <= 0:
            raise ConfigError("--concurrency, --reps, --delay-ms: expected more than zero")

    def points(self) -> list[int]:
        return (
            [one for one in self.concurrency if one in (1, 64)] or self.concurrency if self.quick else self.concurrency
        )


@dataclass(frozen=True, slots=True)
class Overhead:
    """Overhead of one gateway at one concurrency."""

    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    us_per_request: float
    """Processor time of the gateway."""

    @classmethod
    def of(cls, reports: Sequence[Report], delay_ms: float) -> "Overhead":
        """Return the overhead of the round with the least noise."""
        report = min(reports, key=lambda one: one.noise)
        p50, p90, p99 = (report.latency_ms[name] - delay_ms for name in ("p50", "p90", "p99"))
        cost = report.costs.get(FRONTEND)
        return cls(report.requests_per_s, p50, p90, p99, cost.us_per_request if cost else 0.0)


class LitellmMissing(Exception):
    """LiteLLM cannot be installed here; the message gives the reason in one line."""


def ensure_litellm() -> str:
    """Return LiteLLM's command, installed first if need be."""
    home = os.path.join(cache_dir(), "litellm", "venv")
    command = os.path.join(home, "bin", "litellm")
    if os.path.exists(command):
        return command
    print_line(f"installing litellm[proxy] into {home} (once)")
    venv.create(home, with_pip=True, symlinks=True)
    pip = [os.path.join(home, "bin", "python"), "-m", "pip", "install", "--quiet", "litellm[proxy]"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode or not os.path.exists(command):
        raise LitellmMissing((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return command


@dataclass(frozen=True, slots=True)
class Served:
    """Server under load, and its processes."""

    port: int
    pids: Mapping[str, Sequence[int]]


@contextlib.contextmanager
def process(command: Sequence[str], env: Mapping[str, str], log: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that ends with the block."""
    with open(log, "wb") as file:
        started = subprocess.Popen(
            command, env=dict(env), cwd=os.path.dirname(log), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(STOP_TIMEOUT_S)


def wait_until_ready(port: int, log: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers. Raises `StackFailed` with the end of the log."""
    chat = json.dumps({"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]})
    deadline, output = time.monotonic() + READY_TIMEOUT_S, "nothing"
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=10.0)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v1/chat/completions", chat, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status == 200:
                    return
                output = f"{response.status}: {response.read()[:300]!r}"
            except (OSError, http.client.HTTPException) as error:
                output = repr(error)
        time.sleep(POLL_S * 4)
    with open(log, encoding="utf-8", errors="replace") as file:
        raise StackFailed(
            f"not ready after {READY_TIMEOUT_S - deadline + time.monotonic():.0f} s; {output}\n{''.join(file.readlines()[-12:])}"
        )


@contextlib.contextmanager
def litellm_stack(command: str, delay_ms: float) -> Iterator[dict[str, Served]]:
    """Run LiteLLM's proxy and its backend, and yield both."""
    home = tempfile.mkdtemp(prefix="dynamo-bench-litellm-")
    with contextlib.ExitStack() as opened:
        opened.callback(shutil.rmtree, home, ignore_errors=True)
        env = stack_environment(home, environ())
        backend, port = free_port(), free_port()
        fake = [sys.executable, os.path.join(HERE, "fake_openai.py"), str(backend), f"{delay_ms:g}"]
        log = os.path.join(home, "backend.log")
        behind = opened.enter_context(process(fake, env, log))
        wait_until_ready(backend, log, behind)
        config = os.path.join(home, "config.yaml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(CONFIG.format(model=MODEL_NAME, host=HOST, port=backend))
        quiet = {
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # It listens on loopback alone.
        }
        proxy = [command, "--config", config, "--host", HOST, "--port", str(port), "--num_workers", "1"]
        log = os.path.join(home, "litellm.log")
        gateway = opened.enter_context(process(proxy, {**env, **quiet}, log))
        wait_until_ready(port, log, gateway)
        yield {
            LITELLM: Served(port, {FRONTEND: [gateway.pid], ENGINE: [behind.pid]}),
            ALONE: Served(backend, {ENGINE: [behind.pid]}),
        }


class Bench:
    """Prompts, servers and rounds of the benchmark."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.model = bench_model()
        self.prompts = read_prompts(self.model, PROMPT_TOKENS)

    def run(self, command: str | None) -> dict[str, dict[int, Overhead]]:
        flags = ["--answer-after-ms", f"{self.config.delay_ms:g}"]
        program = os.path.join(HERE, "metronome.py")
        recipe = Recipe(name=OURS, frontend=ours(), engine=ours(), program=program, engine_flags=flags)
        reports: dict[tuple[str, int], list[Report]] = {}
        with contextlib.ExitStack() as opened:
            stack = opened.enter_context(Stack(recipe, self.model))
            servers = {OURS: Served(stack.port, stack.pids)}
            if command is not None:
                servers |= opened.enter_context(litellm_stack(command, self.config.delay_ms))
            print_line(f"{', '.join(servers)}: ready")
            for rep in range(1 if self.config.quick else self.config.reps):
                for concurrency in self.config.points():
                    for name in servers if rep % 2 == 0 else reversed(servers):
                        report = self._measure(servers[name], concurrency)
                        reports.setdefault((name, concurrency), []).append(report)
                        print_line(
                            f"  c={concurrency}, turn {rep + 1}, {name}: {number(report.requests_per_s)} requests/s"
                        )
        found: dict[str, dict[int, Overhead]] = {}
        for (name, concurrency), some in reports.items():
            found.setdefault(name, {})[concurrency] = Overhead.of(some, self.config.delay_ms)
        return found

    def _measure(self, served: Served, concurrency: int) -> Report:
        work = Load(
            host=HOST,
            port=served.port,
            concurrency=concurrency,
            ramp_s=0.3,
            warmup_s=1.0 if self.config.quick else 2.0,
            window_s=2.5 if self.config.quick else 5.0,
            completion_tokens=OUTPUT_TOKENS,
        )
        requests = build_requests(work, MODEL_NAME, self.prompts.texts, self.prompts.words, is_stream=False)
        requests.count = random.randrange(2**31)
        report = measure(work, requests, served.pids)
        if report.bad or not report.answers:
            raise ConnectionError(f"{report.bad} bad answers: {report.bad_example}")
        return report


def markdown(found: Mapping[str, Mapping[int, Overhead]]) -> str:
    """Return each concurrency, with the ratio of ours to LiteLLM's."""
    head = ["in flight", "", "requests/s", "overhead p50 ms", "p90 ms", "p99 ms", "CPU-µs per request"]
    rows = []
    for concurrency in found[OURS]:
        here = {name: each[concurrency] for name, each in found.items()}
        for name, one in here.items():
            values = (one.requests_per_s, one.p50_ms, one.p90_ms, one.p99_ms)
            spent = "" if name == ALONE else number(one.us_per_request)
            rows.append([str(concurrency), name, *map(number, values), spent])
        if LITELLM in here:
            mine, other = asdict(here[OURS]), asdict(here[LITELLM])
            rows.append([str(concurrency), "**ours/litellm**", *(ratio(mine[name], other[name]) for name in mine)])
    return table(head, rows, 2)


def main() -> int:
    config = load(GatewayConfig, sys.argv[1:], prog="python -m benchmarks.gateway_overhead")
    command = None
    try:
        command = ensure_litellm()
    except (LitellmMissing, OSError, subprocess.SubprocessError) as error:
        print_line(f"LiteLLM is not measured: {error}")
    found = Bench(config).run(command)
    kept = {name: {str(concurrency): asdict(one) for concurrency, one in each.items()} for name, each in found.items()}
    whole = not config.quick and command is not None
    path = write_result("gateway_overhead", {"delay_ms": config.delay_ms, **kept}, is_whole=whole)
    print_line(f"\n{markdown(found)}\n\nwritten to {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
