"""The life of a reply."""

from typing import Any

import pytest

from dynamo.core.errors import Cancelled
from dynamo.runtime.request_plane.reply import ReplyBase


class Written(ReplyBase):
    def __init__(self) -> None:
        super().__init__("r")
        self.ends: list[Any] = []
        self.done: list[Any] = []
        self.on_done(lambda _, error: self.done.append(error))

    def token(self, token_id: int) -> None:
        self.ends.append(token_id)

    def item(self, value: Any) -> None:
        self.ends.append(value)

    def write_end(self) -> None:
        self.ends.append(None)

    def write_error(self, error: BaseException) -> None:
        self.ends.append(error)


def test_reply_ends_once() -> None:
    error = ValueError()
    reply = Written()
    reply.fail(error)
    reply.finish()
    reply.fail(ValueError())
    reply.kill()
    assert (reply.ends, reply.done) == ([error], [error])
    assert not reply.is_cancelled


def test_reply_stop_calls_back_once_and_does_not_end_the_reply() -> None:
    reply = Written()
    calls: list[int] = []
    reply.on_cancel(lambda: calls.append(1))
    reply.stop()
    reply.stop()
    assert (calls, reply.is_cancelled, reply.is_killed, reply.done) == ([1], True, False, [])
    reply.finish()
    assert (reply.ends, reply.done) == ([None], [None])


def test_reply_kill_ends_the_reply_and_discards_output() -> None:
    reply = Written()
    calls: list[int] = []
    reply.on_cancel(lambda: calls.append(1))
    reply.stop()
    reply.kill()
    reply.finish()
    assert calls == [1]
    assert reply.is_killed
    assert reply.ends == []
    assert [type(error) for error in reply.done] == [Cancelled]


def test_reply_callback_added_after_the_end_is_never_called() -> None:
    reply = Written()
    reply.finish()
    reply.on_cancel(lambda: pytest.fail("called"))
    reply.kill()


def test_reply_failing_callback_does_not_prevent_the_others(caplog: pytest.LogCaptureFixture) -> None:
    reply = Written()
    calls: list[int] = []
    reply.on_cancel(lambda: calls.append(int("no")))
    reply.on_cancel(lambda: calls.append(1))
    reply.kill()
    assert calls == [1]
    assert "callback of request r failed" in caplog.text
