"""Media of requests, and encode workers."""

from typing import Any

import pytest

from dynamo.common.backend import multimodal
from dynamo.common.constants import DisaggregationMode


def test_media_and_encoder_results_pass_unchanged() -> None:
    request: Any = {"token_ids": [], "multi_modal_data": {}, "mm_processor_kwargs": None}
    assert multimodal.extract_multimodal_kwargs(request) == {"multi_modal_data": {}}
    assert multimodal.encoder_terminal_chunk({}, completion_usage={"total_tokens": 1}) == {
        "token_ids": [],
        "index": 0,
        "finish_reason": "stop",
        "encoder_result": {},
        "completion_usage": {"total_tokens": 1},
    }
    with pytest.raises(ValueError, match="prefill worker received request with no encoder_result"):
        multimodal.require_encoder_result({"token_ids": [1]}, DisaggregationMode.PREFILL)
