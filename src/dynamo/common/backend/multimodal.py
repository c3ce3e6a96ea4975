"""Media in requests, and the handover from encode workers."""

from typing import Any, cast

from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.constants import DisaggregationMode


def extract_multimodal_kwargs(request: GenerateRequest) -> dict[str, Any] | None:
    """Return the request's `multi_modal_data` and `mm_processor_kwargs` as far as they are set; None without both."""
    found = {
        name: value
        for name, value in (
            ("multi_modal_data", request.get("multi_modal_data")),
            ("mm_processor_kwargs", request.get("mm_processor_kwargs")),
        )
        if value is not None
    }
    return found or None


def require_encoder_result(request: GenerateRequest, mode: DisaggregationMode) -> dict[str, Any]:
    """Return the request's `encoder_result`. Raise `ValueError` if it is absent or no object."""
    found: Any = request.get("encoder_result")
    match found:
        case dict() as result:
            return result
        case None:
            problem = f"{mode.value} worker received request with no encoder_result: no encode worker precedes it"
        case other:
            problem = f"encoder_result must be a JSON object, not {type(other).__name__}: {other!r}"
    raise ValueError(problem)


def encoder_terminal_chunk(
    encoder_result: dict[str, Any], *, completion_usage: dict[str, int] | None = None
) -> GenerateChunk:
    """Return the only chunk of an encode worker. Raise `TypeError` if `encoder_result` is no dictionary."""
    if not isinstance(encoder_result, dict):
        raise TypeError(f"encoder_result must be a dict, not {type(encoder_result).__name__}")
    parts = {"encoder_result": encoder_result, "completion_usage": completion_usage}
    present = {name: value for name, value in parts.items() if value is not None}
    return cast(GenerateChunk, {"token_ids": [], "index": 0, "finish_reason": "stop", **present})
