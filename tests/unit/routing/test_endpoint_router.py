"""EndpointRouter: requests of Python callers, read and sent to a worker."""

from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.decision import Decision
from dynamo.routing.endpoint_router import read_request, sent_as


def sent(request: dict[str, Any]) -> dict[str, Any]:
    decision = Decision("r", 1, 2, 0, 0, 0, 1, 0.0, None)  # type: ignore[arg-type]
    return sent_as(request, read_request(request), decision)


def test_field_that_is_none_is_absent() -> None:
    request = {"model": "m", "token_ids": [1], "extra_args": None, "routing": None, "multi_modal_data": None}
    assert read_request(request).token_ids == [1]
    assert not {"extra_args", "multi_modal_data"} & sent(request).keys()


def test_request_is_sent_with_the_callers_fields_and_the_chosen_rank() -> None:
    request = {"token_ids": [1], "routing": {"priority": 3, "own": 1}, "own": None, "extra_args": {"a": 1}}
    found = sent(request)
    assert (found["routing"]["dp_rank"], found["routing"]["own"]) == (2, 1)
    assert (found["own"], found["extra_args"]) == (None, {"a": 1})


def test_malformed_request_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="token_ids"):
        read_request({"token_ids": "text"})
