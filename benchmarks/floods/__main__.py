"""Floods: token delays of other clients while one client sends the largest possible requests.

    python -m benchmarks.floods [--quick] [--attacks WORD] [--surfaces http,tls,kserve] [--router-mode kv]

One stream gets a token every 20 ms from the metronome. Each attack of `floods.surfaces` is repeated for half a second.
Every token is timed from the engine's write to the client's read by one clock. The limit of 50 ms applies to the 99th
percentile of a window, which for windows of less than 100 tokens is the longest delay.

Two things separate this frontend's delays from those of the machine's other load: a probe on the frontend's event loop
(`floods.frontend`) records the processor time within each delay, and windows without an attack are measured in the same run.
An attack above the limit is made twice more, and the median counts.
"""

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.corpus import ROOT, bench_model, read_prompts
from benchmarks.floods.attacks import AnyAttack
from benchmarks.floods.frontend import STACKS_VARIABLE, VARIABLE, LoopLag
from benchmarks.floods.records import RecordFile, StreamClient, TokenDelays, delays_of, lag_file, read_lags
from benchmarks.floods.send import Shot
from benchmarks.floods.surfaces import SURFACES, Surface
from benchmarks.loadgen import Load, build_requests, quantiles
from benchmarks.long_context import INTERVAL_MS, METRONOME, SHORT_PROMPT_TOKENS
from benchmarks.report import guarded, number, print_line, table, write_result
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "frontend.py")
LIMIT_MS = 50.0
CONTEXT_LENGTH = 1 << 21  # Requests are refused for their size, not for the model's context length.
WINDOW_S = 0.5
STREAM_TOKENS = 1_000_000
STREAM_START_S = 1.0
SETTLE_S = 0.15  # Pause after an attack, so that its end is attributed to it.
CONTROL_EVERY = 8  # Attacks between two windows without an attack.
REPEATS = 2  # Of an attack above the limit.
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodsConfig:
    """Delay of other clients' tokens by the largest possible requests."""

    quick: bool = option(False, "--quick", None, "Each attack once, and no results file")
    attacks: str = option("", "--attacks", None, "Regular expression that selects attacks by name")
    surfaces: list[str] = option([], "--surfaces", None, "Listeners to attack: http, tls, kserve; default all")
    stacks: str = option(
        "", "--stacks", None, "File to append the frontend's stacks to, while its loop is late by more than 30 ms"
    )
    limit_s: float = option(0.0, "--limit-s", None, "Seconds after which no further attack is made; 0: no limit")
    router_mode: str = option("kv", "--router-mode", None, "Router mode of the frontend: round-robin or kv")

    def __post_init__(self) -> None:
        if self.router_mode not in ("round-robin", "kv"):
            raise ConfigError(f"--router-mode {self.router_mode}: must be round-robin or kv")
        if not self.limit_s >= 0:
            raise ConfigError(f"--limit-s {self.limit_s}: must be at least 0")
        names = [kind.name for kind in SURFACES]
        if unknown := sorted(set(self.surfaces) - set(names)):
            raise ConfigError(f"--surfaces {','.join(unknown)}: must be among {', '.join(names)}")

    @property
    def window_s(self) -> float:
        """Seconds for which an attack is repeated."""
        return 0.0 if self.quick else WINDOW_S

    def chosen(self) -> list[type[Surface]]:
        """Return the listeners to attack."""
        return [kind for kind in SURFACES if not self.surfaces or kind.name in self.surfaces]

    def selected(self, surface: Surface) -> list[AnyAttack]:
        """Return the attacks to make on a listener."""
        return [one for one in surface.attacks() if re.search(self.attacks, one.name)]


@dataclass(frozen=True, slots=True)
class FloodEffect:
    """Effect of one attack: delays of the stream's tokens and of the frontend's loop in milliseconds."""

    status: int
    answer: str
    requests: int
    request_ms: float
    cpu_ms: float
    """Processor time of the frontend in the window, in all of its threads."""
    tokens: dict[str, float]
    loop: dict[str, float]
    computed_ms: float
    """Longest delay of the loop in which the frontend computed, in any thread."""
    on_loop_ms: float
    """Longest piece of work of the loop's thread."""
    control_ms: float = 0.0
    """The longest token delay of the windows without an attack before it."""
    repeats_p99_ms: list[float] = field(default_factory=list)
    """The 99th percentiles of the tokens each time that the attack was made, if it was repeated."""

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of the tokens."""
        return self.tokens.get("p99", 0.0)

    @property
    def is_within(self) -> bool:
        """Whether the limit holds."""
        return self.p99_ms <= LIMIT_MS

    @property
    def is_ours(self) -> bool:
        """Whether the frontend computed for the limit's time, so that the machine's load is not the reason."""
        return self.computed_ms > LIMIT_MS


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which one attack was made."""

    name: str
    since_s: float
    until_s: float
    status: int
    answer: str
    took_s: Sequence[float]


