"""Dispatcher: running requests of a process, and its shutdown."""

import asyncio
import logging
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.errors import EngineShutdown, InvalidArgument, WorkerOverloaded, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.request_plane.base import Request
from dynamo.runtime.request_plane.reply import ReplyBase
from dynamo.runtime.server import Dispatcher, EndpointMetrics, ServeOptions

PATH = "1/n/c/e"


class SilentReply(ReplyBase):
    def __init__(self) -> None:
        super().__init__("r")
        self.end: Any = "open"

    def token(self, token_id: int) -> None:
        """Do nothing: the output does not matter here."""

    def item(self, value: Any) -> None:
        """Do nothing: the output does not matter here."""

    def write_end(self) -> None:
        self.end = None

    def write_error(self, error: BaseException) -> None:
        self.end = error


def begin(dispatcher: Dispatcher, body: bytes = b"") -> SilentReply:
    reply = SilentReply()
    dispatcher.admit(PATH).start(Request("r", body), reply)
    return reply


def leave_open(request: Request, reply: Any) -> None:
    """Handler whose response the test controls."""


async def test_idle_endpoint_drains_at_once_and_refuses_new_requests() -> None:
    dispatcher = Dispatcher()
    served = dispatcher.add(PATH, leave_open)
    assert await served.drain(0.0)
    with pytest.raises(EngineShutdown):
        dispatcher.admit(PATH)


async def test_endpoint_drain_waits_for_the_last_response() -> None:
    dispatcher = Dispatcher()
    served = dispatcher.add(PATH, leave_open)
    replies = [begin(dispatcher) for _ in range(2)]
    draining = asyncio.ensure_future(served.drain(5.0))
    await turns()
    replies[0].finish()
    await turns()
    assert not draining.done()
    assert dispatcher.inflight == 1
    replies[1].kill()
    assert await draining


async def test_endpoint_drain_times_out_and_cut_ends_open_requests_with_engine_shutdown() -> None:
    dispatcher = Dispatcher()
    served = dispatcher.add(PATH, leave_open)
    reply = begin(dispatcher)
    assert not await served.drain(0.0)
    served.cut()
    assert isinstance(reply.end, EngineShutdown)
    assert served.inflight == 0


def test_full_endpoint_accepts_a_request_after_another_ends() -> None:
    dispatcher = Dispatcher()
    dispatcher.add(PATH, leave_open, ServeOptions(inflight_max=1))
    reply = begin(dispatcher)
    with pytest.raises(WorkerOverloaded):
        begin(dispatcher)
    reply.finish()
    begin(dispatcher)


def test_removed_endpoint_is_unknown() -> None:
    dispatcher = Dispatcher()
    dispatcher.add(PATH, leave_open)
    dispatcher.remove(PATH)
    dispatcher.remove(PATH)
    with pytest.raises(WorkerUnavailable, match="unknown endpoint"):
        dispatcher.admit(PATH)


def test_handler_exception_ends_the_response_and_only_bugs_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher()

    def refuse(request: Request, reply: Any) -> None:
        raise InvalidArgument("no")

    def fail(request: Request, reply: Any) -> None:
        raise KeyError("bug")

    dispatcher.add(PATH, refuse)
    assert isinstance(begin(dispatcher).end, InvalidArgument)
    assert caplog.text == ""
    dispatcher.add(PATH, fail)
    assert isinstance(begin(dispatcher).end, KeyError)
    assert "Traceback" in caplog.text


def test_endpoint_request_metrics_have_upstream_names() -> None:
    registry = MetricsRegistry()
    dispatcher = Dispatcher()
    dispatcher.add(PATH, leave_open, None, EndpointMetrics(registry, EndpointId("n", "c", "e"), 255))
    running, cancelled, finished = (begin(dispatcher, b"12345") for _ in range(3))
    cancelled.kill()
    finished.finish()
    lines = registry.render().splitlines()
    labels = 'dynamo_namespace="n",dynamo_component="c",dynamo_endpoint="e",worker_id="ff"'
    for name, value in {
        "requests_total": 3, "cancellation_total": 1, "request_bytes_total": 15, "inflight_requests": 1,
        "request_duration_seconds_count": 2,
    }.items():  # fmt: skip
        assert f"dynamo_component_{name}{{{labels}}} {value}" in lines
    running.finish()


@pytest.mark.parametrize(
    ("is_internal", "headers", "lines"),
    [(False, {}, 2), (True, {}, 0), (True, {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}, 2)],
)
def test_polls_of_internal_endpoints_are_not_logged_unless_they_are_part_of_a_trace(
    caplog: pytest.LogCaptureFixture, is_internal: bool, headers: dict[str, str], lines: int
) -> None:
    dispatcher, reply = Dispatcher(), SilentReply()
    dispatcher.add(PATH, lambda _request, reply: reply.finish(), ServeOptions(is_internal=is_internal))
    with caplog.at_level(logging.INFO, "dynamo.lifecycle"):
        dispatcher.admit(PATH).start(Request("r", b"", headers=headers), reply)
    assert len(caplog.records) == lines
    assert reply.end is None
