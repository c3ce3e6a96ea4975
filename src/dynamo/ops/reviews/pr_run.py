"""Review run: steps 1 to 6 of `dynamo pr-review` on this machine: checkout, build, launch, readiness, tests, load, metrics."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.core.config import environ
from dynamo.core.errors import DynamoException
from dynamo.http.client import ChatClient
from dynamo.ops.archive import tail_of
from dynamo.ops.doctor.network import fetch
from dynamo.ops.report import CheckRow, failed, passed, skipped
from dynamo.ops.reviews.pr_claims import (
    failure_lines,
    load_command,
    load_row,
    metrics_row,
    same_text_row,
    structure_problem,
)

POLL_S = 0.5
STOP_S = 60.0
LOAD_S = 1800.0
GIT_S = 30.0
PROMPT = "Count from one to ten."
TOKENS = 32
REQUEST_TIMEOUT_S = 300.0
WORKER_METRICS = "dynamo_component_"
FRONTEND_METRICS = "dynamo_frontend_requests_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRun:
    """What is launched and how it is loaded."""

    engine: str
    model: str
    arguments: tuple[str, ...] = ()
    """The engine's own arguments."""
    http_port: int = 8000
    system_port: int = 8081
    """Port of the worker's metrics."""
    ready_s: float = 600.0
    repeats: int = 2
    concurrency: int = 16
    requests: int = 256
    aiperf: str = "aiperf"
    tokenizer: str | None = None

    @property
    def command(self) -> list[str]:
        """Return the command line of the graph."""
        model = [self.model] if self.model else []
        options = ["--engine", self.engine, "--http-port", str(self.http_port), "--verbose"]
        arguments = ["--", *self.arguments] if self.arguments else []
        return [sys.executable, "-m", "dynamo.cli", "serve", *model, *options, *arguments]

    @property
    def url(self) -> str:
        """Return the frontend's URL."""
        return f"http://127.0.0.1:{self.http_port}"


@dataclass(slots=True)
class Captured:
    """Rows of the steps, and the results for the draft."""

    rows: list[CheckRow] = field(default_factory=list)
    tests: dict[str, str] = field(default_factory=dict)
    log: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def add(self, row: CheckRow, test: str | None = None) -> bool:
        """Record a row, and as the result of a test of the template; return whether it did not fail."""
        self.rows.append(row)
        if test is not None:
            self.tests[test] = f"{row.status.value}: {row.evidence}"
        return row.status.value != "FAIL"


def run_review(run: ReviewRun, folder: Path) -> Captured:
    """Run the steps in order, until one that the others need fails; artifacts are written to the folder. Raise `OSError`."""
    found = Captured()
    if not all(found.add(row) for row in checkout_rows(found.environment)):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "serve.log"
    with launched(run, log) as process:
        if found.add(await_ready(run, process, log), "readiness"):
            client = ChatClient(run.url, timeout_s=REQUEST_TIMEOUT_S)
            try:
                claims(client, found, run.engine)
            except DynamoException as error:
                found.add(failed("requests", " ".join(str(error).split()), "read serve.log"), "normal request")
            else:
                for number in range(1, run.repeats + 1):
                    found.add(
                        measured_row(run, client.models()[0], folder / f"load-{number}"),
                        "load" if number == 1 else f"load {number}",
                    )
            for name, port, family in (
                ("frontend metrics", run.http_port, FRONTEND_METRICS),
                ("worker metrics", run.system_port, WORKER_METRICS),
            ):
                status, _, text = fetch(f"http://127.0.0.1:{port}", "/metrics")
                found.add(metrics_row(name, port, status, text, family), name)
                if text:
                    (folder / f"metrics-{port}.txt").write_text(text, encoding="utf-8")
    found.log = tail_of(str(log)).decode(errors="replace")
    problems = failure_lines(found.log)
    found.add(failed("log", problems[0], "read serve.log") if problems else passed("log", "no failure line"))
    return found


