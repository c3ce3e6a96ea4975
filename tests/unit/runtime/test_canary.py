"""Canary: an idle endpoint is called through its own handler, and the result shows in its health."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns, until

from dynamo.core.clock import ManualClock
from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import ConfigError, EngineShutdown, ResponseTimeout, Unknown, WorkerOverloaded
from dynamo.protocols.engine import EngineOutput
from dynamo.runtime.canary import MARKER, Canary, CanaryOptions, check, watch
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import Dispatcher, Served, ServeOptions

# The decisions -----------------------------------------------------------------------------------------------------


def test_canary_check_is_due_after_the_interval_without_activity() -> None:
    canary = Canary(10.0, now=100.0)
    assert canary.due_s(alive_s=0.0) == 110.0
    assert canary.due_s(alive_s=105.0) == 115.0
    canary.checked(115.0, is_well=True)
    assert canary.due_s(alive_s=105.0) == 125.0


def test_canary_failure_is_cleared_by_a_successful_check_or_any_later_response() -> None:
    canary = Canary(10.0, now=0.0)
    canary.checked(10.0, is_well=False)
    canary.mark_alive(9.0)
    assert not canary.is_well
    canary.mark_alive(11.0)
    assert canary.is_well
    canary.checked(20.0, is_well=False)
    canary.checked(30.0, is_well=True)
    assert canary.is_well


@given(st.lists(st.tuples(st.sampled_from(["answer", "good", "bad"]), st.floats(0.001, 100)), max_size=30))
def test_canary_is_unhealthy_exactly_when_the_last_event_was_a_failed_check(steps: list[tuple[str, float]]) -> None:
    canary, now, alive, last = Canary(10.0, now=0.0), 0.0, -1.0, "good"
    for word, after in steps:
        now += after
        last = word
        if word == "answer":
            alive = now
        else:
            canary.checked(now, is_well=word == "good")
        canary.mark_alive(alive)
        assert canary.is_well == (last != "bad")
        assert canary.due_s(alive) == now + 10.0


# Requests ------------------------------------------------------------------------------------------------------------


def served_by(handler: Any, **options: Any) -> Served:
    return Dispatcher().add("1/n/c/generate", handler, ServeOptions(**options))


def answer(*elements: Any, end: bool = True, error: Exception | None = None) -> Any:
    def handle(request: Request, reply: Reply) -> None:
        for element in elements:
            if isinstance(element, int):
                reply.token(element)
            else:
                reply.item(element)
        if error is not None:
            reply.fail(error)
        elif end:
            reply.finish()

    return handle


@pytest.mark.parametrize(
    ("handler", "verdict"),
    [
        (answer(7), None),
        (answer({"token_ids": [7]}), None),
        (answer(EngineOutput([7], 0, finish_reason="length")), None),
        (answer(7, end=False), None),
        (answer(), Unknown),
        (answer(end=False), ResponseTimeout),
        (answer(7, error=Unknown("the engine broke")), Unknown),
        (answer(EngineOutput([], 0, finish_reason="error: no memory")), Unknown),
        (answer({"finish_reason": "error: no memory"}), Unknown),
    ],
)
async def test_canary_response_is_successful_with_an_element_and_no_error(handler: Any, verdict: type | None) -> None:
    served = served_by(handler)
    error = await check(served, b"", "msgpack", timeout_s=0.01)
    assert type(error) is (verdict or type(None))
    assert served.inflight == 0


async def test_canary_handler_exception_is_a_failed_check() -> None:
    def handle(request: Request, reply: Reply) -> None:
        raise ValueError("boom")

    assert isinstance(await check(served_by(handle), b"", "msgpack", 1.0), ValueError)


async def test_canary_ignores_a_worker_that_is_full_or_draining() -> None:
    assert isinstance(await check(served_by(answer(7), inflight_max=0), b"", "msgpack", 1.0), WorkerOverloaded)
    served = served_by(answer(7))
    await served.drain(0.0)
    assert isinstance(await check(served, b"", "msgpack", 1.0), EngineShutdown)


# Watching ----------------------------------------------------------------------------------------------------------


class CanaryHarness:
    """Monitored endpoint, on a manual clock."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.received_requests: list[Any] = []
        self.error: Exception | None = None
        self.reports: list[bool] = []
        self.served = served_by(self.handle, **options)
        self.served.alive_s = 0.0
        work = watch(
            self.served, {"token_ids": [1]}, "msgpack", CanaryOptions(timeout_s=0.01), self.clock, self.reports.append
        )
        self.task = asyncio.ensure_future(work)

    def handle(self, request: Request, reply: Reply) -> None:
        self.received_requests.append(msgpack_decode(request.body))
        answer(7, error=self.error)(request, reply)
        self.served.alive_s = 0.0  # The real clock has no place here.

    async def after(self, seconds: float) -> bool:
        """Return the state after that time."""
        await self.settle()
        self.clock.advance(seconds)
        await self.settle()
        return self.reports[-1]

    async def settle(self) -> None:
        await turns(10)