def volley(port: int, shot: Shot, clients: int) -> tuple[int, str]:
    """Make an attack with so many clients at the same time; return the result of the first."""
    if clients == 1:
        return shot(port)
    with ThreadPoolExecutor(clients) as pool:
        return next(iter(pool.map(shot, [port] * clients)))  # Leaving the pool waits for all.


class Bench:
    """One frontend for each listener, one stream, and one attack after the other."""

    def __init__(self, config: FloodsConfig) -> None:
        self.config = config
        self.model = bench_model()
        self.short = read_prompts(self.model, SHORT_PROMPT_TOKENS)

    def run(self) -> tuple[dict[str, FloodEffect], int]:
        """Return the effect of every attack, and of none on each listener as `none, LISTENER`; and the number of attacks not made.

        With a time limit each listener gets a share by its number of attacks. Raise `ConfigError` if there is none.
        """
        found: dict[str, FloodEffect] = {}
        not_made = 0
        with tempfile.TemporaryDirectory() as folder:
            chosen = [kind(os.path.join(folder, kind.name)) for kind in self.config.chosen()]
            plan = [(surface, attacks) for surface in chosen if (attacks := self.config.selected(surface))]
            left = sum(len(attacks) for _, attacks in plan)
            end_s = time.perf_counter() + (self.config.limit_s or math.inf)
            for surface, attacks in plan:
                os.mkdir(surface.folder)
                now = time.perf_counter()
                until_s = now + (end_s - now) * len(attacks) / left
                effects = self._attack_all(surface, attacks, until_s)
                found |= effects
                left -= len(attacks)
                not_made += sum(one.name not in effects for one in attacks)
        if not found:
            raise ConfigError(f"--attacks {self.config.attacks}: must match the name of an attack")
        return found, not_made

    def _attack_all(self, surface: Surface, attacks: Sequence[AnyAttack], until_s: float) -> dict[str, FloodEffect]:
        beats, lags, arrivals = (os.path.join(surface.folder, name) for name in ("beats", "lags", "arrivals"))
        recipe = Recipe(
            name="floods", frontend=ours(), engine=ours(), program=METRONOME, frontend_program=PROGRAM,
            engine_flags=["--interval-ms", f"{INTERVAL_MS:g}", "--beats", beats, "--context-length", str(CONTEXT_LENGTH)],
            router_mode=self.config.router_mode, frontend_flags=surface.flags(), variables=self._variables(lags),
        )  # fmt: skip
        with ExitStack() as stack:
            running = stack.enter_context(surface.stack(recipe, self.model))
            work = Load(host=HOST, port=running.port, concurrency=1, completion_tokens=STREAM_TOKENS)
            request = build_requests(work, MODEL_NAME, self.short.texts, self.short.words).next()
            client = stack.enter_context(surface.stream(running.port, request, arrivals))
            time.sleep(STREAM_START_S)
            run = SurfaceRun(running, client, delays_of(beats, arrivals), lag_file(lags), self.config.window_s)
            return run.attack_all(surface.name, attacks, until_s)

    def _variables(self, lags: str) -> dict[str, str]:
        stacks = {STACKS_VARIABLE: os.path.abspath(self.config.stacks)} if self.config.stacks else {}
        return {VARIABLE: lags, "PYTHONPATH": ROOT, **stacks}


class SurfaceRun:
    """Attacks on one running frontend."""

    def __init__(
        self, stack: Stack, client: StreamClient, delays: TokenDelays, lags: RecordFile, window_s: float
    ) -> None:
        self._stack = stack
        self._client = client
        self._delays = delays
        self._lags = lags
        self._window_s = window_s

    def attack_all(self, surface: str, attacks: Sequence[AnyAttack], until_s: float) -> dict[str, FloodEffect]:
        """Return the effect of each attack that begins before `until_s`. Raise `ConnectionError` if the stream ends."""
        found: dict[str, FloodEffect] = {}
        controls: list[FloodEffect] = []
        for place, attack in enumerate(attacks):
            if place and time.perf_counter() >= until_s:
                break
            if place % CONTROL_EVERY == 0:
                controls.append(self._effect(self._alone()))
            shot = attack.prepare()
            one = self._effect(self._attack(attack, shot), controls[-1])
            if not one.is_within:
                again = [self._effect(self._attack(attack, shot), controls[-1]) for _ in range(REPEATS)]
                one = median_of([one, *again])
            found[attack.name] = one
            print_line(line(attack.name, one))
        return {f"{NONE}, {surface}": worst_of(controls), **found}

    def _alone(self) -> Window:
        since = time.perf_counter()
        time.sleep(WINDOW_S)
        return Window(NONE, since, time.perf_counter(), 200, "", [])

    def _attack(self, attack: AnyAttack, shot: Shot) -> Window:
        took: list[float] = []
        since = time.perf_counter()
        while not took or time.perf_counter() < since + self._window_s:
            began = time.perf_counter()
            status, answer = volley(self._stack.port, shot, attack.clients)
            took.append(time.perf_counter() - began)
        time.sleep(SETTLE_S)
        return Window(attack.name, since, time.perf_counter(), status, answer, took)

    def _effect(self, window: Window, control: FloodEffect | None = None) -> FloodEffect:
        time.sleep(INTERVAL_MS / 1e3)  # The last tokens of the window arrive.
        one = effect(window, list(self._delays.new()), read_lags(self._lags), control)
        if not self._client.is_alive:
            raise ConnectionError(f"the stream ended during {window.name}\n{self._stack.logs()}")
        return one


