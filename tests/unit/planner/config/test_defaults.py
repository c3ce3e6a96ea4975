"""Defaults of the planner under upstream's path."""

import dynamo.planner
from dynamo.planner.config.defaults import SLAPlannerDefaults, SubComponentType, TargetReplica, defaults
from dynamo.planner.config.planner_config import PlannerConfig


def test_planner_defaults_equal_those_of_the_settings() -> None:
    config = PlannerConfig()
    found = defaults()
    assert found["ttft_ms"] == config.ttft_ms
    assert found["max_gpu_budget"] == config.max_gpu_budget
    assert all(getattr(SLAPlannerDefaults, name) == value for name, value in found.items())


def test_planner_roles_are_strings() -> None:
    assert str(SubComponentType.PREFILL) == "prefill"
    assert dynamo.planner.SubComponentType is SubComponentType
    target = TargetReplica(sub_component_type=SubComponentType.DECODE.value, desired_replicas=2)
    assert str(target.sub_component_type) == SubComponentType.DECODE
