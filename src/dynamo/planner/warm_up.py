"""Warm-up trace: the traffic of a recorded trace in planner intervals, for the load predictors before the first tick."""

from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.protocols.planner import TrafficObservation

SETTING = "load_predictor_warmup_trace"
INTERVALS_MAX = 100_000
"""Bound of the number of intervals: a trace with a timestamp in another unit is an error, not a list of any length."""


class _TraceRow(msgspec.Struct):
    """One request of a mooncake trace; the timestamp is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int


def read_warm_up(path: str, interval_s: float) -> list[TrafficObservation]:
    """Return the traffic of each interval from the first request to the last; intervals without requests are zero.

    Raises `ConfigError` for a file that cannot be read or a line that is not a request.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{SETTING}: cannot read {path}: {error.strerror or error}") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        return []
    start_ms = min(row.timestamp for row in rows)
    numbers = [int((row.timestamp - start_ms) / 1000 / interval_s) for row in rows]
    if max(numbers) >= INTERVALS_MAX:
        raise ConfigError(f"{SETTING}: {path}: spans {max(numbers) + 1} intervals: must be at most {INTERVALS_MAX}")
    intervals: list[list[_TraceRow]] = [[] for _ in range(max(numbers) + 1)]
    for number, row in zip(numbers, rows, strict=True):
        intervals[number].append(row)
    return [_traffic(found, interval_s) for found in intervals]


def _traffic(rows: list[_TraceRow], interval_s: float) -> TrafficObservation:
    count = max(1, len(rows))
    return TrafficObservation(
        duration_s=interval_s,
        num_req=float(len(rows)),
        isl=sum(row.input_length for row in rows) / count,
        osl=sum(row.output_length for row in rows) / count,
    )


def _row(path: str, number: int, line: bytes) -> _TraceRow:
    try:
        return msgspec.json.decode(line, type=_TraceRow)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{SETTING}: {path}:{number}: {error}") from None
