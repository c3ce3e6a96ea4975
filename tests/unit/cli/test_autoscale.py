"""Autoscaling of `dynamo serve`: settings of the planner, executed decisions, and its messages."""

import json
from typing import Any

import pytest

from dynamo.cli.autoscale import (
    Autoscaler,
    cause_of,
    explain,
    planner_settings,
    planner_variables,
    visible_devices,
)
from dynamo.cli.graph import PREFILL, WORKER, GraphLocation, plan
from dynamo.core.errors import ConfigError
from dynamo.core.supervisor import Process
from dynamo.planner.config.source import from_mapping


class RecordingSupervisor:
    """Supervisor that only records; processes named in `ended` are not running."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.ended: set[str] = set()

    def start(self, process: Process) -> None:
        self.calls.append(("start", process.name))

    def request_stop(self, name: str) -> bool:
        self.calls.append(("stop", name))
        return name not in self.ended

    def kill(self, names: list[str]) -> None:
        self.calls += [("kill", name) for name in names]


class ScriptedDecisions:
    """Follower whose decisions a test sets."""

    def __init__(self) -> None:
        self.next: dict[str, int] | None = None
        self.completed = 0

    def take(self) -> dict[str, int] | None:
        taken, self.next = self.next, None
        return taken

    def complete(self) -> None:
        self.completed += 1


@pytest.fixture
def scaling() -> tuple[Autoscaler, RecordingSupervisor, ScriptedDecisions]:
    graph = plan(
        GraphLocation(discovery="/kv", variables={}, python="python3"),
        engine="mocker",
        workers=1,
        max_workers=3,
        planner_config="{}",
    )
    supervisor, follower = RecordingSupervisor(), ScriptedDecisions()
    scaler = Autoscaler(graph, supervisor, follower, max_workers=3)  # type: ignore[arg-type]
    scaler.start()
    return scaler, supervisor, follower


def settings(given: dict[str, Any], prefill_workers: int = 0) -> dict[str, Any]:
    return planner_settings(given, workers=1, prefill_workers=prefill_workers, max_workers=3, namespace="dynamo")


def test_gpu_budget_counts_one_gpu_per_worker() -> None:
    found = settings({"max_gpu_budget": 100, "decode_engine_num_gpu": 4})
    assert (found["max_gpu_budget"], found["decode_engine_num_gpu"], found["min_endpoint"]) == (3, 1, 1)


def test_planner_policy_defaults_to_forecast() -> None:
    assert settings({})["scaling_policy"] == "forecast"
    for given in ({"optimization_target": "load"}, {"enable_load_scaling": True}):
        assert "scaling_policy" not in settings(given)


def test_prefill_workers_are_planned_in_disaggregated_mode() -> None:
    found = settings({}, prefill_workers=1)
    assert (found["mode"], found["prefill_min_endpoint"], found["decode_min_endpoint"]) == ("disagg", 1, 1)


def test_settings_that_contradict_the_command_line_are_refused() -> None:
    with pytest.raises(ConfigError, match="mode: 'disagg': must be 'agg' or absent with dynamo serve"):
        settings({"mode": "disagg"})


@pytest.mark.parametrize(("given", "expected"), [(2, 2), (100, 3), (-1, 3)])
def test_smaller_gpu_budget_of_the_settings_limits_the_workers(given: int, expected: int) -> None:
    assert settings({"max_gpu_budget": given})["max_gpu_budget"] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"namespace": "blue"}, r"namespace: 'blue': must be 'dynamo' or absent with dynamo serve \(--namespace\)"),
        ({"min_endpoint": 0}, "min_endpoint: 0: must be at least 1"),
    ],
)
def test_planner_setting_without_effect_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(given)


def test_settings_that_the_json_form_omits_reach_the_planner_as_variables() -> None:
    given = settings(
        {
            "metric_pulling_prometheus_endpoint": "http://prometheus:9090",
            "metric_pulling_prometheus_token": "secret",
            "metric_pulling_prometheus_extra_query_params": {"a": "1 2"},
        }
    )
    config = from_mapping(given | {"namespace": "blue"}, {})
    variables = planner_variables(config)
    assert from_mapping(config.as_json(), variables) == config
    assert "secret" not in json.dumps(config.as_json())


def test_decision_is_complete_when_its_processes_are_ready(
    scaling: tuple[Autoscaler, RecordingSupervisor, ScriptedDecisions],
) -> None:
    scaler, supervisor, follower = scaling
    follower.next = {WORKER: 3}
    assert scaler.step() == {WORKER: (1, 3)}
    assert supervisor.calls == [("start", "worker-1"), ("start", "worker-2"), ("start", "worker-3")]
    assert follower.completed == 1
    follower.next = {WORKER: 2}
    assert scaler.step() == {WORKER: (3, 2)}
    assert supervisor.calls[-1] == ("stop", "worker-3")
    assert follower.completed == 1
    scaler.replicas.exited("worker-3")
    assert scaler.step() == {}
    assert follower.completed == 2


def test_worker_waiting_for_a_restart_is_removed_when_stopped(
    scaling: tuple[Autoscaler, RecordingSupervisor, ScriptedDecisions],
) -> None:
    scaler, supervisor, follower = scaling
    follower.next = {WORKER: 2}
    scaler.step()
    supervisor.ended.add("worker-2")
    follower.next = {WORKER: 1}
    scaler.step()
    assert scaler.replicas.names == ["worker-1"]


def test_scaling_message_names_the_numbers_and_the_cause() -> None:
    decisions = [
        {"outcome": "accepted", "load_reason": "scale_up", "estimated_ttft_ms": 812.4},
        {"load_reason": "no_change"},
    ]
    assert explain({WORKER: (1, 2)}, decisions) == (
        "Scaling from 1 to 2 workers: the load exceeds what the present workers can serve within the targets; "
        "estimated TTFT 812 ms"
    )
    assert explain({PREFILL: (2, 1)}, []) == "Scaling from 2 to 1 prefill worker"


def test_unknown_scaling_reason_is_printed_as_its_name() -> None:
    assert cause_of({"load_reason": "held_over"}) == "the planner's reason is held_over"


def test_only_visible_gpus_are_used() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2, GPU-a"}) == ["2", "GPU-a"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_visible_gpus_are_deduplicated_like_in_cuda() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,0,1"}) == ["0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == ["0"]
