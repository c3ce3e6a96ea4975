"""Floods: token delays of other clients while one client sends the largest possible requests.

    python -m benchmarks.floods [--quick] [--attacks WORD] [--router-mode kv]

One stream gets a token every 20 ms from the metronome. Each attack of `floods_attacks` is sent repeatedly for some
seconds. Every token is timed from the engine's write to the client's read by one clock. A probe on the frontend's event
loop (`floods_frontend`) separates delays that this frontend computes from those of the machine's other load: the latter
use no processor time of the frontend. The limit of 50 ms applies to the 99th percentile of the tokens.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from benchmarks.corpus import bench_model, read_prompts
from benchmarks.floods_attacks import Attack, large_requests
from benchmarks.floods_bombs import bombs
from benchmarks.floods_connections import ConnectionAttacks, connection_attacks
from benchmarks.floods_endpoints import endpoint_attacks
from benchmarks.floods_frontend import STACKS_VARIABLE, VARIABLE, LoopLag, read_lags
from benchmarks.floods_send import Shot
from benchmarks.loadgen import Load, build_requests, quantiles
from benchmarks.long_context import INTERVAL_MS, METRONOME, SHORT_PROMPT_TOKENS, Stream, delays_s
from benchmarks.metronome import read_beats
from benchmarks.report import guarded, number, print_line, table, write_result
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "floods_frontend.py")
LIMIT_MS = 50.0
CONTEXT_LENGTH = 1 << 21  # Requests are refused for their size, not for the model's context length.
ROUNDS_MIN = 2
STREAM_TOKENS = 1_000_000
SETTLE_S = 0.3  # Pause after an attack, so that its end is attributed to it.


AnyAttack = Attack | ConnectionAttacks


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodsConfig:
    """Delay of other clients' tokens by the largest possible requests."""

    quick: bool = option(False, "--quick", None, "Each attack once, and no results file")
    attacks: str = option("", "--attacks", None, "Regular expression that selects attacks by name")
    stacks: str = option("", "--stacks", None, "File to append the frontend's stacks to, at each delay above 30 ms")
    router_mode: str = option("kv", "--router-mode", None, "Router mode of the frontend: round-robin or kv")

    def __post_init__(self) -> None:
        if self.router_mode not in ("round-robin", "kv"):
            raise ConfigError(f"--router-mode {self.router_mode}: must be round-robin or kv")

    @property
    def phase_s(self) -> float:
        return 0.1 if self.quick else 2.0

    def selected(self) -> list[AnyAttack]:
        """Return the attacks to run. Raises `ConfigError` without any."""
        found = [one for one in all_attacks() if re.search(self.attacks, one.name)]
        if not found:
            raise ConfigError(f"--attacks {self.attacks}: must match the name of an attack")
        return found


@dataclass(frozen=True, slots=True)
class FloodEffect:
    """Effect of one attack: delays of the stream's tokens and of the frontend's loop in milliseconds."""

    status: int
    answer: str
    requests: int
    request_ms: float
    tokens: dict[str, float]
    loop: dict[str, float]
    loop_computed: dict[str, float]
    """The part of the loop's delays in which the frontend computed."""

    @property
    def is_within(self) -> bool:
        return self.tokens.get("p99", 0.0) <= LIMIT_MS


def all_attacks() -> Iterator[AnyAttack]:
    """Yield every attack; those that read what others have left behind come last."""
    yield from large_requests()
    yield from bombs()
    yield from connection_attacks()
    yield from endpoint_attacks()


def volley(port: int, shot: Shot, clients: int) -> tuple[int, str]:
    """Make an attack with so many clients at the same time; return the result of the first."""
    if clients == 1:
        return shot(port)
    with ThreadPoolExecutor(clients) as pool:
        return next(iter(pool.map(shot, [port] * clients)))  # Leaving the pool waits for all.


