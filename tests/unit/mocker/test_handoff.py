"""A prefill worker and a decode worker meet over one request, or hear that they will not."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo.core.errors import WorkerUnavailable
from dynamo.mocker.handoff import Handoff, HandoffServer
from dynamo.protocols.engine import BootstrapInfo

HOST = "127.0.0.1"
WAIT_S = 10.0


@pytest.fixture
async def place() -> AsyncIterator[tuple[HandoffServer, int]]:
    server = HandoffServer(timeout_s=WAIT_S)
    port = await server.open(HOST, 0)
    yield server, port
    await server.close()


def decode_side(port: int, room: int = 7, timeout_s: float = WAIT_S) -> Handoff:
    return Handoff(BootstrapInfo(HOST, port, room), timeout_s)


@pytest.mark.parametrize("decode_first", [True, False])
async def test_they_meet_whoever_comes_first(place: tuple[HandoffServer, int], decode_first: bool) -> None:
    server, port = place
    gone = asyncio.Event()
    side = decode_side(port)
    if decode_first:
        waiting = asyncio.create_task(side.ready())
        await asyncio.sleep(0)
        server.computed(7, gone.set)
        await waiting
    else:
        server.computed(7, gone.set)
        await side.ready()
    assert not gone.is_set(), "the blocks are held until they were taken over"
    await side.done()
    await asyncio.wait_for(gone.wait(), WAIT_S)


async def test_decode_hears_that_the_prefill_is_lost(place: tuple[HandoffServer, int]) -> None:
    server, port = place
    server.lost(7)
    side = decode_side(port)
    with pytest.raises(WorkerUnavailable, match="cancelled"):
        await side.ready()
    await side.done()


async def test_nobody_there_is_an_error_that_may_be_tried_elsewhere(place: tuple[HandoffServer, int]) -> None:
    server, port = place
    await server.close()
    with pytest.raises(WorkerUnavailable, match="cannot be met"):
        await decode_side(port).ready()


async def test_decode_waits_no_longer_than_a_session_lasts(place: tuple[HandoffServer, int]) -> None:
    side = decode_side(place[1], timeout_s=0.05)
    with pytest.raises(WorkerUnavailable, match="timed out"):
        await side.ready()
    await side.done()


async def test_blocks_that_nobody_comes_for_are_let_go() -> None:
    server = HandoffServer(timeout_s=0.01)
    gone = asyncio.Event()
    server.computed(1, gone.set)
    await asyncio.wait_for(gone.wait(), WAIT_S)
    await server.close()


async def test_closing_lets_everything_go(place: tuple[HandoffServer, int]) -> None:
    gone = asyncio.Event()
    place[0].computed(1, gone.set)
    await place[0].close()
    assert gone.is_set()
