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


def test_measured_steps_of_other_roles_are_ignored() -> None:
    config = parse({"mode": "agg"})
    measured = {EngineRole.AGGREGATED: [STEP], EngineRole.PREFILL: [STEP]}
    assert prepare_start(config, WorkerCapabilities(), measured=measured).bootstrap == {EngineRole.AGGREGATED: [STEP]}


def test_absent_profile_is_an_error_only_without_live_steps(tmp_path: Path) -> None:
    raw = {**THOROUGH, "profile_results_dir": str(tmp_path), "enable_throughput_scaling": True}
    with pytest.raises(ConfigError):
        prepare_start(parse({**raw, "enable_load_scaling": False}), WorkerCapabilities())
    assert prepare_start(parse({**raw, "enable_load_scaling": True}), WorkerCapabilities()).bootstrap == {}


@pytest.mark.parametrize("mode", ["none", "rapid", "thorough"])
@pytest.mark.parametrize("target", ["sla", "throughput"])
def test_profile_files_are_read_in_every_sweeping_mode(tmp_path: Path, mode: str, target: str) -> None:
    write_json(tmp_path)
    raw = {**THOROUGH, "optimization_target": target, "pre_deployment_sweeping_mode": mode}
    config = parse({**raw, "profile_results_dir": str(tmp_path)})
    assert set(prepare_start(config, WorkerCapabilities()).bootstrap) == {EngineRole.PREFILL, EngineRole.DECODE}


def test_interpolation_that_cannot_run_is_one_line_and_the_profile_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(tmp_path)
    spec = {
        "hf_id": "m", "system": "h200_sxm", "backend": "vllm", "isl": 3000, "osl": 150, "sweep_max_context_length": 8192,
        "prefill_interpolation_granularity": 4, "decode_interpolation_granularity": 4, "prefill_pick": {}, "decode_pick": {},
    }  # fmt: skip
    raw = {**THOROUGH, "mode": "agg", "profile_results_dir": str(tmp_path), "aic_interpolation": spec}
    config = parse({**raw, "pre_deployment_sweeping_mode": "rapid"})
    assert len(prepare_start(config, WorkerCapabilities()).bootstrap[EngineRole.AGGREGATED]) == 4
    assert next(one.message for one in caplog.records if "aic_interpolation" in one.message).startswith(
        "aic_interpolation: m on h200_sxm: not supported"
    )


def test_warm_up_trace_is_read_for_throughput_scaling(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5}\n')
    raw = {"optimization_target": "sla", "load_predictor_warmup_trace": str(trace), "load_predictor": "constant"}
    start = prepare_start(parse(raw), WorkerCapabilities())
    assert [one.isl for one in start.warm_up] == [10]
