"""Long context: token delays of other clients while prompts of 32,000 tokens are prepared.

    python -m benchmarks.long_context [--quick]

One stream gets a token every 20 ms from the metronome (`metronome.py`, the same engine for both frontends). Its tokens
are timed from the engine's write to the client's read by one clock: first alone, then while new prompts of 32,000
tokens arrive in sequence. The effect of long prompts is the difference of the 99th percentiles. The engine's own delay,
when such a prompt arrives, precedes its write and is not included.
"""

import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.corpus import bench_model, read_prompts
from benchmarks.loadgen import MARKERS, Load, Requests, build_requests, quantiles, read_head
from benchmarks.metronome import Beat, read_beats
from benchmarks.report import OURS, THEIRS, guarded, implementations, number, print_line, ratio, table, write_result
from benchmarks.stacks import HOST, MODEL_NAME, Implementation, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

METRONOME = os.path.join(os.path.dirname(os.path.abspath(__file__)), "metronome.py")
INTERVAL_MS = 20.0
LONG_PROMPTS = 24  # Each is repeated with another nonce.
LONG_OUTPUT_TOKENS = 2
SHORT_PROMPT_TOKENS = 64
PAUSE_S = 0.05  # Between the end of a long prompt's response and the next one.
ANSWER_TIMEOUT_S = 60.0
RECEIVE_BYTES = 65536
WARM_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongConfig:
    """Effect of long prompts on other clients, in our frontend and in the released one."""

    quick: bool = option(False, "--quick", None, "Shorter phases, and no results file: under a minute")
    prompt_tokens: int = option(32_000, "--prompt-tokens", None, "Tokens of the long prompts")

    def __post_init__(self) -> None:
        if self.prompt_tokens < SHORT_PROMPT_TOKENS:
            raise ConfigError(f"--prompt-tokens: expected at least {SHORT_PROMPT_TOKENS}")

    @property
    def phase_s(self) -> float:
        return 6.0 if self.quick else 20.0


