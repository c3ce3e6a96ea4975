"""Handover between prefill and decode workers in requests as dictionaries."""

from typing import Any

from dynamo.common.backend.engine import GenerateRequest
from dynamo.common.constants import DisaggregationMode


def enforce_prefill_max_tokens(request: GenerateRequest) -> GenerateRequest:
    """Limit the request to one output token, in place, and return it. For prefill workers."""
    request.setdefault("stop_conditions", {})["max_tokens"] = 1
    return request


def extract_prefill_result(request: GenerateRequest) -> dict[str, Any] | None:
    """Return the `prefill_result` that the frontend adds to requests for decode workers; None if it is absent."""
    return request.get("prefill_result")


def require_prefill_result(request: GenerateRequest, mode: DisaggregationMode) -> dict[str, Any]:
    """Return the `prefill_result`. Raise `ValueError` if it is absent."""
    result = extract_prefill_result(request)
    if result is None:
        raise ValueError(
            f"{mode.value} worker received request without prefill_result: it was not routed through a prefill worker"
        )
    return result
