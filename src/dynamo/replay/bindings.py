"""Replay under the names of upstream's bindings: `run_mocker_trace_replay` and `run_mocker_synthetic_trace_replay`.

Both simulate in virtual time and return the parts of the report of `python -m dynamo.replay --report-json`. `dynamo.replay.api`
is the interface for programs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.replay.config import ReplayConfig
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import report_of, rows_of
from dynamo.replay.telemetry import TelemetrySampler

NOT_HONOURED: Mapping[str, Any] = {
    "ais_perf_config": None,
    "capture_planner_details": True,
    "execution_model": None,
    "scaling_policy": None,
    "trace_num_prefix_groups": 0,
    "trace_shared_prefix_ratio": 0.0,
    "weka_nested_timestamp_basis": None,
}
"""Arguments that only upstream's simulator supports, with the value that requests nothing."""
ONLINE = "replay_mode online: the bindings simulate; use python -m dynamo.replay --replay-mode online"


@dataclass(frozen=True, slots=True)
class OfflineReplayResult:
    """Parts of the report of a run."""

    summary: dict[str, Any]
    per_request: list[dict[str, Any]] | None
    coverage: dict[str, Any]
    telemetry: dict[str, Any] | None
    planner: dict[str, Any] | None
    """With a planner: its observations and effects. Upstream's planner is a separate object."""

    @property
    def lifecycle_operations(self) -> list[dict[str, Any]]:
        """Return the starts and stops of workers by a planner."""
        return [] if self.planner is None else list(self.planner["lifecycle_operations"])


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Receivers of the samples of one run."""

    is_captured: bool
    interval_ms: float
    callback: Callable[[dict[str, Any]], object] | None
    path: str | PathLike[str] | None
    samples: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def sampler(self) -> Iterator[TelemetrySampler | None]:
        """Provide the sampler of a run; None if nothing receives samples. Raise `OSError` for the file."""
        receivers: list[Callable[[dict[str, Any]], object]] = []
        if self.is_captured:
            receivers.append(self.samples.append)
        if self.callback is not None:
            receivers.append(self.callback)
        with ExitStack() as stack:
            if self.path is not None:
                file = stack.enter_context(Path(self.path).open("wb"))
                receivers.append(lambda sample: file.write(msgspec.json.encode(sample) + b"\n"))
            yield (
                TelemetrySampler(self.interval_ms, lambda sample: [one(sample) for one in receivers])
                if receivers
                else None
            )

    def captured(self) -> dict[str, Any] | None:
        """Return the samples in the form of the report."""
        return {"sample_interval_ms": self.interval_ms, "samples": self.samples} if self.is_captured else None


def run_mocker_trace_replay(
    trace_files: str | PathLike[str] | Sequence[str | PathLike[str]],
    *options: Any,
    report_jsonl_path: str | PathLike[str] | None = None,
    trace_block_size: int | None = None,
    **settings: Any,
) -> OfflineReplayResult:
    """Simulate the requests of trace files and return the report; the settings are those of `ReplayConfig`.

    Raise `InvalidArgument` for an unsupported argument, `ConfigError` for a wrong value.
    """
    _by_name(options)
    files = [trace_files] if isinstance(trace_files, (str, PathLike)) else list(trace_files)
    if trace_block_size is not None:
        settings["trace_block_size"] = trace_block_size
    outcome, report = _run({**settings, "trace": ",".join(fspath(file) for file in files)})
    if report_jsonl_path is not None:
        rows = b"".join(msgspec.json.encode(row) + b"\n" for row in rows_of(outcome.flights))
        Path(report_jsonl_path).write_bytes(rows)
    return report


def run_mocker_synthetic_trace_replay(
    input_tokens: int,
    output_tokens: int,
    request_count: int,
    *options: Any,
    arrival_seed: int = 42,
    **settings: Any,
) -> OfflineReplayResult:
    """Simulate generated requests and return the report; the settings are those of `ReplayConfig`.

    Raise `InvalidArgument` for an unsupported argument, `ConfigError` for a wrong value.
    """
    _by_name(options)
    shape = {"input_tokens": input_tokens, "output_tokens": output_tokens, "request_count": request_count}
    return _run({**settings, **shape, "seed": arrival_seed})[1]


def _by_name(options: Sequence[Any]) -> None:
    if options:
        raise InvalidArgument("replay: arguments after the load must be passed by name")


def _run(settings: dict[str, Any]) -> tuple[RunOutcome, OfflineReplayResult]:
    """Simulate one scenario."""
    if settings.pop("replay_mode", "offline") != "offline":
        raise InvalidArgument(ONLINE, param="replay_mode")
    for name, neutral in NOT_HONOURED.items():
        if settings.pop(name, neutral) != neutral:
            raise InvalidArgument(f"replay: {name} is not supported by this release", param=name)
    telemetry = Telemetry(
        settings.pop("capture_telemetry", False),
        settings.pop("telemetry_sample_interval_ms", 1000.0),
        settings.pop("telemetry_callback", None),
        settings.pop("telemetry_jsonl_path", None),
    )
    is_disaggregated = settings.get("prefill_engine_args") is not None
    for name in ("num_workers",) if is_disaggregated else ("num_prefill_workers", "num_decode_workers"):
        settings.pop(name, None)  # Upstream's wrappers pass the workers of both layouts.
    if is_disaggregated:
        settings = {"num_prefill_workers": 1, "num_decode_workers": 1, **settings}
    for name in ("extra_engine_args", "prefill_engine_args", "decode_engine_args", "router_config", "planner_config"):
        settings[name] = _as_text(settings.get(name))
    settings["kv_event_lag_ms"] = settings.get("kv_event_lag_ms") or 0.0
    unknown = settings.keys() - set(ReplayConfig.__dataclass_fields__)
    if unknown:
        raise InvalidArgument(f"replay: unexpected argument {min(unknown)}", param=min(unknown))
    config = ReplayConfig(**settings, progress=False)
    (scenario,) = config.scenarios(config.source()).values()
    with telemetry.sampler() as sampler:
        outcome = scenario.run(None, sampler)
    report = report_of(outcome, objectives=config.objectives(), with_requests=config.capture_per_request)
    return outcome, OfflineReplayResult(**report, telemetry=telemetry.captured())


def _as_text(value: Any) -> str | None:
    """Return a flag's value for a Python value: JSON, an object with `dump_json` or `to_dict`, or a mapping."""
    if value is None or isinstance(value, str):
        return value
    if hasattr(value, "dump_json"):
        return str(value.dump_json())
    return msgspec.json.encode(value.to_dict() if hasattr(value, "to_dict") else value).decode()
