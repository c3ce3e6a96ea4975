"""TracedReply: a span that ends as its answer ends."""

from typing import Any

from dynamo.backend.traced import TracedReply
from dynamo.core.errors import Cancelled, Unknown
from dynamo.protocols.engine import CompletionUsage, EngineOutput


class FakeSpan:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.ends: list[BaseException | None] = []

    def headers(self) -> dict[str, str]:
        return {}

    def set(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def event(self, name: str, facts: Any) -> None: ...

    def set_status(self, *, is_well: bool, why: str = "") -> None: ...

    def end(self, error: BaseException | None = None) -> None:
        self.ends.append(error)


class FakeReply:
    request_id = "r"

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.is_cancelled = False

    def on_cancel(self, callback: Any) -> None:
        self.said.append(callback)

    def token(self, token_id: int) -> None:
        self.said.append(token_id)

    def item(self, value: Any) -> None:
        self.said.append(value)

    def finish(self) -> None:
        self.said.append("end")

    def fail(self, error: BaseException) -> None:
        self.said.append(error)


def traced() -> tuple[TracedReply, FakeReply, FakeSpan]:
    reply, span = FakeReply(), FakeSpan()
    return TracedReply(reply, span), reply, span


def test_everything_reaches_the_reply_and_the_last_item_its_counts() -> None:
    one, reply, span = traced()
    last = EngineOutput([2], 0, finish_reason="length", completion_usage=CompletionUsage(5, 2, 7))
    one.token(1)
    one.item({"anything": 1})
    one.item(last)
    one.finish()
    assert reply.said == [1, {"anything": 1}, last, "end"]
    assert span.facts == {"finish_reason": "length", "input_tokens": 5, "output_tokens": 2}
    assert span.ends == [None]


def test_a_token_is_the_replys_own() -> None:
    one, reply, _ = traced()
    assert one.token == reply.token


def test_an_error_and_a_cancellation_are_in_the_span() -> None:
    one, reply, span = traced()
    error = Unknown("broken")
    one.fail(error)
    assert (reply.said, span.ends) == ([error], [error])
    one, reply, span = traced()
    reply.is_cancelled = True
    assert one.is_cancelled
    one.finish()
    assert isinstance(span.ends[0], Cancelled)
