"""Load: a closed loop of requests over plain sockets, and what answering them cost the processes that did.

    python -m benchmarks.loadgen http://127.0.0.1:8000 --model tiny --concurrency 64 --watch frontend:123

One process, one epoll, keep-alive connections. It shares the machine with the server it measures, so it must cost
little: token events are counted in the received bytes and never parsed, and only the last bytes of an answer are
read for its `usage`. The processor time of the watched processes is read at the very edges of the measured window.
Linux only: it reads /proc.
"""

import gc
import json
import os
import re
import resource
import select
import socket
import sys
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"  # Cannot end an event: JSON ends in a brace and `[DONE]` in a bracket.
UNTIL_CLOSED = sys.maxsize
HEAD_PENDING = -2
CHUNKED = -1
RECEIVE_BYTES = 65536  # Below malloc's mmap threshold: a larger buffer would be mapped and unmapped at each call.
TAIL_PARTS = 6  # The usage event, [DONE] and the last chunk may come one by one, and may each be split.
POLL_S = 0.05  # The edges of the window are seen at most this late; the window is what was seen, not what was asked.
FAILURES_MAX = 200  # Connections that broke; beyond this there is no server to measure.
DRAIN_S = 20.0  # Longer than any request of 128 tokens takes; what is still open then is counted and cut.
CONNECT_S = 5.0
BAD_EXAMPLE_CHARS = 300

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MARKERS = {"/v1/chat/completions": b'"content":"', "/v1/completions": b'"text":"'}
"""What each token's event holds exactly once: inside the text itself its quotation marks would be escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed loop: so many connections, each sending its next request when the last was answered."""

    host: str
    port: int
    concurrency: int
    path: str = "/v1/chat/completions"
    warmup_s: float = 2.0
    window_s: float = 8.0
    ramp_s: float = 0.5
    """Connections start evenly over this time, so that they do not march in step."""
    is_quickack: bool = True
    """Acknowledge at once. A server without TCP_NODELAY otherwise waits up to 40 ms for each delayed ACK."""
    prompt_tokens: int | None = None
    """What `usage` must say; another number makes the answer a bad one."""
    completion_tokens: int | None = None


@dataclass(slots=True)
class Requests:
    """Ready-made requests: a unique nonce of a fixed number of tokens, set into one of a pool of bodies."""

    pool: Sequence[tuple[bytes, bytes]]
    """Each request cut in two, where the nonce belongs."""
    words: Sequence[bytes]
    """Single-token words; the nonce is `nonce_words` of them and spells a counter."""
    nonce_words: int = 4
    count: int = 0

    def next(self) -> bytes:
        head, tail = self.pool[self.count % len(self.pool)]
        nonce = spell(self.count, self.words, self.nonce_words)
        self.count += 1
        return head + nonce + tail


def spell(number: int, words: Sequence[bytes], length: int) -> bytes:
    """A number in the base of the vocabulary, the fastest digit first: the first word of neighbours differs."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(words))
        digits.append(words[digit])
    return b"".join(digits)


# --- What the processes cost ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far and memory now."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    kernel_s: float = 0.0
    """The part of `cpu_s` spent in the kernel, which samples it: fair over a window, coarse below one."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s + other.cpu_s, self.rss_bytes + other.rss_bytes, self.kernel_s + other.kernel_s)


def read_usage(pid: int) -> Usage:
    """User and system time of all threads of one process; zero when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return Usage()
    user, kernel = int(fields[11]), int(fields[12])
    return Usage((user + kernel) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES, kernel / TICKS_PER_S)


def read_parents() -> dict[int, int]:
    """The parent of every process on the machine."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    return parents


def family(pids: Sequence[int], parents: Mapping[int, int]) -> list[int]:
    """The processes and everything below them."""
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


@dataclass(slots=True)
class Snapshot:
    """The watched groups, this process and all others, at one instant."""

    at: float
    groups: dict[str, Usage]
    own_cpu_s: float
    others: dict[int, float]