@dataclass(frozen=True, slots=True)
class Delays:
    """Token delays of one frontend's stream in milliseconds, alone and during long prompts."""

    alone: dict[str, float]
    loaded: dict[str, float]
    long_prompts: int
    long_ms: dict[str, float]
    """Duration of the long prompts."""

    @property
    def added_p99_ms(self) -> float:
        return self.loaded["p99"] - self.alone["p99"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Number of tokens read at one time."""

    at_s: float
    tokens: int


def delays_s(beats: Sequence[Beat], arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    """Return the engine's write time of each token, and the delay until the client's read.

    The stream has a token at every tick. Its first token belongs to the last tick before its read.
    """
    if not arrivals:
        return []
    first = max((place for place, beat in enumerate(beats) if beat.written_s <= arrivals[0].at_s), default=0)
    read_at = [arrival.at_s for arrival in arrivals for _ in range(arrival.tokens)]
    return [(beat.written_s, at_s - beat.written_s) for beat, at_s in zip(beats[first:], read_at, strict=False)]


class Stream(threading.Thread):
    """Streamed response, timed token by token."""

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__(daemon=True)
        self.arrivals: list[Arrival] = []
        self.status = 0
        self._port, self._request = port, request
        self._is_wanted = True

    def run(self) -> None:
        marker = MARKERS["/v1/chat/completions"]
        with socket.create_connection((HOST, self._port), timeout=ANSWER_TIMEOUT_S) as sock:
            sock.sendall(self._request)
            data = b""
            while self._is_wanted and (got := sock.recv(RECEIVE_BYTES)):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                now = time.perf_counter()
                self.status = self.status or read_head(got)[0]
                data = data[-(len(marker) + 1) :] + got
                tokens = data.count(marker) - data.count(marker + b'"')
                data = data[data.rfind(b"\n") + 1 :]
                if tokens:
                    self.arrivals.append(Arrival(now, tokens))

    def leave(self) -> None:
        self._is_wanted = False
        self.join(ANSWER_TIMEOUT_S)


def send_request(port: int, request: bytes) -> float:
    """Return the seconds of one response. Raises `ConnectionError` if it is not a success."""
    began = time.perf_counter()
    with socket.create_connection((HOST, port), timeout=ANSWER_TIMEOUT_S) as sock:
        sock.sendall(request)
        data = b""
        while b"data: [DONE]" not in data[-64:]:
            got = sock.recv(RECEIVE_BYTES)
            if not got or (not data and read_head(got)[0] != 200):
                raise ConnectionError((data + got)[:500].decode(errors="replace"))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            data += got
    return time.perf_counter() - began


class Bench:
    """Prompts of the benchmark, and its measurements of each frontend."""

    def __init__(self, config: LongConfig) -> None:
        self.config = config
        self.model = bench_model()
        self.long = read_prompts(self.model, config.prompt_tokens, count=LONG_PROMPTS)
        self.short = read_prompts(self.model, SHORT_PROMPT_TOKENS)

    def requests(self, port: int, texts: Sequence[str], words: Sequence[str], tokens: int) -> Requests:
        work = Load(host=HOST, port=port, concurrency=1, completion_tokens=tokens)
        requests = build_requests(work, MODEL_NAME, texts, words)
        requests.count = random.randrange(2**31)
        return requests

    def look(self, name: str, implementation: Implementation) -> Delays:
        phase_s = self.config.phase_s
        with tempfile.TemporaryDirectory() as folder:
            beats = os.path.join(folder, "beats")
            flags = ["--interval-ms", f"{INTERVAL_MS:g}", "--beats", beats]
            recipe = Recipe(name=name, frontend=implementation, engine=ours(), program=METRONOME, engine_flags=flags)
            with Stack(recipe, self.model) as stack:
                long = self.requests(stack.port, self.long.texts, self.long.words, LONG_OUTPUT_TOKENS)
                send_request(stack.port, long.next())  # Warm up everything that the first request creates.
                time.sleep(4 * INTERVAL_MS / 1e3)
                tokens = int((WARM_S + 2 * phase_s + ANSWER_TIMEOUT_S) / INTERVAL_MS * 1e3)
                short = self.requests(stack.port, self.short.texts, self.short.words, tokens)
                stream = Stream(stack.port, short.next())
                stream.start()
                time.sleep(WARM_S)
                alone_from = time.perf_counter()
                time.sleep(phase_s)
                loaded_from, took = time.perf_counter(), []
                while time.perf_counter() < loaded_from + phase_s:
                    took.append(send_request(stack.port, long.next()))
                    time.sleep(PAUSE_S)
                until = time.perf_counter()
                stream.leave()
                if stream.status != 200 or stream.arrivals[-1].at_s < until - 1:
                    raise ConnectionError(f"the stream broke off: status {stream.status}\n{stack.logs()}")
            seen = delays_s(list(read_beats(beats)), stream.arrivals)
        found = Delays(
            alone=quantiles([late for at, late in seen if alone_from <= at < loaded_from]),
            loaded=quantiles([late for at, late in seen if loaded_from <= at < until]),
            long_prompts=len(took),
            long_ms=quantiles(took),
        )
        print_line(
            f"  {name}: p99 {number(found.alone['p99'])} ms alone, {number(found.loaded['p99'])} during {len(took)} prompts"
        )
        return found


def markdown(found: Mapping[str, Delays], prompt_tokens: int) -> str:
    """Return both results, with the ratio of ours to theirs."""
    head = [
        "frontend", "alone p50 / p99 ms", f"during prompts of {prompt_tokens:,} p50 / p99 ms", "max ms", "added p99 ms",
        "long prompts", "each p50 ms",
    ]  # fmt: skip
    rows = [
        [
            name, f"{number(one.alone['p50'])} / {number(one.alone['p99'])}",
            f"{number(one.loaded['p50'])} / {number(one.loaded['p99'])}", number(one.loaded["max"]),
            number(one.added_p99_ms), str(one.long_prompts), number(one.long_ms["p50"]),
        ]
        for name, one in found.items()
    ]  # fmt: skip
    if OURS in found and THEIRS in found:
        mine, other = found[OURS], found[THEIRS]
        added, each = ratio(mine.added_p99_ms, other.added_p99_ms), ratio(mine.long_ms["p50"], other.long_ms["p50"])
        rows.append(["**ours/theirs**", "", "", "", added, "", each])
    return table(head, rows)


def main() -> int:
    config = load(LongConfig, sys.argv[1:], prog="python -m benchmarks.long_context")
    print_line("preparing the prompts (kept for the next run)")
    bench = Bench(config)
    found = {name: bench.look(name, implementation) for name, implementation in implementations().items()}
    whole = not config.quick and THEIRS in found
    kept = {name: asdict(one) | {"added_p99_ms": one.added_p99_ms} for name, one in found.items()}
    path = write_result("long_context", {"prompt_tokens": config.prompt_tokens, **kept}, is_whole=whole)
    print_line(f"\n{markdown(found, config.prompt_tokens)}\n\nwritten to {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
