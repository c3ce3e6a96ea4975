"""Comparison with the released planner: run cases in its environment, and skip where that is not installed."""

import atexit
import functools
import json
import math
import os
import random
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner_peer import planner_home, planner_python

from dynamo.planner.core.regression import StepLoad
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests

SCRIPT = Path(__file__).with_name("peer_planner.py")
TIMEOUT_S = 300.0
ERRORS = Path(tempfile.gettempdir()) / f"peer_planner.{os.getpid()}.log"


def released(function: str, cases: list[Any]) -> list[Any]:
    """Return the released planner's result of each case; skip the test where it is not installed."""
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")
    process = _released_process()
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps({"function": function, "cases": cases}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    assert line, f"the released planner ended: {ERRORS.read_text(errors='replace')[-2000:]}"
    results: list[Any] = json.loads(line)
    assert len(results) == len(cases)
    return results


@functools.cache
def _released_process() -> "subprocess.Popen[str]":
    """Return the process of `peer_planner`, which serves all comparisons of this run: its imports take seconds."""
    with ERRORS.open("w") as errors:
        process = subprocess.Popen(
            [planner_python(), str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "OMP_NUM_THREADS": "1"},
        )
    atexit.register(process.kill)
    return process


def step(row: list[Any]) -> ForwardPassMetrics:
    """Return forward-pass metrics from the row that `peer_planner.step` reads."""
    worker, rank, wall, prompts, tokens, decodes, kv, queued_prompts, queued_tokens, queued_decodes, queued_kv = row
    return ForwardPassMetrics(
        FORWARD_PASS_VERSION,
        worker,
        rank,
        1,
        wall,
        ScheduledRequests(
            num_prefill_requests=prompts,
            sum_prefill_tokens=tokens,
            num_decode_requests=decodes,
            sum_decode_kv_tokens=kv,
        ),
        QueuedRequests(
            num_prefill_requests=queued_prompts,
            sum_prefill_tokens=queued_tokens,
            num_decode_requests=queued_decodes,
            sum_decode_kv_tokens=queued_kv,
        ),
    )


def random_step(rng: random.Random, worker: str = "1", load: float = 1.0) -> list[Any]:
    """Return the row of a random step; one in ten is an idle heartbeat."""
    if rng.random() < 0.1:
        return [worker, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0]
    prompts, decodes = rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 8, 40])
    queued_prompts, queued_decodes = int(rng.choice([0, 0, 1, 6]) * load), rng.choice([0, 0, 2])
    return [
        worker,
        0,
        round(rng.uniform(0.005, 0.2), 6),
        prompts,
        prompts * rng.randint(1, 2000),
        decodes,
        int(decodes * rng.randint(10, 3000) * load),
        queued_prompts,
        queued_prompts * rng.randint(1, 2000),
        queued_decodes,
        queued_decodes * rng.randint(10, 3000),
    ]


class LinearSteps:
    """The step model of `peer_planner.LinearModel`."""

    def __init__(self, coefficients: list[float], samples_min: int = 0) -> None:
        self.coefficients = coefficients
        self.samples_min = samples_min
        self.count = 0

    @property
    def is_ready(self) -> bool:
        """Return whether as many steps were added as the planner requires."""
        return self.count >= self.samples_min

    def add(self, step: ForwardPassMetrics) -> None:
        """Count a step."""
        self.count += 1

    def seconds(self, load: StepLoad) -> float:
        """Return the linear step time."""
        base, per_token, per_request, per_kv = self.coefficients
        seconds = (
            base + per_token * load.prefill_tokens + per_request * load.decode_requests + per_kv * load.decode_kv_tokens
        )
        return seconds * 1000 / 1000


def is_close(found: Any, expected: Any, relative: float = 1e-6) -> bool:
    """Return whether two results are equal but for the rounding of floats; None and booleans equal only themselves."""
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_close, found, expected, [relative] * len(found)))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_close(found[key], expected[key], relative) for key in found)
    numbers = (int, float)
    if isinstance(found, numbers) and isinstance(expected, numbers) and not isinstance(found, bool):
        return math.isclose(found, expected, rel_tol=relative, abs_tol=1e-9)
    return found is expected or bool(found == expected)
