"""Runtime limits: which updates are accepted, and the message of a refused one."""

import pytest

from dynamo.core.errors import HttpError
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.runtime_limits import limit_errors, limits_of, read_update, updated
from dynamo.protocols.planner import EngineCapabilities

ENGINES = WorkerCapabilities(
    prefill=EngineCapabilities(num_gpu=2, power_watts_per_replica=1000),
    decode=EngineCapabilities(num_gpu=4, power_watts_per_replica=2000),
)
DISAGG = parse({"environment": "virtual", "mode": "disagg", "max_gpu_budget": 12})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "request body must be valid JSON"),
        (b"\xff", 400, "request body must be valid JSON"),
        (b"[]", 400, "request body must be a JSON object"),
        (b"{}", 400, "request body must include at least one runtime configuration field"),
        (b'{"replicas": 1}', 400, "replicas: unknown field; must be one of"),
        (b'{"min_endpoint": null}', 422, "runtime configuration fields cannot be null"),
        (b'{"prefill_min_endpoint": 0}', 422, "prefill_min_endpoint: 0: must be a whole number of at least 1"),
        (b'{"max_gpu_budget": true}', 422, "max_gpu_budget: true: must be a whole number of at least -1"),
    ],
)
def test_malformed_update_names_the_cause(body: bytes, status: int, message: str) -> None:
    with pytest.raises(HttpError) as error:
        read_update(body)
    assert error.value.code == status
    assert str(error.value).startswith(message)


def test_update_changes_only_the_given_limits() -> None:
    changed = updated(DISAGG, {"prefill_min_endpoint": 2}, ENGINES)
    assert limits_of(changed) == {**limits_of(DISAGG), "prefill_min_endpoint": 2}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"min_endpoint": 2}, "fields are not active in mode='disagg': min_endpoint"),
        ({"min_gpu_budget": 13}, "min_gpu_budget=13 exceeds max_gpu_budget=12"),
        (
            {"decode_min_endpoint": 3},
            "minimum endpoint footprint requires 14 GPUs, exceeding max_gpu_budget=12",
        ),
    ],
)
def test_infeasible_update_is_refused(update: dict[str, int], message: str) -> None:
    with pytest.raises(HttpError) as error:
        updated(DISAGG, update, ENGINES)
    assert (error.value.code, str(error.value)) == (422, message)


def test_minimum_workers_above_the_power_limit_are_an_error() -> None:
    config = parse(
        {"environment": "kubernetes", "mode": "disagg", "enable_power_awareness": True, "total_gpu_power_limit": 2500}
    )
    assert limit_errors(config, ENGINES) == [
        "minimum endpoint footprint requires 3000W, exceeding total_gpu_power_limit=2500W"
    ]
