"""Runtime limits: the minimum workers and GPU budgets that may be changed while a planner runs. Pure.

Statuses and messages are those of the released control API, except for a value of the wrong type or range: the released text is that
of its validation library, ours names field, value and what is allowed.
"""

import dataclasses
import json
from typing import Any

from dynamo.core.errors import HttpError
from dynamo.planner.config.planner_config import Mode, PlannerConfig
from dynamo.planner.core.scaling import WorkerCapabilities

FLOORS = {
    Mode.AGG: ("min_endpoint",),
    Mode.PREFILL: ("prefill_min_endpoint",),
    Mode.DECODE: ("decode_min_endpoint",),
    Mode.DISAGG: ("prefill_min_endpoint", "decode_min_endpoint"),
}
BUDGETS = ("min_gpu_budget", "max_gpu_budget")
SMALLEST = {
    "min_endpoint": 0,
    "prefill_min_endpoint": 1,
    "decode_min_endpoint": 1,
    "min_gpu_budget": -1,
    "max_gpu_budget": -1,
}
LARGEST = (1 << 31) - 1


def limits_of(config: PlannerConfig) -> dict[str, Any]:
    """Return the body of `GET /v1/min-endpoints`."""
    values = {
        "min_endpoint": config.min_endpoint,
        "prefill_min_endpoint": config.prefill_floor,
        "decode_min_endpoint": config.decode_floor,
    }
    return {
        "mode": config.mode.value,
        **{name: values[name] for name in FLOORS[config.mode]},
        **{name: getattr(config, name) for name in BUDGETS},
    }


def read_update(body: bytes) -> dict[str, int]:
    """Return the fields of the body of `PATCH /v1/min-endpoints`. Raise `HttpError`."""
    try:
        found = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise HttpError(400, "request body must be valid JSON") from None
    if not isinstance(found, dict):
        raise HttpError(400, "request body must be a JSON object")
    unknown = sorted(found.keys() - SMALLEST.keys())
    if unknown:
        raise HttpError(400, f"{unknown[0]}: unknown field; must be one of {', '.join(SMALLEST)}")
    for name, value in found.items():
        if value is not None:
            _check_value(name, value)
    if not found:
        raise HttpError(400, "request body must include at least one runtime configuration field")
    if None in found.values():
        raise HttpError(422, "runtime configuration fields cannot be null")
    return found


def _check_value(name: str, value: Any) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not SMALLEST[name] <= value <= LARGEST:
        shown = json.dumps(value)
        raise HttpError(
            422, f"{name}: {shown[:100]}: must be a whole number of at least {SMALLEST[name]} and at most {LARGEST}"
        )


def updated(config: PlannerConfig, update: dict[str, int], capabilities: WorkerCapabilities) -> PlannerConfig:
    """Return the configuration with other limits. Raise `HttpError` if they are of another mode or contradict each other."""
    inactive = sorted(update.keys() - {*FLOORS[config.mode], *BUDGETS})
    if inactive:
        raise HttpError(422, f"fields are not active in mode='{config.mode.value}': {', '.join(inactive)}")
    changed = dataclasses.replace(config, **update)  # type: ignore[arg-type]
    errors = limit_errors(changed, capabilities)
    if errors:
        raise HttpError(422, "; ".join(errors))
    return changed


def limit_errors(config: PlannerConfig, capabilities: WorkerCapabilities) -> list[str]:
    """Return why the minimum workers and the budgets cannot be met together; a cost that is unknown is not counted."""
    errors = []
    if 0 <= config.max_gpu_budget < config.min_gpu_budget:
        errors.append(f"min_gpu_budget={config.min_gpu_budget} exceeds max_gpu_budget={config.max_gpu_budget}")
    scaled = [
        (floor, engine)
        for is_scaled, floor, engine in (
            (config.mode.scales_prefill, config.prefill_floor, capabilities.prefill),
            (config.mode.scales_decode, config.decode_floor, capabilities.decode),
        )
        if is_scaled
    ]
    gpus = sum(floor * (engine.gpus_per_replica or 0) for floor, engine in scaled if engine is not None)
    if 0 <= config.max_gpu_budget < gpus:
        errors.append(
            f"minimum endpoint footprint requires {gpus} GPUs, exceeding max_gpu_budget={config.max_gpu_budget}"
        )
    limit = config.total_gpu_power_limit
    watts = [(floor, engine.power_watts_per_replica if engine else None) for floor, engine in scaled]
    required = sum(floor * (one or 0) for floor, one in watts)
    if limit is not None and all(one is not None for _, one in watts) and required > limit:
        errors.append(f"minimum endpoint footprint requires {required}W, exceeding total_gpu_power_limit={limit}W")
    return errors