def checkout_rows(environment: dict[str, str]) -> Iterator[CheckRow]:
    """Yield the rows of steps 1 and 2: no tracked modification, and an environment of the checkout's own."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed is None:
        yield skipped("checkout", "not a git working tree")
    else:
        environment["ref"] = f"{_git('rev-parse', '--abbrev-ref', 'HEAD')} {_git('rev-parse', '--short', 'HEAD')}"
        if changed:
            files = ", ".join(line[3:] for line in changed.splitlines()[:3])
            yield failed("checkout", f"tracked files are modified: {files}", "commit or stash them, then repeat")
        else:
            yield passed("checkout", environment["ref"])
    environment["python"] = sys.prefix
    if Path(sys.prefix).is_symlink():
        yield failed("build", f"{sys.prefix}: a symbolic link", "create an environment of this checkout's own")
    else:
        yield passed("build", sys.prefix)


@contextlib.contextmanager
def launched(run: ReviewRun, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the graph with its output in a file, and end it like Ctrl-C. Raise `OSError`."""
    variables = {**environ(), "DYN_SYSTEM_PORT": str(run.system_port)}
    with open(log, "wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this program itself
            run.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def await_ready(run: ReviewRun, process: "subprocess.Popen[bytes]", log: Path) -> CheckRow:
    """Poll /v1/models until a model is listed, the log shows a failure, the process ends, or the time is over."""
    started = time.monotonic()
    client = ChatClient(run.url, timeout_s=REQUEST_TIMEOUT_S)
    while True:
        ended = process.poll()
        waited_s = time.monotonic() - started
        problems = failure_lines(tail_of(str(log)).decode(errors="replace"))
        if problems:
            return failed("readiness", problems[0], "read serve.log; dynamo troubleshoot --logs names known causes")
        if ended is not None:
            lines = tail_of(str(log)).decode(errors="replace").strip().splitlines() or [f"status {ended}"]
            return failed("readiness", lines[-1], "correct what the message names")
        with contextlib.suppress(DynamoException):
            if models := client.models():
                return passed("readiness", f"{models[0]} after {waited_s:.1f} s")
        if waited_s > run.ready_s:
            return failed(
                "readiness", f"no model within {run.ready_s:.0f} s", "read serve.log, or raise --ready-timeout"
            )
        time.sleep(POLL_S)


def claims(client: ChatClient, found: Captured, engine: str) -> None:
    """Send the requests of step 5. Raise `DynamoException`."""
    (model, *_) = client.models()
    messages = [{"role": "user", "content": PROMPT}]
    greedy = {"max_tokens": TOKENS, "temperature": 0}
    whole = client.complete(model, messages, greedy)
    problem = structure_problem(whole)
    if problem:
        found.add(failed("structure", problem, "compare with the OpenAI API reference"), "E2E non-streaming")
        return
    text = str(whole["choices"][0]["message"].get("content") or "")
    found.add(passed("structure", f"{whole['usage']['completion_tokens']} tokens"), "E2E non-streaming")
    streamed = "".join(delta.content for delta in client.chat(model, messages, greedy))
    found.add(same_text_row(text, streamed, is_random=engine == "mocker"), "E2E streaming")
    normal = client.complete(model, messages, {"max_tokens": TOKENS})
    found.add(passed("normal request", f"finish_reason {normal['choices'][0].get('finish_reason')}"), "normal request")


def measured_row(run: ReviewRun, model: str, folder: Path) -> CheckRow:
    """Run aiperf once; return what it measured."""
    command = load_command(run.aiperf, model, run.url, run.concurrency, run.requests, folder, run.tokenizer)
    try:
        done = subprocess.run(  # noqa: S603 - the load generator that the user names
            command, capture_output=True, text=True, timeout=LOAD_S, check=False
        )
    except FileNotFoundError:
        return skipped("load", f"{run.aiperf} is not installed; pip install aiperf, or name it with --aiperf")
    except subprocess.TimeoutExpired:
        return failed("load", f"aiperf did not end within {LOAD_S:.0f} s", "lower --requests")
    try:
        measured: Mapping[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        return failed(
            "load", f"aiperf ended with status {done.returncode}: {lines[-1]}", "run its command line by hand"
        )
    return load_row(measured, run.requests)


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=GIT_S, check=False)  # noqa: S603, S607
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
