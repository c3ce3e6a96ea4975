"""Agent context of a request."""

from typing import Any

import pytest

from dynamo.common.backend import agent_context


@pytest.mark.parametrize(
    ("context", "session_id"), [(None, None), ("x", None), ({"session_id": " s "}, "s"), ({"session_id": " "}, None)]
)
def test_session_id_is_found_in_an_agent_context(context: Any, session_id: str | None) -> None:
    assert agent_context.session_id_from_request({"agent_context": context}) == session_id
