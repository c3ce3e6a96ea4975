"""Fit: a step time model of an engine from a few measured points, with its errors on points that were left out.

    t = step + request x sequences + kv_token x tokens in the cache   (+ prompt + prompt_token x tokens, where it prefills)

A point is a closed loop at a fixed concurrency with prompts and answers of fixed lengths, and its measured TPOT and
TTFT. Between two tokens of an answer lies a step, and the prefills of arriving requests: at concurrency `c` and answers
of `o` tokens, `c / o` prompts per step. The coefficients are non-negative and minimize the squared relative errors.
Predictions come from simulation, not from the formula: the fitted engine is replayed under the load of the point. The
formula only gives the start of a Gauss-Newton iteration on the results of the simulation (`refined`). With answers of
one length and a simultaneous start of all requests, prompts come in groups; the simulation models that, the formula
does not.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.mocker.simulation.timing import FittedTiming
from dynamo.replay.engine import EngineArgs
from dynamo.replay.report import rows_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions

ROUNDS = 2000  # Coordinate descent iterations; a few hundred give a handful of coefficients to a millionth.
WAVES = 6  # Simulated requests per slot of the closed loop, enough to make the start-up negligible.
RIDGE = 1e-6
REFINEMENTS = 5  # Gauss-Newton iterations; each simulates every point once per coefficient, and again for the step.
NUDGE = 0.05
"""Relative change of a coefficient to compute its derivative."""
LEAP_MAX = 1.5
"""Maximum change of a coefficient's logarithm per iteration."""
DAMPING = 1e-2
LEAST = 1e-6
"""Replacement of zero coefficients in milliseconds, because zero has no logarithm."""


class Measured(msgspec.Struct, frozen=True):
    """A measured point."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    tok_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Fits the step times of a simulated engine to measured points, and checks them on points left out."""

    points: str | None = option(
        None, "points", None, "JSON: a list of {concurrency, input_tokens, output_tokens, ttft_ms, tpot_ms, tok_s?}"
    )
    num_gpu_blocks: int = option(16384, "--num-gpu-blocks", None, "KV blocks of the simulated engine")
    block_size: int = option(64, "--block-size", None, "Tokens per KV block")
    max_num_batched_tokens: int = option(8192, "--max-num-batched-tokens", None, "Maximum tokens per step")
    check: bool = option(True, "--cross-validate", None, "Predict each point by a fit to the other points")


def fitted(points: Sequence[Measured]) -> FittedTiming:
    """Return the step times that best explain the points by the formula. Raise `ConfigError` for fewer than two."""
    if len(points) < 2:
        raise ConfigError("points: must be two or more")
    prompts = len({point.input_tokens for point in points}) > 1
    rows: list[list[float]] = []
    wanted: list[float] = []
    for point in points:
        coming = point.concurrency / point.output_tokens
        kv = point.concurrency * (point.input_tokens + point.output_tokens / 2)
        token = point.input_tokens if prompts else 0.0
        decode = [1.0, float(point.concurrency), kv]
        rows.append([*decode, coming, coming * token])
        wanted.append(point.tpot_ms)
        # An arriving request waits for half of the current step and shares its own step with decoding requests.
        rows.append([*(1.5 * part for part in decode), 1.0, float(token)])
        wanted.append(point.ttft_ms)
    step, request, kv_token, prompt, prompt_token = solve(rows, wanted)
    return FittedTiming(step, request, kv_token, prompt, prompt_token)


