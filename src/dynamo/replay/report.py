"""Report: statistics of a run under upstream's names: a summary, a table, request rows, JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Literal

import msgspec

from dynamo.replay.gaps import nearest_rank
from dynamo.replay.outcome import Flight, PlannerLog, RunOutcome
from dynamo.replay.timeline import COUNTS, LEVELS

STATISTICS = ("mean", "min", "max", "p99", "p90", "p75", "median", "std")
"""Columns of the table; the summary also has p95."""
METRICS = ("ttft_ms", "ttst_ms", "e2e_latency_ms", "itl_ms", "output_token_throughput_per_user")
TITLES = {
    "ttft_ms": "Time to First Token (ms)",
    "ttst_ms": "Time to Second Token (ms)",
    "e2e_latency_ms": "Request Latency (ms)",
    "itl_ms": "Inter Token Latency (ms)",
    "output_token_throughput_per_user": "Output Token Throughput Per User (tok/s/user)",
}


class RequestRow(msgspec.Struct):
    """One answered request."""

    request_id: str
    session_id: str
    turn: int
    arrival_ms: float
    input_length: int
    output_length: int
    cached_tokens: int
    worker: int
    wait_ms: float
    """Time in the router's queue, or without a worker in service."""
    ttft_ms: float
    ttst_ms: float | None
    itl_ms: float | None
    e2e_latency_ms: float
    migrations: int
    prefill_worker: int | None = None
    """Place of the prefill worker, if it was a different one."""
    terminal_status: Literal["completed", "rejected"] = "completed"


@dataclass
class PlannerReplayDetails:
    """Observations and effects of a planner."""

    metadata: dict[str, Any] = field(default_factory=dict)
    ticks: list[dict[str, Any]] = field(default_factory=list)
    scaling_events: list[Any] = field(default_factory=list)
    lifecycle_operations: list[dict[str, Any]] = field(default_factory=list)
    total_ticks: int = 0
    html_report_path: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return built-in types."""
        return {one.name: primitive(getattr(self, one.name)) for one in fields(self)}


@dataclass
class ReplayTelemetryDetails:
    """Samples of the workers' activity."""

    sample_interval_ms: float
    samples: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return built-in types."""
        return {"sample_interval_ms": self.sample_interval_ms, "samples": primitive(self.samples)}


@dataclass
class ReplayReport:
    """Report of a run, as objects (`dynamo.replay.run_trace_replay`)."""

    summary: dict[str, Any]
    per_request: list[dict[str, Any]] | None
    coverage: dict[str, Any]
    planner: PlannerReplayDetails | None
    telemetry: ReplayTelemetryDetails | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return built-in types; without telemetry there is no such field."""
        found: dict[str, Any] = {
            "summary": self.summary,
            "per_request": self.per_request,
            "coverage": self.coverage,
            "planner": None if self.planner is None else self.planner.to_dict(),
        }
        return found if self.telemetry is None else found | {"telemetry": self.telemetry.to_dict()}


