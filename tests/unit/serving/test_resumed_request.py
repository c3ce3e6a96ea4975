"""The request that continues a stream has the tokens so far as its prompt and the remaining limits."""

import pytest

from dynamo.backend.request_fields import thinking_budget
from dynamo.protocols.engine import (
    PreprocessedRequest,
    Resumed,
    StopConditions,
    resumed_of,
)
from dynamo.serving.resumed_request import resumed


def test_exhausted_token_budget_is_not_resumed() -> None:
    request = PreprocessedRequest("m", [1], stop_conditions=StopConditions(max_tokens=2))
    assert resumed(request, [5, 6]) is None
    assert resumed(PreprocessedRequest("m", [1]), [5, 6]) is not None


@pytest.mark.parametrize(("thought", "left", "noted"), [(0, 5, 0), (3, 2, 3), (9, 0, 5)])
def test_resumed_request_has_the_remaining_thinking_budget(thought: int, left: int, noted: int) -> None:
    request = PreprocessedRequest("m", [1], stop_conditions=StopConditions(max_thinking_tokens=5))
    again = resumed(request, [7] * 9, thought)
    assert again is not None
    assert again.stop_conditions.max_thinking_tokens == left
    assert resumed_of(again) == Resumed(9, noted)
    assert thinking_budget(again) == 5, "vLLM counts the thoughts at the end of the prompt itself"
