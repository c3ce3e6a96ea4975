"""Facts of a request: the pace of its output."""

import pytest

from dynamo.serving.request_facts import RequestFacts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1),
        ({"request_type": "unary", "last_s": 1.0}, 0.2),  # Not timed: until the end of the response.
        ({"output_tokens": 1}, None),
        ({"first_s": 0.0}, None),
    ],
)
def test_time_between_output_tokens(changes: dict[str, object], expected: float | None) -> None:
    values: dict[str, object] = {
        "request_id": "r", "model": "m", "endpoint": "e", "request_type": "stream", "started_s": 0.5,
        "first_s": 1.0, "last_s": 2.0, "ended_s": 3.0, "output_tokens": 11,
    }  # fmt: skip
    facts = RequestFacts(**(values | changes))  # type: ignore[arg-type]
    assert facts.itl_s == (None if expected is None else pytest.approx(expected))