def primitive(value: Any) -> Any:
    """Return a value as built-in types: a dataclass as a dictionary, an enumeration's member as its value."""
    if isinstance(value, Enum):
        return primitive(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: primitive(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): primitive(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [primitive(one) for one in value]
    return value


class Objectives(msgspec.Struct, frozen=True):
    """Latency objectives that a request must meet to count as goodput; None: no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def are_met(self, row: RequestRow) -> bool:
        """Return whether a request met all objectives."""
        return (
            (self.ttft_ms is None or row.ttft_ms <= self.ttft_ms)
            and (self.itl_ms is None or (row.itl_ms or 0.0) <= self.itl_ms)
            and (self.e2e_ms is None or row.e2e_latency_ms <= self.e2e_ms)
        )

    @property
    def are_any(self) -> bool:
        return not (self.ttft_ms is None and self.itl_ms is None and self.e2e_ms is None)


NONE = Objectives()


def rows_of(flights: Sequence[Flight]) -> list[RequestRow]:
    """Return the answered requests in the order of arrival."""
    return [_row(flight) for flight in flights if flight.finished_ms >= 0]


def _row(flight: Flight) -> RequestRow:
    turn, first = flight.turn, flight.first_ms
    steps = turn.output_tokens - 1
    return RequestRow(
        turn.request_id,
        flight.session.session_id,
        flight.place,
        flight.arrived_ms,
        turn.input_tokens,
        turn.output_tokens,
        flight.cached_tokens,
        flight.slot,
        flight.waited_ms,
        first - flight.arrived_ms,
        flight.second_ms - first if flight.second_ms >= 0 else None,
        (flight.finished_ms - first) / steps if steps else None,
        flight.finished_ms - flight.arrived_ms,
        flight.migrations,
        flight.prefill_slot if flight.is_transferred else None,
    )


def rejected_row(flight: Flight) -> dict[str, Any]:
    """Return the fields of a `RequestRow` for a request that was too long or refused; those without a value are None."""
    return dict.fromkeys(RequestRow.__struct_fields__) | {
        "request_id": flight.turn.request_id,
        "session_id": flight.session.session_id,
        "turn": flight.place,
        "arrival_ms": flight.arrived_ms,
        "input_length": flight.turn.input_tokens,
        "output_length": 0,
        "terminal_status": "rejected",
    }


def summary_of(outcome: RunOutcome, rows: Sequence[RequestRow], objectives: Objectives = NONE) -> dict[str, Any]:
    """Return the summary of a run under upstream's names."""
    seconds = outcome.duration_ms / 1000
    output = sum(row.output_length for row in rows)
    given = sum(row.input_length for row in rows)
    found: dict[str, Any] = {
        "num_requests": len(outcome.flights) + len(outcome.rejected),
        "completed_requests": len(rows),
        "duration_ms": outcome.duration_ms,
        "total_input_tokens": given,
        "total_output_tokens": output,
        "request_throughput_rps": _ratio(len(rows), seconds),
        "input_throughput_tok_s": _ratio(given, seconds),
        "output_throughput_tok_s": _ratio(output, seconds),
        "prefix_cache_reused_ratio": _ratio(outcome.reused_tokens, outcome.admitted_tokens),
        "first_admission_prefix_cache_reused_ratio": _ratio(sum(row.cached_tokens for row in rows), given),
        "preemptions": outcome.preemptions,
        "migrations": outcome.migrations,
        "engine_steps": outcome.steps,
        "worker_seconds": outcome.worker_ms / 1000,
    }
    if outcome.transfers or outcome.bypassed:
        found["kv_transfers"] = outcome.transfers
        found["mean_kv_transfer_ms"] = _ratio(outcome.transfer_ms, outcome.transfers)
        found["prefill_bypassed"] = outcome.bypassed
    for metric in (*METRICS, "tpot_ms"):
        for statistic, value in _statistics_of(metric, outcome, rows).items():
            found[f"{statistic}_{metric}"] = value
    if objectives.are_any:
        good = [row for row in rows if objectives.are_met(row)]
        refused = sum(bool(flight.refusal) for flight in outcome.rejected)
        found["goodput_completed_requests"] = len(good)
        found["sla_met_ratio"] = _ratio(len(good), len(rows) + refused)  # A refused client is not served in time.
        found["goodput_rps"] = _ratio(len(good), seconds)
        found["goodput_tok_s"] = _ratio(sum(row.output_length for row in good), seconds)
    if any(flight.refusal for flight in outcome.rejected):
        found["refused_requests"] = sum(bool(flight.refusal) for flight in outcome.rejected)
    if outcome.planner is not None:
        found |= scaling_summary(outcome, found.get("goodput_tok_s"))
    return found


def scaling_summary(outcome: RunOutcome, goodput_tok_s: float | None) -> dict[str, Any]:
    """Return the cost of a scaled run; goodput per GPU is in tokens per second, over the mean number of GPUs."""
    assert outcome.planner is not None
    gpu_hours = outcome.gpu_ms / 3_600_000
    mean_gpus = _ratio(outcome.gpu_ms, outcome.duration_ms)
    found: dict[str, Any] = {
        "gpu_hours": gpu_hours,
        "mean_gpus": mean_gpus,
        "scaling_events": len(outcome.planner.scaling_events),
    }
    if goodput_tok_s is not None:
        found["goodput_tok_s_per_gpu"] = _ratio(goodput_tok_s, mean_gpus)
    return found


def _statistics_of(metric: str, outcome: RunOutcome, rows: Sequence[RequestRow]) -> dict[str, float | None]:
    """Return the statistics over the gaps between tokens, where they are known, or over the requests."""
    if outcome.gaps.gaps.count and metric == "itl_ms":
        return outcome.gaps.itl_ms()
    if outcome.gaps.gaps.count and metric == "output_token_throughput_per_user":
        return outcome.gaps.tokens_per_s()
    return statistics([_value(metric, row) for row in rows])


def _value(metric: str, row: RequestRow) -> float | None:
    if metric == "output_token_throughput_per_user":
        return 1000 / row.itl_ms if row.itl_ms else None
    value: float | None = getattr(row, "itl_ms" if metric == "tpot_ms" else metric)
    return value


def statistics(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean, extremes, percentiles and population standard deviation; None for no values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys((*STATISTICS, "p95"))
    mean = math.fsum(known) / len(known)
    return {
        "mean": mean,
        "min": known[0],
        "max": known[-1],
        "median": percentile(known, 0.5),
        "p99": percentile(known, 0.99),
        "p95": percentile(known, 0.95),
        "p90": percentile(known, 0.90),
        "p75": percentile(known, 0.75),
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in known) / len(known)),
    }


def percentile(known: Sequence[float], part: float) -> float:
    """Return a percentile of sorted values: the value whose rank is nearest, as in the released report."""
    return known[nearest_rank(len(known), part)]


def telemetry_of(outcome: RunOutcome) -> dict[str, Any]:
    """Return the activity of each worker by interval."""
    timeline = outcome.timeline
    samples = [
        {
            "worker": place,
            **{name: [round(level, 3) for level in timeline.level(name, place)] for name in LEVELS},
            **{name: timeline.counted(name, place) for name in COUNTS},
        }
        for place in range(timeline.places)
    ]
    return {"sample_interval_ms": timeline.interval_ms, "samples": samples}


def report_of(
    outcome: RunOutcome,
    *,
    objectives: Objectives = NONE,
    with_requests: bool = False,
    with_telemetry: bool = False,
) -> dict[str, Any]:
    """Return the report object: {summary, per_request, coverage, planner, telemetry?}."""
    rows = rows_of(outcome.flights)
    report: dict[str, Any] = {
        "summary": summary_of(outcome, rows, objectives),
        "per_request": None,
        "coverage": {
            "requests": len(outcome.flights) + len(outcome.rejected),
            "completed": len(rows),
            "unfinished": outcome.unfinished,
        },
        "planner": None if outcome.planner is None else planner_of(outcome.planner),
    }
    if with_requests:
        report["per_request"] = [*map(msgspec.to_builtins, rows), *map(rejected_row, outcome.rejected)]
    if outcome.rejected:
        report["coverage"]["rejected"] = len(outcome.rejected)
    if outcome.failures:
        report["coverage"]["failures"] = dict(sorted(outcome.failures.items()))
    if with_telemetry:
        report["telemetry"] = telemetry_of(outcome)
    return report


def planner_of(log: PlannerLog) -> dict[str, Any]:
    """Return the observations and effects of a planner."""
    return {
        "metadata": {"policy": log.policy},
        "ticks": log.ticks,
        "scaling_events": log.scaling_events,
        "lifecycle_operations": log.lifecycle_operations,
        "total_ticks": len(log.ticks),
        "html_report_path": None,
    }


def as_json(report: object) -> bytes:
    """Encode with sorted keys and indent 2: equal reports have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(report, order="sorted"), indent=2) + b"\n"


def table_of(summary: dict[str, Any], wall_ms: float | None = None) -> str:
    """Return the report as a table for a terminal."""
    heads = ("avg", "min", "max", "p99", "p90", "p75", "p50", "std")
    lines = []
    for metric in METRICS:
        cells = [_number(summary[f"{statistic}_{metric}"]) for statistic in STATISTICS]
        lines.append((TITLES[metric], cells))
    blank = [""] * (len(heads) - 1)
    lines += [
        ("Output Token Throughput (tok/s)", [_number(summary["output_throughput_tok_s"]), *blank]),
        ("Request Throughput (req/s)", [_number(summary["request_throughput_rps"]), *blank]),
        ("Request Count", [_number(float(summary["completed_requests"])), *blank]),
    ]
    width = max(len(title) for title, _ in lines)
    sizes = [max(len(head), *(len(cells[at]) for _, cells in lines)) for at, head in enumerate(heads)]
    rule = "─" * (width + sum(sizes) + 3 * len(sizes))
    text = [f"{'Replay | LLM Metrics':^{len(rule)}}".rstrip(), rule]
    text.append(" " * width + "".join(f"   {head:>{size}}" for head, size in zip(heads, sizes, strict=True)))
    text.append(rule)
    for title, cells in lines:
        line = f"{title:<{width}}" + "".join(f"   {cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        text.append(line.rstrip())
    text.append(rule)
    if wall_ms is not None:
        text.append(f"Wall Time (ms): {wall_ms:,.0f}")
    text.append(f"Prefix Cache Reused Ratio: {summary['prefix_cache_reused_ratio']:.4f}")
    first = summary["first_admission_prefix_cache_reused_ratio"]
    text.append(f"First Admission Prefix Cache Reused Ratio: {first:.4f}")
    if "kv_transfers" in summary:
        text.append(
            f"KV Transfers: {summary['kv_transfers']:,}, {summary['mean_kv_transfer_ms']:,.2f} ms on average; "
            f"Bypassed Prefills: {summary['prefill_bypassed']:,}"
        )
    if "goodput_tok_s" in summary:
        text.append(
            f"Goodput: {summary['goodput_tok_s']:,.1f} tok/s, {100 * summary['sla_met_ratio']:.1f} % of the requests"
        )
    if "refused_requests" in summary:
        text.append(f"Refused Requests: {summary['refused_requests']:,}")
    if "gpu_hours" in summary:
        per_gpu = summary.get("goodput_tok_s_per_gpu")
        text.append(
            f"GPU-hours: {summary['gpu_hours']:,.2f}, {summary['mean_gpus']:,.2f} GPUs on average; "
            f"Scaling Events: {summary['scaling_events']}"
            + ("" if per_gpu is None else f"; Goodput per GPU: {per_gpu:,.1f} tok/s")
        )
    return "\n".join(text)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.2f}"