def effect(
    window: Window, seen: Sequence[tuple[float, float]], lags: Sequence[LoopLag], control: FloodEffect | None = None
) -> FloodEffect:
    """Return what was seen within a window."""
    inside = [one for one in lags if window.since_s <= one.at_s < window.until_s]
    return FloodEffect(
        status=window.status,
        answer=window.answer[:300],
        requests=len(window.took_s),
        request_ms=sum(window.took_s) / max(len(window.took_s), 1) * 1e3,
        cpu_ms=sum(one.process_s for one in inside) * 1e3,
        tokens=quantiles([late for at, late in seen if window.since_s <= at < window.until_s]),
        loop=quantiles([one.late_s for one in inside]),
        computed_ms=max((one.computed_s for one in inside), default=0.0) * 1e3,
        on_loop_ms=max((one.on_loop_s for one in inside), default=0.0) * 1e3,
        control_ms=0.0 if control is None else control.tokens.get("max", 0.0),
    )


def median_of(effects: Sequence[FloodEffect]) -> FloodEffect:
    """Return the effect with the median delay of the tokens, and the delays of all."""
    by_delay = sorted(effects, key=lambda one: one.p99_ms)
    one = by_delay[len(by_delay) // 2]
    return FloodEffect(**{**asdict(one), "repeats_p99_ms": [each.p99_ms for each in effects]})


def worst_of(controls: Sequence[FloodEffect]) -> FloodEffect:
    """Return the window without an attack that had the longest delay of a token."""
    return max(controls, key=lambda one: one.tokens.get("max", 0.0))


def line(name: str, one: FloodEffect) -> str:
    """Return one line for one attack."""
    mark = "" if one.is_within else "  ABOVE THE LIMIT" if one.is_ours else "  above the limit, by the machine's load"
    return (
        f"  {name:<44} {one.status:3} {one.requests:4} x {one.request_ms:7.0f} ms  tokens p99 {one.p99_ms:6.1f}"
        f" (without {one.control_ms:5.1f})  loop max {one.loop.get('max', 0):6.1f} computed {one.computed_ms:6.1f}"
        f" in one piece {one.on_loop_ms:6.1f}  cpu {one.cpu_ms:6.0f}{mark}"
    )


def markdown(found: Mapping[str, FloodEffect]) -> str:
    """Return a table of all attacks."""
    head = [
        "request", "status", "each, ms", "token p99 ms", "without, ms", "loop blocked, max ms", "of it computed",
        "longest work on the loop, ms", "CPU, ms",
    ]  # fmt: skip
    rows = [
        [
            name, str(one.status) if one.requests else "", number(one.request_ms) if one.requests else "",
            number(one.p99_ms), number(one.control_ms), number(one.loop.get("max", 0.0)), number(one.computed_ms),
            number(one.on_loop_ms), number(one.cpu_ms),
        ]
        for name, one in found.items()
    ]  # fmt: skip
    return table(head, rows)


def summary(found: Mapping[str, FloodEffect]) -> dict[str, float]:
    """Return the figures of the whole run."""
    attacks = [one for name, one in found.items() if not name.startswith(NONE)]
    delays = [one.p99_ms for one in attacks]
    return {
        "attacks": len(attacks),
        "within": sum(one.is_within for one in attacks),
        "above_by_machine": sum(not one.is_within and not one.is_ours for one in attacks),
        "above": sum(not one.is_within and one.is_ours for one in attacks),
        "median_p99_ms": statistics.median(delays),
        "worst_p99_ms": max(delays),
        "worst_on_loop_ms": max(one.on_loop_ms for one in attacks),
        "worst_control_ms": max(one.tokens.get("max", 0.0) for name, one in found.items() if name.startswith(NONE)),
    }


def main() -> int:
    config = load(FloodsConfig, sys.argv[1:], prog="python -m benchmarks.floods")
    found, not_made = Bench(config).run()
    whole = not config.quick and not config.attacks and not config.surfaces and not not_made
    kept = {
        "router_mode": config.router_mode,
        "limit_ms": LIMIT_MS,
        "summary": summary(found),
        "attacks": {n: asdict(e) for n, e in found.items()},
    }
    path = write_result("floods", kept, is_whole=whole)
    above = [name for name, one in found.items() if not one.is_within]
    if not_made:
        print_line(f"\n{not_made} attacks were not made within --limit-s {config.limit_s:g}")
    print_line(f"\n{markdown(found)}\n\nabove {LIMIT_MS:.0f} ms: {', '.join(above) or 'none'}; written to {path}")
    return 1 if any(one.is_ours and not one.is_within for one in found.values()) else 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