def take_snapshot(groups: Mapping[str, Sequence[int]]) -> Snapshot:
    """Reads the watched groups first: they are what the window is about."""
    at, parents = time.perf_counter(), read_parents()
    families = {name: family(pids, parents) for name, pids in groups.items()}
    usage = {name: sum((read_usage(pid) for pid in pids), Usage()) for name, pids in families.items()}
    own = resource.getrusage(resource.RUSAGE_SELF)
    known = {pid for pids in families.values() for pid in pids} | {os.getpid()}
    others = {pid: read_usage(pid).cpu_s for pid in parents if pid not in known}
    return Snapshot(at, usage, own.ru_utime + own.ru_stime, others)


# --- The loop ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What was seen inside the window."""

    answers: int = 0
    bad: int = 0
    bad_example: str = ""
    events: int = 0
    receives: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answered_events: int = 0
    """Token events of whole answers: `completion_tokens` of them were announced by `usage`."""
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between the receipts of token events of one answer; those that came together add `gaps_zero`."""
    gaps_zero: int = 0
    latency_s: list[float] = field(default_factory=list)


class Connection:
    """One keep-alive connection and the answer it is reading."""

    __slots__ = (
        "events",
        "fd",
        "first",
        "head",
        "last",
        "left",
        "parts",
        "receive",
        "sent",
        "sock",
        "status",
        "unsent",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.receive = sock.recv
        self.parts: deque[bytes] = deque(maxlen=TAIL_PARTS)
        self.unsent = b""
        self.sent = 0.0
        self.expect_answer()

    def expect_answer(self) -> None:
        self.head = b""
        self.left = HEAD_PENDING
        self.status = 0
        self.events = 0
        self.first = self.last = 0.0
        self.parts.clear()


CONTENT_LENGTH = re.compile(rb"\ncontent-length: *(\d+)")


def read_head(head: bytes) -> tuple[int, int]:
    """The status of an answer and the bytes its body has, `CHUNKED`, or `UNTIL_CLOSED`."""
    status, fields = int(head[9:12]), head.lower()
    if b"\ntransfer-encoding: chunked" in fields:
        return status, CHUNKED
    length = CONTENT_LENGTH.search(fields)
    return status, int(length[1]) if length else UNTIL_CLOSED


USAGE = re.compile(rb'"(prompt_tokens|completion_tokens)": ?(\d+)')


def read_tokens(tail: bytes) -> tuple[int, int]:
    """Return prompt and completion tokens of the last `usage`; -1 for absent ones."""
    found = {name: int(count) for name, count in USAGE.findall(tail, max(tail.rfind(b'"usage"'), 0))}
    return found.get(b"prompt_tokens", -1), found.get(b"completion_tokens", -1)


class ClosedLoop:
    """The connections, the clock and the tally; `run()` returns when the window is over and all is answered."""

    def __init__(self, load: Load, next_request: Callable[[], bytes], groups: Mapping[str, Sequence[int]]) -> None:
        self.load = load
        self.next_request = next_request
        self.groups = groups
        self.marker = MARKERS[load.path]
        self.marker_empty = self.marker + b'"'
        self.poll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.tally = Tally()
        self.is_measuring = False
        self.is_stopping = False
        self.failures = 0

    def run(self) -> "Report":
        gc.collect()
        gc.disable()  # A collection inside the window would be charged to the server's latency.
        try:
            return self._run()
        finally:
            gc.enable()
            for connection in self.connections.values():
                connection.sock.close()
            self.poll.close()

    def _run(self) -> "Report":
        load = self.load
        began = time.perf_counter()
        due = deque(began + load.ramp_s * index / load.concurrency for index in range(load.concurrency))
        while (now := time.perf_counter()) < began + load.warmup_s:
            while due and due[0] <= now:
                due.popleft()
                self._connect()
            self._turn(min(POLL_S, max(due[0] - now, 0.0)) if due else POLL_S)
        for _ in due:
            self._connect()
        before, opened = take_snapshot(self.groups), time.perf_counter()
        self.is_measuring = True
        while (now := time.perf_counter()) < opened + load.window_s:
            self._turn(min(POLL_S, opened + load.window_s - now))
        self.is_measuring = False
        after, closed = take_snapshot(self.groups), time.perf_counter()
        self.is_stopping = True
        while self.connections and time.perf_counter() < closed + DRAIN_S:
            self._turn(POLL_S)
        return Report.of(load, self.tally, before, after, len(self.connections))

    def _connect(self) -> None:
        address = (self.load.host, self.load.port)
        while True:
            try:
                sock = socket.create_connection(address, timeout=CONNECT_S)
                break
            except OSError as error:
                self._count_failure(f"connect: {error}")
                time.sleep(0.01)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        self.connections[connection.fd] = connection
        self.poll.register(connection.fd, select.EPOLLIN)
        self._send(connection)

    def _count_failure(self, what: str) -> None:
        self.failures += 1
        self._count_bad(what)
        if self.failures > FAILURES_MAX:
            raise ConnectionError(f"{self.load.host}:{self.load.port}: {self.failures} failures, the last: {what}")

    def _count_bad(self, what: str) -> None:
        self.tally.bad += 1
        self.tally.bad_example = self.tally.bad_example or what[:BAD_EXAMPLE_CHARS]

    def _send(self, connection: Connection) -> None:
        connection.expect_answer()
        connection.unsent = self.next_request()
        connection.sent = time.perf_counter()
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        data = connection.unsent
        try:
            written = connection.sock.send(data)
        except BlockingIOError:
            written = 0
        except OSError as error:
            self._lose(connection, f"send: {error}")
            return
        was_blocked, connection.unsent = len(data) > written, data[written:]
        if was_blocked:
            self.poll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _turn(self, timeout_s: float) -> None:
        """One wait, and everything that is ready after it."""
        is_quickack = self.load.is_quickack
        for fd, mask in self.poll.poll(timeout_s, 1024):
            connection = self.connections.get(fd)
            if connection is None:
                continue
            if mask & select.EPOLLOUT:
                self.poll.modify(fd, select.EPOLLIN)
                self._write(connection)
            if not mask & ~select.EPOLLOUT:
                continue
            try:
                data = connection.receive(RECEIVE_BYTES)
                if is_quickack:
                    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose(connection, f"receive: {error}")
                continue
            if data:
                self._read(connection, data, time.perf_counter())
            elif connection.left == UNTIL_CLOSED:
                self._finish(connection, connection.last)
            else:
                self._lose(connection, "the server closed the connection within an answer")

    def _read(self, connection: Connection, data: bytes, now: float) -> None:
        left = connection.left
        if left == HEAD_PENDING:
            data = connection.head + data
            head, mark, data = data.partition(HEAD_END)
            if not mark:
                connection.head = head
                return
            connection.status, connection.left = read_head(head)
            left = connection.left
        events = data.count(self.marker)
        tally = self.tally
        if events:
            if not connection.first:
                events -= data.count(self.marker_empty)  # The role's own event, where a server sends one.
                if events:
                    connection.first = now
                    if self.is_measuring:
                        tally.ttft_s.append(now - connection.sent)
                        tally.gaps_zero += events - 1
            elif self.is_measuring:
                tally.gaps_s.append(now - connection.last)
                tally.gaps_zero += events - 1
            connection.events += events
            connection.last = now
        if self.is_measuring:
            tally.receives += 1
            tally.events += events
        connection.parts.append(data)
        if left == CHUNKED:
            is_whole = data.endswith(LAST_CHUNK) or (
                len(data) < len(LAST_CHUNK) and b"".join(connection.parts).endswith(LAST_CHUNK)
            )
        else:
            connection.left = left = left - len(data)
            is_whole = left <= 0
        if is_whole:
            self._finish(connection, now)

    def _finish(self, connection: Connection, now: float) -> None:
        tail = b"".join(connection.parts)
        prompt, completion = read_tokens(tail)
        load = self.load
        if connection.status != 200:
            self._count_bad(f"status {connection.status}: {tail.decode(errors='replace')}")
        elif completion < 0:
            self._count_bad(f"no usage: {tail.decode(errors='replace')}")
        elif prompt != (load.prompt_tokens or prompt) or completion != (load.completion_tokens or completion):
            self._count_bad(f"usage says {prompt} prompt tokens and {completion} completion tokens")
        elif self.is_measuring:
            tally = self.tally
            tally.answers += 1
            tally.prompt_tokens += prompt
            tally.completion_tokens += completion
            tally.answered_events += connection.events
            tally.latency_s.append(now - connection.sent)
        if self.is_stopping:
            self._drop(connection)
        elif connection.left >= UNTIL_CLOSED // 2:
            self._drop(connection)
            self._connect()
        else:
            self._send(connection)

    def _lose(self, connection: Connection, what: str) -> None:
        self._drop(connection)
        self._count_failure(what)
        if not self.is_stopping:
            self._connect()

    def _drop(self, connection: Connection) -> None:
        del self.connections[connection.fd]
        connection.sock.close()


# --- The report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """What one group of processes spent on the window."""

    cpu_s: float
    cores: float
    us_per_token: float
    us_per_request: float
    kernel_us_per_token: float
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Report:
    """One measured window."""

    concurrency: int
    window_s: float
    answers: int
    bad: int
    bad_example: str
    unanswered: int
    tokens: float
    """Token events of the window, scaled by how many tokens `usage` counted per event in whole answers."""
    requests: float
    tokens_per_s: float
    requests_per_s: float
    tokens_per_receive: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    latency_ms: dict[str, float]
    costs: dict[str, Cost]
    own_us_per_token: float
    own_cores: float
    noise: float
    """Cores that other processes used meanwhile."""

    @classmethod
    def of(cls, load: Load, tally: Tally, before: Snapshot, after: Snapshot, unanswered: int) -> "Report":
        """Requests that cross an edge of the window count by the tokens that fell inside it."""
        window_s = after.at - before.at
        if tally.answered_events:
            tokens = tally.events * tally.completion_tokens / tally.answered_events
        else:
            tokens = float(tally.completion_tokens)
        requests = tokens * tally.answers / tally.completion_tokens if tally.completion_tokens else 0.0
        own_s = after.own_cpu_s - before.own_cpu_s
        others_s = sum(max(cpu_s - before.others.get(pid, cpu_s), 0.0) for pid, cpu_s in after.others.items())
        costs = {}
        for name, end in after.groups.items():
            cpu_s = end.cpu_s - before.groups[name].cpu_s
            costs[name] = Cost(
                cpu_s=cpu_s,
                cores=cpu_s / window_s,
                us_per_token=_ratio(cpu_s * 1e6, tokens),
                us_per_request=_ratio(cpu_s * 1e6, requests),
                kernel_us_per_token=_ratio((end.kernel_s - before.groups[name].kernel_s) * 1e6, tokens),
                rss_mib=end.rss_bytes / 2**20,
            )
        return cls(
            concurrency=load.concurrency,
            window_s=window_s,
            answers=tally.answers,
            bad=tally.bad,
            bad_example=tally.bad_example,
            unanswered=unanswered,
            tokens=tokens,
            requests=requests,
            tokens_per_s=tokens / window_s,
            requests_per_s=requests / window_s,
            tokens_per_receive=_ratio(tally.events, tally.receives),
            ttft_ms=quantiles(tally.ttft_s),
            itl_ms=quantiles(tally.gaps_s, tally.gaps_zero),
            latency_ms=quantiles(tally.latency_s),
            costs=costs,
            own_us_per_token=_ratio(own_s * 1e6, tokens),
            own_cores=own_s / window_s,
            noise=others_s / window_s,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def quantiles(values_s: Sequence[float], zeros: int = 0) -> dict[str, float]:
    """Return mean, p50, p90, p99 and max in milliseconds; `zeros` is a number of additional values of zero."""
    ordered = sorted(values_s)
    total = len(ordered) + zeros
    if not total:
        return {}

    def at(share: float) -> float:
        rank = min(int(share * total), total - 1) - zeros
        return ordered[rank] * 1e3 if rank >= 0 else 0.0

    return {
        "mean": sum(ordered) * 1e3 / total,
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": ordered[-1] * 1e3 if ordered else 0.0,
    }


# --- Requests and the command --------------------------------------------------------------------------------------

NONCE_MARK = "\x00"  # Escaped by JSON to six characters that no prompt holds.


def build_requests(
    load: Load,
    model: str,
    prompts: Sequence[str],
    words: Sequence[str],
    extra: Mapping[str, Any] | None = None,
    *,
    is_stream: bool = True,
) -> Requests:
    """A pool with one request for each prompt; each prompt begins with its nonce."""
    pool = []
    for prompt in prompts:
        text = NONCE_MARK + prompt
        body: dict[str, Any] = {"model": model}
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if load.completion_tokens:
            body["max_tokens"] = load.completion_tokens
        if load.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        head, tail = (part.encode() for part in json.dumps(body | dict(extra or {})).split("\\u0000"))
        pool.append((head, tail))
    encoded = [json.dumps(word)[1:-1].encode() for word in words]
    lengths = {len(word) for word in encoded}
    if len(lengths) != 1:
        raise ConfigError("the words of a nonce must have one length: Content-Length is written once for each prompt")
    requests = Requests([], encoded)
    nonce_bytes = lengths.pop() * requests.nonce_words
    requests.pool = [(_http_head(load, len(head) + nonce_bytes + len(tail)) + head, tail) for head, tail in pool]
    return requests


def _http_head(load: Load, length: int) -> bytes:
    lines = [
        f"POST {load.path} HTTP/1.1",
        f"Host: {load.host}:{load.port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def measure(load: Load, requests: Requests, groups: Mapping[str, Sequence[int]]) -> Report:
    """Runs one load. Raises `ConnectionError` when the server cannot be reached or keeps breaking off."""
    return ClosedLoop(load, requests.next, groups).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenConfig:
    """Load an OpenAI-compatible server and report its speed, and the processor time of the processes named."""

    url: str = option("http://127.0.0.1:8000", "url", None, "Server to load")
    model: str = option("bench", "--model", None, "Served model name")
    tokenizer: str = option("", "--tokenizer", None, "Model directory; without it the benchmark's own is used")
    concurrency: int = option(64, "--concurrency", None, "Requests in flight", aliases=("-c",))
    prompt_tokens: int = option(512, "--prompt-tokens", None, "Tokens of each prompt, template included")
    output_tokens: int = option(128, "--output-tokens", None, "Tokens of each answer")
    warmup: float = option(2.0, "--warmup", None, "Seconds before the window")
    window: float = option(8.0, "--window", None, "Seconds measured")
    completions: bool = option(False, "--completions", None, "Use /v1/completions instead of chat")
    quickack: bool = option(True, "--quickack", None, "Acknowledge every packet at once")
    watch: list[str] = option([], "--watch", None, "Processes to account for, as NAME:PID[+PID]; commas between names")

    def __post_init__(self) -> None:
        for entry in self.watch:
            name, colon, pids = entry.partition(":")
            if not (name and colon and all(pid.isdigit() for pid in pids.split("+"))):
                raise ConfigError(f"--watch {entry}: expected NAME:PID[+PID]")

    def load(self) -> Load:
        address = urllib.parse.urlsplit(self.url)
        return Load(
            host=address.hostname or "127.0.0.1",
            port=address.port or 80,
            concurrency=self.concurrency,
            path="/v1/completions" if self.completions else "/v1/chat/completions",
            warmup_s=self.warmup,
            window_s=self.window,
            is_quickack=self.quickack,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
        )

    def groups(self) -> dict[str, list[int]]:
        named = (entry.partition(":") for entry in self.watch)
        return {name: [int(pid) for pid in pids.split("+")] for name, _, pids in named}


def main() -> int:
    import dataclasses

    from benchmarks.corpus import bench_model, read_prompts

    config = load(LoadgenConfig, sys.argv[1:], prog="python -m benchmarks.loadgen")
    request_load = config.load()
    prompts = read_prompts(config.tokenizer or bench_model(), config.prompt_tokens, is_chat=not config.completions)
    requests = build_requests(request_load, config.model, prompts.texts, prompts.words)
    report = measure(request_load, requests, config.groups())
    print(json.dumps(dataclasses.asdict(report), indent=2))
    return 1 if report.bad or not report.answers else 0


if __name__ == "__main__":
    exit_on_config_error(main)
