"""Start of a planner: sources of the first performance data."""

from pathlib import Path

import pytest
from tests.unit.planner.test_profile_data import write_json

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.start import prepare_start
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests

STEP = ForwardPassMetrics(FORWARD_PASS_VERSION, "1", 0, 1, 0.1, ScheduledRequests(), QueuedRequests())
THOROUGH = {"optimization_target": "sla", "pre_deployment_sweeping_mode": "thorough", "load_predictor": "constant"}


def test_measured_steps_are_preferred_to_the_profile_of_their_role(tmp_path: Path) -> None:
    write_json(tmp_path)
    config = parse({**THOROUGH, "profile_results_dir": str(tmp_path)})
    start = prepare_start(config, WorkerCapabilities(), measured={EngineRole.DECODE: [STEP]}, start_s=3.0)
    assert start.bootstrap[EngineRole.DECODE] == [STEP]
    assert len(start.bootstrap[EngineRole.PREFILL]) == 2
    assert start.start_s == 3.0


def test_measured_steps_of_other_roles_are_left_out() -> None:
    config = parse({"mode": "agg"})
    measured = {EngineRole.AGGREGATED: [STEP], EngineRole.PREFILL: [STEP]}
    assert prepare_start(config, WorkerCapabilities(), measured=measured).bootstrap == {EngineRole.AGGREGATED: [STEP]}


def test_absent_profile_is_an_error_only_without_live_steps(tmp_path: Path) -> None:
    raw = {**THOROUGH, "profile_results_dir": str(tmp_path), "enable_throughput_scaling": True}
    with pytest.raises(ConfigError):
        prepare_start(parse({**raw, "enable_load_scaling": False}), WorkerCapabilities())
    assert prepare_start(parse({**raw, "enable_load_scaling": True}), WorkerCapabilities()).bootstrap == {}


def test_warm_up_trace_is_read_for_throughput_scaling(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5}\n')
    raw = {"optimization_target": "sla", "load_predictor_warmup_trace": str(trace), "load_predictor": "constant"}
    start = prepare_start(parse(raw), WorkerCapabilities())
    assert [one.isl for one in start.warm_up] == [10]
