"""Sweep processes: combinations computed by child processes, which read tasks and write results as JSON lines."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, DynamoException
from dynamo.replay.config import ReplayConfig
from dynamo.replay.engine import EngineArgs, flat, given
from dynamo.replay.report import rows_of, summary_of

Task = tuple[ReplayConfig, dict[str, Any]]
"""A configuration and the knobs to apply."""
OWN = {"num_workers", "num_prefill_workers", "num_decode_workers", "router_mode"}
"""Knobs that are flags of the replay command."""
END_S = 10.0  # Timeout for the exit of a child; an idle child exits immediately.


class SweepFailed(DynamoException):
    """A child process ended before its result came."""


class Result(msgspec.Struct, omit_defaults=True):
    """What a child writes for one task."""

    row: dict[str, Any] = {}
    config_error: str = ""


def run_in_processes(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the results in the order of completion, from at most `jobs` processes.

    Raise `ConfigError` for an invalid combination, `SweepFailed` if a process fails.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    results: queue.SimpleQueue[Result | SweepFailed] = queue.SimpleQueue()
    children = [_start() for _ in range(min(jobs, len(tasks)))]
    try:
        for child in children:
            threading.Thread(target=_feed, args=(child, waiting, results), daemon=True).start()
        for _ in tasks:
            result = results.get()
            if isinstance(result, SweepFailed):
                raise result
            if result.config_error:
                raise ConfigError(result.config_error)
            yield result.row
    finally:
        for child in children:
            _end(child)


def tuned(config: ReplayConfig, knobs: Mapping[str, Any]) -> ReplayConfig:
    """Return the configuration with the knobs applied."""
    engine = flat(given(config.extra_engine_args, "--extra-engine-args"), "--extra-engine-args")
    router = given(config.router_config, "--router-config")
    own: dict[str, Any] = {}
    for name, value in knobs.items():
        if name in OWN:
            own[name] = value
        elif name in EngineArgs.__struct_fields__:
            engine[name] = value
        else:
            router[name] = value
    texts = {"extra_engine_args": engine, "router_config": router}
    own |= {name: json.dumps(value, sort_keys=True) for name, value in texts.items() if value}
    return replace(config, **own)


def run(task: tuple[ReplayConfig, dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of one combination."""
    config, knobs = task
    chosen = tuned(config, knobs)
    (scenario,) = chosen.scenarios(chosen.source()).values()
    outcome = scenario.run()
    summary = summary_of(outcome, rows_of(outcome.flights), chosen.objectives())
    return {"knobs": knobs, "workers": chosen.workers + (chosen.num_prefill_workers or 0), "summary": summary}


def serve(run: Callable[[Task], dict[str, Any]]) -> None:
    """Read tasks from standard input and write results to standard output: the child's side."""
    decoder = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        try:
            result = Result(row=run(decoder.decode(line)))
        except ConfigError as error:
            result = Result(config_error=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


def _start() -> "subprocess.Popen[bytes]":
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-m", "dynamo.replay.sweep_processes"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - this program


def _feed(
    child: "subprocess.Popen[bytes]",
    waiting: "queue.SimpleQueue[Task]",
    results: "queue.SimpleQueue[Result | SweepFailed]",
) -> None:
    assert child.stdin is not None, "the child has no pipes"
    assert child.stdout is not None, "the child has no pipes"
    while True:
        try:
            config, knobs = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            child.stdin.write(msgspec.json.encode((config, knobs)) + b"\n")
            child.stdin.flush()
            results.put(msgspec.json.decode(child.stdout.readline(), type=Result))
        except (OSError, ValueError) as error:  # The child's own error message is on standard error.
            results.put(SweepFailed(f"a process of the sweep failed at {knobs}: {error}"))
            return


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Terminate a child; a busy one is killed because its result is not needed."""
    assert child.stdin is not None, "the child has no pipes"
    assert child.stdout is not None, "the child has no pipes"
    child.kill()
    child.wait(END_S)
    for pipe in (child.stdin, child.stdout):
        try:
            pipe.close()
        except OSError:  # The child closed its standard input.
            continue


if __name__ == "__main__":
    serve(run)
