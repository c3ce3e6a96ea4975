"""Tests for `dynamo.core.boundaries`."""

import asyncio
import logging

import pytest

from dynamo.core.boundaries import AsyncRollback, ErrorBoundary, Rollback, logged

FAILURES = [ValueError("broken"), asyncio.CancelledError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
async def test_rollback_undoes_after_every_kind_of_failure_and_raises_it(error: BaseException) -> None:
    undone: list[str] = []

    async def undo() -> None:
        undone.append("async")

    with pytest.raises(type(error)), Rollback(lambda: undone.append("sync")):
        raise error
    with pytest.raises(type(error)):
        async with AsyncRollback(undo):
            raise error
    assert undone == ["sync", "async"]


async def test_rollback_has_no_effect_after_success() -> None:
    async def undo() -> None:
        pytest.fail("undone")

    with Rollback(lambda: pytest.fail("undone")):
        pass
    async with AsyncRollback(undo):
        pass


def test_error_boundary_passes_the_error_on_and_continues() -> None:
    errors: list[Exception] = []
    with ErrorBoundary(errors.append):
        raise ValueError("broken")
    with ErrorBoundary(errors.append):
        pass
    assert [str(error) for error in errors] == ["broken"]


@pytest.mark.parametrize("error", FAILURES[1:], ids=repr)
def test_error_boundary_does_not_catch_cancellation_and_exits(error: BaseException) -> None:
    errors: list[Exception] = []
    with pytest.raises(type(error)), ErrorBoundary(errors.append):
        raise error
    assert errors == []


def test_logged_boundary_logs_message_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with logged(logging.getLogger("test"), "request %s failed", "r1"):
        raise ValueError("broken")
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "request r1 failed")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "broken"
