"""Throughput scaling: the workers for the predicted traffic, and lower bounds."""

import pytest
from tests.unit.planner.core.scaling_states import SLA, TRAFFIC, state, steps

from dynamo.planner.core.reasons import ThroughputReason
from dynamo.planner.core.scaling import Traffic
from dynamo.planner.core.throughput_scaling import propose_throughput
from dynamo.protocols.planner import FpmObservations, ScalingDecision


def test_throughput_scaling_without_a_model_holds() -> None:
    found = propose_throughput(state(SLA), TRAFFIC, 60.0)
    assert (found.decision, found.reason) == (None, ThroughputReason.MODEL_NOT_READY)


@pytest.mark.parametrize(("limit", "expected"), [(2, 4), (100, 8)])
def test_throughput_scaling_changes_at_most_the_configured_number_of_replicas(limit: int, expected: int) -> None:
    made = state(SLA | {"max_throughput_scaling_replicas": limit, "itl_ms": 500.0})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    rate = propose_throughput(made, TRAFFIC, 60.0).engine_rps_decode
    assert rate is not None
    found = propose_throughput(made, Traffic(num_req=rate * 60 * 7.5, isl=1000.0, osl=100.0), 60.0)
    assert found.decision == ScalingDecision(num_decode=expected)


def test_throughput_scaling_sets_lower_bounds_if_load_scaling_decides() -> None:
    made = state(SLA | {"enable_load_scaling": True})
    for kv in (1000, 20_000, 40_000):
        made.observe_steps(FpmObservations(decode=steps(1, kv=kv)))
    found = propose_throughput(made, Traffic(num_req=6000.0, isl=1000.0, osl=100.0), 60.0)
    assert (found.decision, found.reason) == (None, ThroughputReason.SET_LOWER_BOUND)
    assert made.lower_bounds["decode"] > 2
