"""Replay as functions: `run_trace_replay` and `run_synthetic_trace_replay` simulate a load and return a `ReplayReport`.

Settings are passed by name: the fields of `ReplayConfig`, under upstream's names. `planner_config` scales the workers by the
planner of this package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.replay.bindings import OfflineReplayResult
from dynamo.replay.bindings import run_mocker_synthetic_trace_replay as _run_mocker_synthetic_trace_replay
from dynamo.replay.bindings import run_mocker_trace_replay as _run_mocker_trace_replay
from dynamo.replay.report import PlannerReplayDetails, ReplayReport, ReplayTelemetryDetails

PLANNER_GRANULARITY = 8
"""Upstream's number of points at which a performance model is sampled; the planner here evaluates the model itself."""


@dataclass(frozen=True)
class TelemetryOptions:
    """Periodic samples of the workers' activity, in the report unless there is another receiver."""

    sample_interval_ms: float = 1_000.0
    capture_in_memory: bool | None = None
    callback: Callable[[dict[str, Any]], None] | None = None
    jsonl_path: str | PathLike[str] | None = None

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the bindings. Raise `InvalidArgument` if nothing receives the samples."""
        has_receiver = self.callback is not None or self.jsonl_path is not None
        is_captured = not has_receiver if self.capture_in_memory is None else self.capture_in_memory
        if not (is_captured or has_receiver):
            raise InvalidArgument("TelemetryOptions needs at least one sink: capture_in_memory, callback or jsonl_path")
        return {
            "capture_telemetry": is_captured,
            "telemetry_sample_interval_ms": self.sample_interval_ms,
            "telemetry_callback": self.callback,
            "telemetry_jsonl_path": self.jsonl_path,
        }


def run_trace_replay(
    trace_files: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    telemetry_options: TelemetryOptions | None = None,
    planner_config: str | Mapping[str, Any] | None = None,
    performance_model_metadata: Mapping[str, Any] | None = None,
    benchmark_granularity: int = PLANNER_GRANULARITY,
    **settings: Any,
) -> ReplayReport:
    """Simulate the requests of trace files. Raise `InvalidArgument` for an unsupported argument, `ConfigError`."""
    settings |= _observed(telemetry_options)
    settings |= _planned(planner_config, performance_model_metadata, benchmark_granularity)
    files = [trace_files] if isinstance(trace_files, str | PathLike) else list(trace_files)
    return _report(_run_mocker_trace_replay(files, **settings))


def run_synthetic_trace_replay(
    input_tokens: int,
    output_tokens: int,
    request_count: int,
    *,
    telemetry_options: TelemetryOptions | None = None,
    planner_config: str | Mapping[str, Any] | None = None,
    performance_model_metadata: Mapping[str, Any] | None = None,
    benchmark_granularity: int = PLANNER_GRANULARITY,
    **settings: Any,
) -> ReplayReport:
    """Simulate generated requests. Raise `InvalidArgument` for an unsupported argument, `ConfigError`."""
    settings |= _observed(telemetry_options)
    settings |= _planned(planner_config, performance_model_metadata, benchmark_granularity)
    return _report(_run_mocker_synthetic_trace_replay(input_tokens, output_tokens, request_count, **settings))


def _observed(options: TelemetryOptions | None) -> dict[str, Any]:
    """Return the settings for samples, if they are wanted."""
    return {} if options is None else options.settings()


def _planned(
    config: str | Mapping[str, Any] | None, metadata: Mapping[str, Any] | None, granularity: int
) -> dict[str, Any]:
    """Return the settings for a planner, if there is one. Raise `InvalidArgument`."""
    if metadata is not None:
        raise InvalidArgument(
            "replay: performance_model_metadata is not supported by this release: put the model in planner_config",
            param="performance_model_metadata",
        )
    if granularity < 1:
        raise InvalidArgument(f"benchmark_granularity {granularity}: expected 1 or more", param="benchmark_granularity")
    return {} if config is None else {"planner_config": config}


def _report(result: OfflineReplayResult) -> ReplayReport:
    """Return a report of a result; doubles of the bindings may lack the planner."""
    planner = getattr(result, "planner", None)
    return ReplayReport(
        summary=dict(result.summary),
        per_request=result.per_request,
        coverage=result.coverage,
        planner=None if planner is None else PlannerReplayDetails(**planner),
        telemetry=None if result.telemetry is None else ReplayTelemetryDetails(**result.telemetry),
    )
