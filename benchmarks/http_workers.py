"""HTTP workers: requests per second of a frontend of several processes, and what they cost the reuse of caches.

    python -m benchmarks.http_workers [--processes 2] [--quick]

*Rate*: short answers at 64 connections, before the same mocker without simulated delays; the released frontend uses its threads on
all cores. Client and mocker share the machine with the frontend. *Cached share*: prompts of many groups with a common prefix,
each request over a connection of its own, which the kernel gives to any process, before four mockers whose caches together
hold all prefixes, and with the KV router. A router that did not know of the others' placements would compute prefixes again.
"""

import contextlib
import http.client
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import Prompts, bench_model, read_prompts
from benchmarks.loadgen import Load, Report, build_requests, measure
from benchmarks.report import THEIRS, guarded, implementations, number, print_line, table, write_result
from benchmarks.stacks import FRONTEND, HOST, MODEL_NAME, Recipe, Stack, ours
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 8
STREAMS = 64
WARMUP_S, WINDOW_S = 1.5, 5.0
GROUPS = 128
WORKERS = 4
BLOCKS = GROUPS * 9 // WORKERS + 400
"""Cache of a mocker: its part of the prefixes in blocks of 64 tokens, and as much for copies and requests in progress."""
AT_ONCE = 16
TURNS_MIN = 3
"""Turns for a mean cached share: one turn deviates by 1 to 2 %, because caches of this size depend on the order of the requests."""
ENGINE_SPEED = 1.0
TIMEOUT_S = READY_S = 30.0
POLL_S = 0.05
LISTENING = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpWorkersBench:
    """Several frontend processes on one port."""

    processes: int = option(2, "--processes", None, "Frontend processes of ours")
    rounds: int = option(5, "--rounds", None, "Turns that all take")
    requests: int = option(1500, "--requests", None, "Requests for the cached share")
    quick: bool = option(False, "--quick", None, "One turn, fewer requests, and no results file")

    def __post_init__(self) -> None:
        if self.processes < 2 or self.rounds < 1 or self.requests < GROUPS:
            raise ConfigError(f"--processes: at least 2; --rounds: at least 1; --requests: at least {GROUPS}")


def recipes(config: HttpWorkersBench) -> dict[str, Recipe]:
    """Return the systems whose rate is measured."""
    found = {
        processes_text(count): Recipe(name=f"ours{count}", frontend=ours(), engine=ours(), frontend_flags=flags(count))
        for count in (1, config.processes)
    }
    named = {f"ours, {name}": recipe for name, recipe in found.items()}
    released = implementations().get(THEIRS)
    return named if released is None else named | {THEIRS: Recipe(name=THEIRS, frontend=released, engine=ours())}


def flags(processes: int) -> list[str]:
    """Return the frontend's flags for so many processes."""
    return ["--http-workers", str(processes)]