def solve(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return non-negative coefficients with the least squared relative errors, by scaled coordinate descent."""
    weighted = [[value / goal for value in row] for row, goal in zip(rows, wanted, strict=True)]
    width = len(weighted[0])
    scales = [sum(row[at] ** 2 for row in weighted) ** 0.5 for at in range(width)]
    columns = [[row[at] / scales[at] if scales[at] else 0.0 for row in weighted] for at in range(width)]
    found = [0.0] * width
    left = [1.0] * len(weighted)
    for _ in range(ROUNDS):
        for at, column in enumerate(columns):
            if not scales[at]:
                continue
            gain = sum(part * rest for part, rest in zip(column, left, strict=True))
            value = max(0.0, (found[at] + gain) / (1 + RIDGE))
            change, found[at] = value - found[at], value
            left = [rest - change * part for part, rest in zip(column, left, strict=True)]
    return [value / scale if scale else 0.0 for value, scale in zip(found, scales, strict=True)]


def refined(points: Sequence[Measured], config: FitConfig) -> FittedTiming:
    """Return the step times whose simulation is nearest to the points, starting from those of the formula."""
    start = fitted(points)
    length = mean(point.input_tokens for point in points)
    prompt = start.prompt_ms + start.prompt_token_ms * length
    # If all prompts have one length, only grouped prompts separate constant and per-token prefill time.
    found = [start.step_ms, start.request_ms, start.kv_token_ms, 0.9 * prompt, 0.1 * prompt / length]
    lengths = {point.input_tokens + point.output_tokens / 2 for point in points}
    if len(lengths) == 1:  # Requests and cached tokens are then proportional.
        found[1] += found[2] * lengths.pop()
        found[2] = 0.0
    free = [at for at in range(len(found)) if at != 2 or found[2] > 0]
    logs = [math.log(max(value, LEAST)) for value in found]

    def timing(of: Sequence[float]) -> FittedTiming:
        return FittedTiming(*(math.exp(value) if at in free else 0.0 for at, value in enumerate(of)))

    def errors(of: Sequence[float]) -> list[float]:
        pairs = [(point, foretold(point, timing(of), config)) for point in points]
        return [
            getattr(computed, name) / getattr(point, name) - 1
            for point, computed in pairs
            for name in ("ttft_ms", "tpot_ms")
        ]

    left, damping = errors(logs), DAMPING
    for _ in range(REFINEMENTS):
        columns = []
        for at in free:
            nudged = [value + NUDGE * (place == at) for place, value in enumerate(logs)]
            columns.append([(one - two) / NUDGE for one, two in zip(errors(nudged), left, strict=True)])
        moves = dict(zip(free, newton(columns, left, damping), strict=True))
        tried = [value + max(-LEAP_MAX, min(LEAP_MAX, moves.get(at, 0.0))) for at, value in enumerate(logs)]
        after = errors(tried)
        if sum(error * error for error in after) < sum(error * error for error in left):
            logs, left, damping = tried, after, damping / 3
        else:
            damping *= 10
    return timing(logs)


def newton(columns: Sequence[Sequence[float]], left: Sequence[float], damping: float) -> list[float]:
    """Return the damped least-squares step: normal equations, solved by elimination."""
    size = len(columns)
    rows = [
        [sum(a * b for a, b in zip(one, two, strict=True)) + damping * (one is two) for two in columns]
        + [-sum(a * b for a, b in zip(one, left, strict=True))]
        for one in columns
    ]
    for at in range(size):  # The matrix is positive definite: no pivot is zero.
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][place] * found[place] for place in range(at + 1, size))
        found[at] = (rows[at][size] - known) / rows[at][at]
    return found


def foretold(point: Measured, timing: FittedTiming, config: FitConfig) -> Measured:
    """Return the simulated result of a point's load on the fitted engine."""
    places = point.concurrency
    shape = Shape(input_tokens=point.input_tokens, output_tokens=point.output_tokens, requests=places * WAVES)
    engine = EngineArgs(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=max(256, point.concurrency),
        fitted_timing=timing,
    )
    outcome = Scenario(sessions=sessions(shape), engine=engine, concurrency=places).run()
    rows = rows_of(outcome.flights)
    latency_ms = mean(row.e2e_latency_ms for row in rows)
    return Measured(
        places,
        point.input_tokens,
        point.output_tokens,
        mean(row.ttft_ms for row in rows),
        mean(row.itl_ms or 0.0 for row in rows),
        1000 * places * point.output_tokens / latency_ms,
    )


def explained(points: Sequence[Measured], timing: FittedTiming, config: FitConfig) -> dict[str, Any]:
    """Return the errors of each point's prediction by these step times."""
    return compared([(point, foretold(point, timing, config)) for point in points])


def cross_validation(points: Sequence[Measured], config: FitConfig) -> dict[str, Any]:
    """Return the errors of each point's prediction by a fit to the others."""
    pairs = []
    for left_out in points:
        timing = refined([point for point in points if point is not left_out], config)
        pairs.append((left_out, foretold(left_out, timing, config)))
    return compared(pairs)


def compared(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    """Return measured and predicted values, and the mean absolute errors in percent."""
    errors: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": [], "tok_s": []}
    for measured, found in pairs:
        for name, list_ in errors.items():
            truth = getattr(measured, name)
            if truth:
                list_.append(100 * abs(getattr(found, name) / truth - 1))
    return {
        "points": [{"measured": msgspec.to_builtins(one), "foretold": msgspec.to_builtins(two)} for one, two in pairs],
        "mean_absolute_error_percent": {name: sum(of) / len(of) for name, of in errors.items() if of},
    }


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.fit") -> int:
    """Print the engine args and the errors."""
    config = load(FitConfig, argv, prog=prog)
    if config.points is None:
        raise ConfigError("points is missing: pass a JSON file")
    try:
        points = msgspec.json.decode(Path(config.points).read_bytes(), type=list[Measured])
    except OSError as error:
        raise ConfigError(f"cannot read {config.points}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{config.points}: {error}") from None
    timing = refined(points, config)
    found: dict[str, Any] = {"extra_engine_args": {"fitted_timing": msgspec.to_builtins(timing)}}
    found["fit"] = explained(points, timing, config)
    if config.check and len(points) > 2:
        found["cross_validation"] = cross_validation(points, config)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
