"""State that a connection keeps of its last response."""

from dynamo.api.responses.session import ResponseSession
from dynamo.protocols.response_items import MessageItem, OutputText
from dynamo.protocols.responses import Response


def response(id: str) -> Response:
    return Response(id=id, created_at=1, model="m", output=[MessageItem("assistant", [OutputText(id)])])


def test_session_continues_its_last_response_only() -> None:
    session = ResponseSession()
    requested = [MessageItem("user", "hi")]
    assert session.history("a") is None
    session.remember(response("a"), requested)
    assert session.history("a") == [*requested, *response("a").output]
    session.remember(response("b"), requested)
    assert session.history("a") is None and session.history("b") is not None


def test_session_removes_only_the_named_response() -> None:
    session = ResponseSession()
    session.remember(response("a"), [])
    session.forget("b")
    assert session.history("a") is not None
    session.forget("a")
    assert session.history("a") is None
