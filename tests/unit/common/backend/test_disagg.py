"""Handover between prefill and decode workers."""

from typing import Any

import pytest

from dynamo.common.backend import disagg
from dynamo.common.constants import DisaggregationMode


def test_prefill_limits_a_request_in_place_and_decode_requires_its_result() -> None:
    request: Any = {"token_ids": [1], "stop_conditions": {"max_tokens": 5, "min_tokens": 2}}
    assert disagg.enforce_prefill_max_tokens(request) is request
    assert request["stop_conditions"] == {"max_tokens": 1, "min_tokens": 2}
    with pytest.raises(ValueError, match="decode worker received request without prefill_result"):
        disagg.require_prefill_result({"token_ids": [1]}, DisaggregationMode.DECODE)
