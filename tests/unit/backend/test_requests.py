"""Requests of engines with iterators: consumed to their end, and cancelled when they do not end."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.backend.recorded_reply import RecordedReply

from dynamo.backend.requests import EngineLiveness, Requests
from dynamo.core.errors import EngineShutdown, Unknown
from dynamo.core.tasks import TaskOwner


@pytest.fixture
async def requests() -> AsyncIterator[Requests]:
    tasks = TaskOwner("test")
    yield Requests(tasks)
    await tasks.cancel_and_wait(5.0)


async def raising(error: Exception) -> None:
    raise error


async def test_request_exception_ends_its_reply(requests: Requests) -> None:
    known, other = RecordedReply(), RecordedReply()
    requests.begin(raising(EngineShutdown("gone")), known)
    requests.begin(raising(RuntimeError("CUDA")), other)
    async with asyncio.timeout(30):
        assert isinstance(await known.ended, EngineShutdown)
        assert isinstance(await other.ended, Unknown)
        await requests.drain()
    assert len(requests) == 0


async def test_dropped_request_receives_no_output_and_is_cancelled_after_its_grace_period(requests: Requests) -> None:
    reply, patient = RecordedReply(), RecordedReply()
    requests.begin(asyncio.Event().wait(), reply)  # type: ignore[arg-type]
    gate = asyncio.Event()

    async def late() -> None:
        await gate.wait()
        raise EngineShutdown("too late")

    requests.begin(late(), patient)
    requests.drop(reply, 0.0)
    requests.drop(patient)
    assert requests.is_dropped(patient)
    gate.set()
    async with asyncio.timeout(30):
        await requests.drain()
    assert not reply.ended.done()
    assert not patient.ended.done()
    assert not requests.is_dropped(patient)


def test_engine_death_is_reported_once_and_not_after_stop() -> None:
    life, reported = EngineLiveness(), []
    life.die(RuntimeError("before it began"))
    life.began(reported.append)
    life.check()
    life.die(RuntimeError("a"))
    life.die(RuntimeError("b"))
    assert [str(one) for one in reported] == ["a"]
    with pytest.raises(EngineShutdown):
        life.check()
    other = EngineLiveness()
    other.began(reported.append)
    other.stopped()
    other.die(RuntimeError("c"))
    assert len(reported) == 1
