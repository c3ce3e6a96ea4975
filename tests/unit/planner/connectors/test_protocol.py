"""Scale requests under upstream's path."""

from typing import get_args

from dynamo.planner.connectors.protocol import ScaleResponse, ScaleStatus
from dynamo.protocols.scaling import ScaleResult


def test_statuses_are_those_of_responses() -> None:
    assert {one.value for one in ScaleStatus} == set(get_args(ScaleResult))
    assert str(ScaleResponse(status="rejected").status) == ScaleStatus.REJECTED
