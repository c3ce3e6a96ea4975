"""Wire forms of scale requests, and the requests that are refused."""

from typing import Any

import msgspec
import pytest

from dynamo.protocols.scaling import MAX_NAME, MAX_TARGETS, ScaleRequest, ScaleResponse

REQUEST: dict[str, Any] = {
    "caller_namespace": "app",
    "graph_deployment_name": "graph",
    "k8s_namespace": "default",
    "target_replicas": [{"sub_component_type": "prefill", "desired_replicas": 3}],
}


def read(**changed: Any) -> ScaleRequest:
    return msgspec.convert({**REQUEST, **changed}, ScaleRequest)


def test_request_of_a_released_planner_is_read_with_its_defaults() -> None:
    request = read(timestamp=1.5, predicted_load=None, added_later=True)
    assert (request.blocking, request.timestamp, request.participant) == (False, 1.5, "default/graph")
    assert request.problem() is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"caller_namespace": ""}, "caller_namespace"),
        ({"graph_deployment_name": "x" * (MAX_NAME + 1)}, "graph_deployment_name"),
        ({"target_replicas": REQUEST["target_replicas"] * 2}, "more than once"),
        ({"target_replicas": REQUEST["target_replicas"] * (MAX_TARGETS + 1)}, "targets, at most"),
        ({"target_replicas": [{"sub_component_type": "decode", "desired_replicas": -1}]}, "desired_replicas -1"),
    ],
)
def test_invalid_request_names_its_field(changed: dict[str, Any], reason: str) -> None:
    problem = read(**changed).problem()
    assert problem is not None
    assert reason in problem


def test_unknown_role_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="sub_component_type"):
        read(target_replicas=[{"sub_component_type": "encode", "desired_replicas": 1}])


def test_response_has_all_fields_of_the_released_one() -> None:
    assert msgspec.to_builtins(ScaleResponse(status="rejected", message="no")) == {
        "status": "rejected",
        "message": "no",
        "current_replicas": {},
    }