class Bench:
    """One frontend, one stream, and one attack after the other."""

    def __init__(self, config: FloodsConfig) -> None:
        self.config = config
        self.model = bench_model()
        self.short = read_prompts(self.model, SHORT_PROMPT_TOKENS)

    def run(self) -> dict[str, FloodEffect]:
        """Return the effect of every attack, and of none under the name `none`."""
        with tempfile.TemporaryDirectory() as folder:
            beats, lags = os.path.join(folder, "beats"), os.path.join(folder, "lags")
            recipe = Recipe(
                name="floods", frontend=ours(), engine=ours(), program=METRONOME, frontend_program=PROGRAM,
                engine_flags=["--interval-ms", f"{INTERVAL_MS:g}", "--beats", beats, "--context-length", str(CONTEXT_LENGTH)],
                router_mode=self.config.router_mode, frontend_flags=["--enable-anthropic-api", "--batch-dir", os.path.join(folder, "batches")],
                variables=self._variables(lags),
            )  # fmt: skip
            with Stack(recipe, self.model) as stack:
                work = Load(host=HOST, port=stack.port, concurrency=1, completion_tokens=STREAM_TOKENS)
                stream = Stream(stack.port, build_requests(work, MODEL_NAME, self.short.texts, self.short.words).next())
                stream.start()
                time.sleep(1.0)
                found: dict[str, FloodEffect] = {}
                windows = [self._alone()]
                for attack in self.config.selected():
                    windows.append(self._attack(stack, attack))
                    seen = delays_s(list(read_beats(beats)), stream.arrivals)
                    probes = list(read_lags(lags))
                    for window in windows:
                        found[window.name] = effect(window, seen, probes)
                        print_line(line(window.name, found[window.name]))
                    windows.clear()
                    if not stream.is_alive():
                        raise ConnectionError(f"the stream ended: status {stream.status}\n{stack.logs()}")
                stream.leave()
        return found

    def _variables(self, lags: str) -> dict[str, str]:
        stacks = {STACKS_VARIABLE: os.path.abspath(self.config.stacks)} if self.config.stacks else {}
        return {VARIABLE: lags, **stacks}

    def _alone(self) -> "Window":
        since = time.perf_counter()
        time.sleep(self.config.phase_s)
        return Window("none", since, time.perf_counter(), 200, "", [])

    def _attack(self, stack: Stack, attack: AnyAttack) -> "Window":
        shot = attack.prepare()
        took: list[float] = []
        since = time.perf_counter()
        while len(took) < (1 if self.config.quick else ROUNDS_MIN) or time.perf_counter() < since + self.config.phase_s:
            began = time.perf_counter()
            status, answer = volley(stack.port, shot, attack.clients)
            took.append(time.perf_counter() - began)
        time.sleep(SETTLE_S)
        return Window(attack.name, since, time.perf_counter(), status, answer, took)


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which one attack was made."""

    name: str
    since_s: float
    until_s: float
    status: int
    answer: str
    took_s: Sequence[float]


def effect(window: Window, seen: Sequence[tuple[float, float]], lags: Sequence[LoopLag]) -> FloodEffect:
    """Return what was seen within a window."""
    inside = [one for one in lags if window.since_s <= one.at_s < window.until_s]
    return FloodEffect(
        status=window.status,
        answer=window.answer[:300],
        requests=len(window.took_s),
        request_ms=sum(window.took_s) / max(len(window.took_s), 1) * 1e3,
        tokens=quantiles([late for at, late in seen if window.since_s <= at < window.until_s]),
        loop=quantiles([one.late_s for one in inside]),
        loop_computed=quantiles([one.computed_s for one in inside]),
    )


def line(name: str, one: FloodEffect) -> str:
    """Return one line for one attack."""
    mark = "" if one.is_within else "  ABOVE THE LIMIT"
    return (
        f"  {name:<40} {one.status:3} {one.requests:4} x {one.request_ms:7.0f} ms  tokens p99 {one.tokens.get('p99', 0):6.1f}"
        f" max {one.tokens.get('max', 0):6.1f}  loop max {one.loop.get('max', 0):6.1f}"
        f" computed {one.loop_computed.get('max', 0):6.1f}{mark}"
    )


def markdown(found: Mapping[str, FloodEffect]) -> str:
    """Return a table of all attacks."""
    head = ["request", "status", "each, ms", "token p99 ms", "token max ms", "loop blocked, max ms", "of it computed"]
    rows = [
        [
            name, str(one.status) if one.requests else "", number(one.request_ms) if one.requests else "",
            number(one.tokens["p99"]), number(one.tokens["max"]), number(one.loop["max"]), number(one.loop_computed["max"]),
        ]
        for name, one in found.items()
    ]  # fmt: skip
    return table(head, rows)


def main() -> int:
    config = load(FloodsConfig, sys.argv[1:], prog="python -m benchmarks.floods")
    found = Bench(config).run()
    whole = not config.quick and not config.attacks
    kept = {
        "router_mode": config.router_mode,
        "limit_ms": LIMIT_MS,
        "attacks": {n: asdict(e) for n, e in found.items()},
    }
    path = write_result("floods", kept, is_whole=whole)
    above = [name for name, one in found.items() if not one.is_within]
    print_line(f"\n{markdown(found)}\n\nabove {LIMIT_MS:.0f} ms: {', '.join(above) or 'none'}; written to {path}")
    return 1 if above else 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
