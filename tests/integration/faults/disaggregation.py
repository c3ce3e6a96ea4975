"""Prefill and decode workers of the embedded engine under load, which are killed and stopped at random.

    python -m tests.integration.faults.disaggregation --requests 10000

The client sends every request once, without retries; its text must equal that of one aggregated worker. The outcomes,
transfers and faults are printed at the end; an unexpected outcome makes the command fail.
"""

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from benchmarks.ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

WORDS = [
    "how",
    "does",
    "a",
    "router",
    "choose",
    "which",
    "worker",
    "holds",
    "blocks",
    "of",
    "prompt",
    "cache",
    "tokens",
    "first",
    "while",
    "others",
    "wait",
]
MODEL = "m"
CACHE = ("--max-model-len", "768", "--kv-cache-blocks", "400", "--max-num-seqs", "16")
AT_ONCE = ("--disaggregation-bootstrap-port", "0", "--max-num-batched-tokens", "32")
HOLD = ("--kv-hold-timeout", "5")  # A stopping worker waits this long for the fetch of its blocks.
KEPT_BUSY = {"OPENBLAS_NUM_THREADS": "1", "DYN_LOG": "info"}


def requests_of(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return different requests: short and long, some with a common prefix, greedy and seeded."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        common = WORDS * 3 if rng.random() < 0.5 else []
        words = [*common, f"{number}", *rng.choices(WORDS, k=rng.choice([3, 20, 80]))]
        sampling = {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 1.0, "seed": number}
        messages = [{"role": "user", "content": " ".join(words)}]
        made.append({"model": MODEL, "messages": messages, "max_tokens": rng.choice([1, 8, 24, 60]), **sampling})
    return made


@dataclass
class Answer:
    """The response that a client received."""

    status: int = 0
    text: str = ""
    ends: list[str] = field(default_factory=list)
    tokens: int | None = None
    is_done: bool = False
    error: str = ""

    def same_as(self, other: "Answer") -> bool:
        """Return whether the response is complete, without duplicates, and has the expected text."""
        mine, theirs = (self.status, self.text, self.ends, self.tokens), (200, other.text, other.ends, other.tokens)
        return mine == theirs and self.is_done and not self.error


def send_request(client: httpx.Client, body: dict[str, Any]) -> Answer:
    """Send one streamed request, without retries."""
    answer = Answer()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.stream("POST", "/v1/chat/completions", json=wanted) as response:
            answer.status = response.status_code
            for line in response.iter_lines():
                _receive(answer, line)
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def _receive(answer: Answer, line: str) -> None:
    if line == "data: [DONE]":
        answer.is_done = True
    elif line.startswith("data: "):
        piece = json.loads(line[6:])
        answer.error = answer.error or str(piece.get("error") or "")
        if piece.get("usage"):
            answer.tokens = piece["usage"]["completion_tokens"]
        for choice in piece.get("choices", []):
            answer.text += choice["delta"].get("content") or ""
            if choice.get("finish_reason"):
                answer.ends.append(choice["finish_reason"])
    elif line and not line.startswith(":"):
        answer.error = answer.error or line


class Worker:
    """Process of one role."""

    def __init__(self, cluster: Cluster, role: str, *flags: str) -> None:
        self.role = role
        self.port = free_port()
        self._log = cluster.folder / f"cpu{len(cluster.processes)}.log"
        argv = ("--model-name", MODEL, "--disaggregation-mode", role, *CACHE, *HOLD, *flags)
        variables = {**KEPT_BUSY, "DYN_SYSTEM_PORT": str(self.port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        self.process = cluster.run("cpu", *argv, **variables)

    @property
    def is_ready(self) -> bool:
        return self.process.poll() is None and "worker ready" in self._log.read_text(errors="replace")

    def metrics(self, timeout_s: float = DEADLINE_S) -> "Counter[str]":
        """Return its transfer metrics by name and label; none if it does not answer in time."""
        found: Counter[str] = Counter()
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=timeout_s).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in ("dynamo_component_kv_fetches_total", "dynamo_component_local_prefills_total"):
                        labels = [
                            sample.labels[key] for key in ("transport", "outcome", "reason") if key in sample.labels
                        ]
                        found[f"{sample.name[17:]} {' '.join(labels)}"] += int(sample.value)
                    elif sample.name == "dynamo_component_kv_held_blocks":
                        found["held blocks"] += int(sample.value)
        return found


class Fleet:
    """A frontend, and prefill and decode workers behind it."""

    def __init__(self, folder: Path, prefill: int, decode: int, *flags: str) -> None:
        self._flags = flags
        self.cluster = Cluster(folder, "--migration-limit", "8")
        wait_until(self.cluster.is_live, "the frontend never came up")
        self.workers = [
            *(Worker(self.cluster, "prefill", *flags) for _ in range(prefill)),
            *(Worker(self.cluster, "decode", *flags) for _ in range(decode)),
        ]
        self.seen: Counter[str] = Counter()
        """Metrics of workers that have ended."""
        wait_until(lambda: all(worker.is_ready for worker in self.workers), "the workers never came up")
        wait_until(self._serves, "the model is not served")

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.cluster.port}", timeout=DEADLINE_S)

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL, after a last scrape of its metrics."""
        self.seen += worker.metrics(timeout_s=2.0)  # It may be stopped.
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait(DEADLINE_S)
        self.workers.remove(worker)

    def add(self, role: str, *flags: str) -> Worker:
        worker = Worker(self.cluster, role, *self._flags, *flags)
        self.workers.append(worker)
        return worker

    def figures(self) -> "Counter[str]":
        """Return the metrics of all workers that ever ran, as far as they could be scraped."""
        total = self.seen.copy()
        for worker in self.workers:
            total += worker.metrics()
        return total

    def series(self, worker: Worker, name: str) -> float:
        """Return the sum of one of a worker's series."""
        text = httpx.get(f"http://127.0.0.1:{worker.port}/metrics", timeout=DEADLINE_S).text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def stop(self) -> None:
        """End every process, also paused ones."""
        self.cluster.stop()

    def _serves(self) -> bool:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        return self.cluster.post(body).status_code == 200


@contextlib.contextmanager
def fleet(folder: Path, *, prefill: int = 2, decode: int = 2, flags: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """Start workers, which end with the block."""
    folder.mkdir(exist_ok=True)
    opened = Fleet(folder, prefill, decode, *flags)
    try:
        yield opened
    finally:
        opened.stop()


def reference(folder: Path, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Return the response of one aggregated worker for each prompt."""
    folder.mkdir(exist_ok=True)
    with Cluster(folder) as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        cluster.worker("cpu", *CACHE)
        with httpx.Client(base_url=f"http://127.0.0.1:{cluster.port}", timeout=DEADLINE_S) as client:
            wait_until(lambda: send_request(client, bodies[0]).status == 200, "the model is not served")
            answers = [send_request(client, body) for body in bodies]
    for answer in answers:
        assert answer.status == 200, answer
        assert answer.is_done, answer
    return answers


class Load:
    """Clients that send requests up to a total, and count the results."""

    def __init__(self, served: Fleet, bodies: list[dict[str, Any]], want: list[Answer], total: int, seed: int) -> None:
        self._served = served
        self._bodies = bodies
        self._want = want
        self._left = total
        self._rng = random.Random(seed)
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.done = 0
        self.wrong: list[tuple[dict[str, Any], Answer, Answer]] = []

    def start(self, clients: int) -> None:
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with self._served.client() as client:
            while (place := self._next()) is not None:
                answer = send_request(client, self._bodies[place])
                with self._guard:
                    self.done += 1
                    if not answer.same_as(self._want[place]):
                        self.wrong.append((self._bodies[place], answer, self._want[place]))

    def _next(self) -> int | None:
        with self._guard:
            if self._left <= 0:
                return None
            self._left -= 1
            return self._rng.randrange(len(self._bodies))


class FaultInjector:
    """Fault injection: kills and stops workers at random, and starts replacements."""

    def __init__(self, served: Fleet, every_s: float, seed: int, transports: list[str]) -> None:
        self._served = served
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._transports = transports
        self._stopped: list[tuple[float, subprocess.Popen[bytes]]] = []
        self.made: Counter[str] = Counter()

    def run(self, load: Load) -> None:
        """Inject faults until the load is complete."""
        due = time.monotonic() + self._every_s
        while not load.is_over:
            time.sleep(0.1)
            self._thaw(time.monotonic())
            if time.monotonic() >= due:
                self._strike()
                due = time.monotonic() + self._every_s * self._rng.uniform(0.5, 1.5)
        self._thaw(float("inf"))

    def _strike(self) -> None:
        ready = [worker for worker in self._served.workers if worker.is_ready]
        frozen = {process.pid for _, process in self._stopped}
        decoders = [worker for worker in ready if worker.role == "decode" and worker.process.pid not in frozen]
        possible = [worker for worker in ready if worker.process.pid not in frozen]
        if len(decoders) < 2:  # One worker must remain to complete the requests of the others.
            possible = [worker for worker in possible if worker.role == "prefill"]
        if not possible:
            return
        worker = self._rng.choice(possible)
        if self._rng.random() < 0.2:
            worker.process.send_signal(signal.SIGSTOP)
            self._stopped.append((time.monotonic() + 3.0, worker.process))
            self.made[f"{worker.role} stopped for 3 s"] += 1
            return
        self._served.kill(worker)
        self.made[f"{worker.role} killed"] += 1
        self._served.add(worker.role, "--kv-transfer", self._rng.choice(self._transports) if worker.role == "decode" else "nixl,shm,tcp")  # fmt: skip

    def _thaw(self, now: float) -> None:
        for one in [one for one in self._stopped if one[0] <= now]:
            self._stopped.remove(one)
            with contextlib.suppress(ProcessLookupError):
                one[1].send_signal(signal.SIGCONT)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--different", type=int, default=100, help="How many different ones")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--every", type=float, default=4.0, help="Seconds between two blows, on average")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--transports", default="shm,tcp,nixl,tcp", help="Among which a new decode worker draws one; nixl only where it is installed")  # fmt: skip
    parser.add_argument("--at-once", action="store_true", help="Both legs of a request at once, and prompts in small chunks")  # fmt: skip
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bodies = requests_of(options.different, rng)
        want = reference(folder / "reference", bodies)
        print(f"the reference has answered {len(want)} different requests", flush=True)
        with fleet(folder / "fleet", flags=AT_ONCE if options.at_once else ()) as served:
            load = Load(served, bodies, want, options.requests, options.seed)
            transports = [one if one != "nixl" else "nixl,shm,tcp" for one in options.transports.split(",")]
            trouble = FaultInjector(served, options.every, options.seed, transports)
            began = time.monotonic()
            load.start(options.clients)
            trouble.run(load)
            seconds = time.monotonic() - began
            figures = served.figures()
            held = figures.pop("held blocks", 0)
    print(
        f"{load.done} requests in {seconds:.0f} s, {load.done / seconds:.1f} a second; wrong or lost: {len(load.wrong)}"
    )
    for what, count in sorted(trouble.made.items()):
        print(f"  {count:5d} × {what}")
    for what, count in sorted(figures.items()):
        print(f"  {count:5d} {what}")
    print(f"  {held:5d} blocks still held at the end")
    for body, got, right in load.wrong[:5]:
        print(f"WRONG {json.dumps(body)[:200]}\n  got  {got}\n  want {right}")
    return 1 if load.wrong or load.done != options.requests else 0


if __name__ == "__main__":
    sys.exit(main())
