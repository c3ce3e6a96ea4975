"""Start of a planner: warm-up, profile files and measured steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import PlannerConfig, parse
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.start import prepare_start
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests

NOTHING = WorkerCapabilities()
STEP = ForwardPassMetrics(1, "1", 0, 1, 0.1, ScheduledRequests(), QueuedRequests())


def settings(**more: Any) -> PlannerConfig:
    return parse({"environment": "virtual", "optimization_target": "sla", "load_predictor": "constant", **more})


def test_warm_up_trace_is_read_in_intervals_of_throughput_scaling(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 4, "output_length": 2} for at in (0, 500, 200_000)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    start = prepare_start(settings(load_predictor_warmup_trace=str(trace)), NOTHING)
    assert [one.num_req for one in start.warm_up] == [2.0, 1.0]
    load_only = settings(
        load_predictor_warmup_trace=str(trace), enable_throughput_scaling=False, enable_load_scaling=True
    )
    assert prepare_start(load_only, NOTHING).warm_up == []


def test_missing_profile_files_end_a_planner_that_has_no_other_source(tmp_path: Path) -> None:
    thorough = {"pre_deployment_sweeping_mode": "thorough", "profile_results_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="profile_results_dir"):
        prepare_start(settings(**thorough), NOTHING)
    assert prepare_start(settings(**thorough, enable_load_scaling=True), NOTHING).bootstrap == {}


def test_steps_that_workers_measured_have_precedence(tmp_path: Path) -> None:
    config = settings(pre_deployment_sweeping_mode="thorough", profile_results_dir=str(tmp_path), mode="decode")
    start = prepare_start(config, NOTHING, measured={EngineRole.DECODE: [STEP], EngineRole.PREFILL: [STEP]})
    assert start.bootstrap == {EngineRole.DECODE: [STEP]}
