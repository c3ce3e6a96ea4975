"""Disaggregated TTFT: first and second token of long prompts, aggregated and disaggregated, in one run of real
processes.

    python -m benchmarks.disagg_ttft [--quick] [--tokens 1800] [--kv-transfer shm,tcp]

One frontend serves three models of the embedded engine: an aggregated worker; a prefill and a decode worker in
sequence; and the same pair at the same time, connected by a bootstrap room. Each round sends the same new prompt to all
three in turn, without other load. Every response is compared with that of the aggregated worker.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.report import number, print_line, table, write_result
from benchmarks.stacks import HOST, free_port, stack_environment
from dynamo.core.config import environ, exit_on_config_error, load, option

ALONE, AFTER, MEETING = "one worker", "prefill, then decode", "both at once"
MODELS = {ALONE: "alone", AFTER: "after", MEETING: "meeting"}
CHUNK = 256
OUTPUT_TOKENS = 4
VOCABULARY = 2000
READY_S = 120.0
WORKERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggConfig:
    """First tokens of prompts that another worker computes."""

    quick: bool = option(False, "--quick", None, "Fewer rounds, and no results file")
    tokens: int = option(1800, "--tokens", None, "Length of a prompt")
    kv_transfer: str = option("shm,tcp", "--kv-transfer", None, "Ways in which blocks may travel")

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 25


@contextmanager
def graph(home: str, kv_transfer: str) -> Iterator[httpx.Client]:
    """Yield a client of the frontend."""
    port = free_port()
    worker = [sys.executable, "-m", "dynamo.cpu", "--threads", "1", "--max-num-batched-tokens", str(CHUNK)]
    pairs = ["--kv-transfer", kv_transfer, "--kv-transfer-host", HOST]
    commands = [
        [sys.executable, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)],
        [*worker, "--model-name", "alone", "--endpoint", "dyn://alone.backend.generate"],
    ]
    for name, more in (("after", []), ("meeting", ["--disaggregation-bootstrap-port", "0"])):
        for role, component, own in (("prefill", "prefill", more), ("decode", "backend", [])):
            place = ["--endpoint", f"dyn://{name}.{component}.generate"]
            commands.append([*worker, *pairs, *own, *place, "--model-name", name, "--disaggregation-mode", role])
    env = stack_environment(home, dict(environ()))
    processes = []
    for at, command in enumerate(commands):
        with open(os.path.join(home, f"{at}.log"), "wb") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=home, stdout=log, stderr=log))
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=READY_S) as client:
            wait(client)
            yield client
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def wait(client: httpx.Client) -> None:
    deadline = time.monotonic() + READY_S
    while workers(client) < WORKERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{workers(client)} workers came: expected {WORKERS}")
        time.sleep(0.3)
    for model in MODELS.values():
        while True:
            try:
                send_request(client, model, [1, 2, 3])
                break
            except (httpx.HTTPError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{model} is not served: {error}") from error
                time.sleep(0.3)


def workers(client: httpx.Client) -> int:
    try:
        return sum(one["endpoint"] == "generate" for one in client.get("/health").json()["instances"])
    except httpx.TransportError:
        return 0


def send_request(client: httpx.Client, model: str, prompt: list[int]) -> tuple[list[float], str]:
    """Return the seconds to each piece of text, and the text. Raises `ValueError` for a refused request."""
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
    times: list[float] = []
    text = ""
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True, "logprobs": 0}) as answer:
        if answer.status_code != httpx.codes.OK:
            raise ValueError(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                output: dict[str, Any] = json.loads(line[6:])
                if output.get("choices"):
                    times.append(time.perf_counter() - began)
                    text += output["choices"][0]["text"]
    return times, text


def main() -> int:
    config = load(DisaggConfig, sys.argv[1:], prog="python -m benchmarks.disagg_ttft")
    rng = random.Random(1)
    first: dict[str, list[float]] = {name: [] for name in MODELS}
    second: dict[str, list[float]] = {name: [] for name in MODELS}
    agrees = True
    with tempfile.TemporaryDirectory(prefix="disagg-ttft-") as home, graph(home, config.kv_transfer) as client:
        for _ in range(config.rounds):
            prompt = [rng.randrange(VOCABULARY) for _ in range(config.tokens)]
            texts = set()
            for name in rng.sample(list(MODELS), len(MODELS)):
                times, text = send_request(client, MODELS[name], prompt)
                first[name].append(times[0])
                second[name].append(times[1])
                texts.add(text)
            agrees = agrees and len(texts) == 1
    found: dict[str, Any] = {
        "tokens": config.tokens,
        "rounds": config.rounds,
        "ways": config.kv_transfer,
        "agree": agrees,
    }
    rows = []
    for name in MODELS:
        ttft, then = statistics.median(first[name]) * 1e3, statistics.median(second[name]) * 1e3
        of_alone = statistics.median(mine / alone for mine, alone in zip(first[name], first[ALONE], strict=True))
        gap = statistics.median(b - a for a, b in zip(first[name], second[name], strict=True)) * 1e3
        found[name] = {"first_ms": ttft, "second_ms": then, "between_ms": gap, "of_alone": of_alone}
        rows.append([name, number(ttft), number(of_alone), number(gap), number(then)])
    print_line(
        table(("a long prompt", "first token, ms", "of one worker's", "then second after, ms", "second, ms"), rows)
    )
    print_line("Every answer is the same." if agrees else "ANSWERS DIFFER.")
    print_line(write_result("disagg_ttft", found, is_whole=not config.quick))
    return 0 if agrees else 1


if __name__ == "__main__":
    exit_on_config_error(main)