def processes_text(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def rates(config: HttpWorkersBench, model: str, prompts: Prompts) -> dict[str, list[Report]]:
    """Return the windows of each system; they take turns."""
    rounds, window_s = (1, 2.0) if config.quick else (config.rounds, WINDOW_S)
    found: dict[str, list[Report]] = {}
    with contextlib.ExitStack() as opened:
        stacks = {name: opened.enter_context(Stack(recipe, model)) for name, recipe in recipes(config).items()}
        for turn in range(rounds):
            for name in list(stacks) if turn % 2 == 0 else reversed(stacks):
                report = window(stacks[name], prompts, window_s)
                found.setdefault(name, []).append(report)
                print_line(
                    f"  turn {turn + 1}, {name}: {number(report.requests_per_s)} requests/s, "
                    f"frontend {report.costs[FRONTEND].cores:.2f} cores, other load {report.noise:.2f}"
                )
    return found


def window(stack: Stack, prompts: Prompts, window_s: float) -> Report:
    """Measure one window."""
    work = Load(
        host=HOST, port=stack.port, concurrency=STREAMS, warmup_s=WARMUP_S, window_s=window_s,
        prompt_tokens=PROMPT_TOKENS, completion_tokens=OUTPUT_TOKENS,
    )  # fmt: skip
    requests = build_requests(work, MODEL_NAME, prompts.texts, prompts.words)
    requests.count = random.randrange(2**31)
    report = measure(work, requests, stack.pids)
    if report.bad:
        raise ConnectionError(f"{report.bad} bad answers: {report.bad_example}\n{stack.logs()}")
    return report


def cached_share(processes: int, requests: int, model: str, prompts: Prompts, seed: int) -> float:
    """Return the share of prompt tokens that were cached, without each group's first request."""
    recipe = Recipe(
        name=f"kv{processes}", frontend=ours(), engine=ours(), speedup=ENGINE_SPEED, workers=WORKERS, router_mode="kv",
        frontend_flags=flags(processes), engine_flags=["--num-gpu-blocks", str(BLOCKS), "--block-size", "64"],
    )  # fmt: skip
    draw = random.Random(seed)
    groups = [*range(GROUPS), *(draw.randrange(GROUPS) for _ in range(requests))]
    bodies = [body(prompts.texts[group], place) for place, group in enumerate(groups)]
    with Stack(recipe, model) as stack, ThreadPoolExecutor(AT_ONCE) as threads:
        wait_for_listeners(stack.port, processes)
        usages = list(threads.map(lambda one: usage_of(stack.port, one), bodies))[GROUPS:]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return float(cached / sum(usage["prompt_tokens"] for usage in usages))


def wait_for_listeners(port: int, count: int) -> None:
    """Wait until so many processes listen on a port. Raise `ConnectionError` after `READY_S`."""
    mark, deadline = f":{port:04X}", time.monotonic() + READY_S
    while time.monotonic() < deadline:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        if sum(words[1].endswith(mark) and words[3] == LISTENING for words in lines) == count:
            return
        time.sleep(POLL_S)
    raise ConnectionError(f"not {count} processes listen on port {port} after {READY_S:.0f} s")


def body(prefix: str, place: int) -> bytes:
    """Return a request of its group's prefix and an end of its own."""
    messages = [{"role": "user", "content": f"{prefix} {place}"}]
    return json.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": OUTPUT_TOKENS}).encode()


def usage_of(port: int, content: bytes) -> dict[str, Any]:
    """Send a request over a connection of its own; return its usage. Raise `ConnectionError`."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    if response.status != 200:
        raise ConnectionError(f"status {response.status}: {answer[:300]!r}")
    usage: dict[str, Any] = json.loads(answer)["usage"]
    return usage


def cached_shares(config: HttpWorkersBench, model: str, prompts: Prompts) -> dict[str, list[float]]:
    """Return the shares of one process and of several, in turns, each with empty caches."""
    rounds, requests = (1, GROUPS * 4) if config.quick else (config.rounds, config.requests)
    found: dict[str, list[float]] = {}
    for turn in range(rounds):
        for count in (1, config.processes):
            share = cached_share(count, requests, model, prompts, turn)
            found.setdefault(processes_text(count), []).append(share)
            print_line(
                f"  turn {turn + 1}, {processes_text(count)}, KV router: {share:.2%} of the prompt tokens cached"
            )
    return found


def main() -> int:
    config = load(HttpWorkersBench, sys.argv[1:], prog="python -m benchmarks.http_workers")
    model = bench_model()
    prompts = read_prompts(model, PROMPT_TOKENS)
    windows, shares = rates(config, model, prompts), cached_shares(config, model, prompts)
    medians = {name: statistics.median(one.requests_per_s for one in seen) for name, seen in windows.items()}
    cores = {name: statistics.median(one.costs[FRONTEND].cores for one in seen) for name, seen in windows.items()}
    cost = {
        name: statistics.median(one.costs[FRONTEND].us_per_request for one in seen) for name, seen in windows.items()
    }
    rows = [[name, number(medians[name]), f"{cores[name]:.2f}", number(cost[name])] for name in windows]
    print_line("\n" + table([f"{os.cpu_count()} cores", "requests/s", "frontend's cores", "CPU-µs per request"], rows))
    found = {
        "processes": config.processes,
        "requests_per_s": medians, "frontend_cores": cores, "frontend_us_per_request": cost,
        "windows": {name: [[one.requests_per_s, one.noise] for one in seen] for name, seen in windows.items()},
        "cached_shares": shares,
    }  # fmt: skip
    if config.rounds >= TURNS_MIN and not config.quick:
        found["cached_share"] = {name: statistics.fmean(seen) for name, seen in shares.items()}
    print_line(write_result("http_workers", found, is_whole=not config.quick and THEIRS in windows))
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: guarded(main))
