"""Control API compared with the released planner's: the same statuses and bodies for the same requests, in every mode."""

import json
import random
from typing import Any

import pytest
from tests.asgi import request_json
from tests.conformance.planner_cases import released

from dynamo.planner.config.planner_config import PlannerConfig, parse
from dynamo.planner.control_api import control_routes
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.runtime_limits import limits_of, updated
from dynamo.protocols.planner import EngineCapabilities

pytestmark = pytest.mark.conformance

FIELDS = ("min_endpoint", "prefill_min_endpoint", "decode_min_endpoint", "min_gpu_budget", "max_gpu_budget")
MALFORMED = [
    "",
    "{",
    "[]",
    "3",
    "null",
    '{"x": 1}',
    "{}",
    '{"max_gpu_budget": null}',
    '{"x": 1, "min_gpu_budget": "a"}',
]
VALUES = [-2, -1, 0, 1, 1, 2, 2, 3, 8, 40, True, 1.0, 1.5, "2", None, [1]]


class LimitsHolder:
    """Owner of a configuration without a planner."""

    def __init__(self, config: PlannerConfig, capabilities: WorkerCapabilities) -> None:
        self.config, self._capabilities = config, capabilities

    async def limits(self) -> dict[str, Any]:
        return limits_of(self.config)

    async def set_limits(self, update: dict[str, int]) -> dict[str, Any]:
        self.config = updated(self.config, update, self._capabilities)
        return limits_of(self.config)


def control_case(rng: random.Random) -> dict[str, Any]:
    """Return a configuration and a series of requests."""
    mode = rng.choice(["agg", "disagg", "prefill", "decode"])
    requests: list[tuple[str, str | None]] = [("GET", None)]
    for _ in range(12):
        fields = rng.sample(FIELDS, rng.choice([1, 1, 2, 3]))
        update = {name: rng.choice(VALUES[1:9] if rng.random() < 0.7 else VALUES) for name in fields}
        requests.append(("PATCH", rng.choice(MALFORMED) if rng.random() < 0.2 else json.dumps(update)))
    requests += [("GET", None), ("POST", "{}"), ("DELETE", None)]
    return {
        "config": {
            "mode": mode,
            "environment": "virtual",
            "min_endpoint": rng.choice([1, 2]),
            "max_gpu_budget": rng.choice([-1, 8, 20]),
        },
        "gpus": [rng.choice([None, 1, 4]) if mode != "decode" else None, rng.choice([1, 2])],
        "requests": requests,
    }


async def answers(case: dict[str, Any]) -> list[Any]:
    """Return status and body of each request to ours."""
    engines = [None if one is None else EngineCapabilities(num_gpu=one) for one in case["gpus"]]
    holder = LimitsHolder(parse(case["config"]), WorkerCapabilities(prefill=engines[0], decode=engines[1]))
    application = control_routes(holder).application()
    return [
        [*await request_json(application, method, "/v1/min-endpoints", (body or "").encode())]
        for method, body in case["requests"]
    ]


async def test_control_api_responses_equal_the_released_ones() -> None:
    rng = random.Random(7)
    given = [control_case(rng) for _ in range(150)]
    statuses = set()
    for case, expected in zip(given, released("control", given), strict=True):
        for request, ours, theirs in zip(case["requests"], await answers(case), expected, strict=True):
            statuses.add((ours[0], request[0]))
            if theirs[1] is not None and "validation error" in str(theirs[1].get("error")):
                theirs[1] = ours[1]  # The text of the released validation library.
            if theirs[0] == 405:
                theirs[1] = ours[1]
            assert ours == theirs, (case["config"], request)
    assert {(200, "GET"), (200, "PATCH"), (400, "PATCH"), (422, "PATCH"), (405, "POST")} <= statuses