@pytest.fixture
async def harness() -> AsyncIterator[CanaryHarness]:
    made = CanaryHarness()
    yield made
    made.task.cancel()
    await asyncio.wait({made.task})


async def test_canary_sends_its_marked_payload_to_an_idle_endpoint(harness: CanaryHarness) -> None:
    assert await harness.after(9.9)
    assert harness.received_requests == []
    assert await harness.after(0.1)
    assert harness.received_requests == [{"token_ids": [1], MARKER: True}]
    assert await harness.after(10)
    assert len(harness.received_requests) == 2


async def test_canary_failure_is_reported_until_the_next_successful_response(
    harness: CanaryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.error = Unknown("the engine broke")
    assert not await harness.after(10)
    assert not await harness.after(10)
    assert caplog.text.count("health check of 1/n/c/generate failed: the engine broke") == 1
    harness.error = None
    assert await harness.after(10)


async def test_canary_does_not_probe_a_busy_endpoint(harness: CanaryHarness) -> None:
    for _ in range(5):
        await harness.after(9)
        harness.served.alive_s = harness.clock.now()
    assert harness.received_requests == []


async def test_canary_ends_with_its_endpoint(harness: CanaryHarness) -> None:
    await harness.served.drain(0.0)
    await harness.after(10)
    assert harness.task.done()


async def test_canary_failed_check_makes_the_process_unready_until_a_successful_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_HEALTH_CHECK_ENABLED", "true")
    monkeypatch.setenv("DYN_CANARY_WAIT_TIME", "0.005")
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    is_broken = True

    def handle(request: Request, reply: Reply) -> None:
        answer(7, error=Unknown("broken") if is_broken else None)(request, reply)

    await runtime.endpoint("ns.comp.generate").serve(handle, ServeOptions(health_check_payload={}))
    runtime.set_health_status(True)
    async with asyncio.timeout(5):
        await until(lambda: not runtime.health.is_ready())
        assert json.loads(runtime.health.render())["endpoints"] == {"generate": "notready"}
        is_broken = False
        await until(runtime.health.is_ready)
    await runtime.shutdown()


# The settings ------------------------------------------------------------------------------------------------------


def test_canary_is_off_by_default() -> None:
    assert CanaryOptions.from_variables({}) is None
    assert CanaryOptions.from_variables({"DYN_HEALTH_CHECK_ENABLED": "1"}) == CanaryOptions(10.0, 3.0, None)


def test_canary_payload_is_json_or_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "payload.json"
    file.write_text('{"prompt": "hi"}')
    for text in ('{"prompt": "hi"}', f"@{file}"):
        options = CanaryOptions.from_variables({"DYN_HEALTH_CHECK_ENABLED": "1", "DYN_HEALTH_CHECK_PAYLOAD": text})
        assert options is not None
        assert options.payload == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_CANARY_WAIT_TIME", "0"),
        ("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "-1"),
        ("DYN_HEALTH_CHECK_PAYLOAD", "{nonsense"),
        ("DYN_HEALTH_CHECK_PAYLOAD", "@no/such/file"),
    ],
)
def test_canary_error_names_a_wrong_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CanaryOptions.from_variables({"DYN_HEALTH_CHECK_ENABLED": "1", name: value})
