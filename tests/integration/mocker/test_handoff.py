"""Bootstrap of one request between a prefill worker and a decode worker, with its failures."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import WorkerUnavailable
from dynamo.mocker.handoff import Handoff, HandoffServer
from dynamo.mocker.simulation.rules import EngineType, TransferRules
from dynamo.protocols.engine import BootstrapInfo

HOST = "127.0.0.1"
WAIT_S = 60.0
HANDOFF_ID = bytes(range(16))
IDENTITY = {
    "handoff_id": "00010203-0405-0607-0809-0a0b0c0d0e0f",
    "bootstrap_room": 7,
    "request_id": "r-1",
}


class WatchedClock(ManualClock):
    """A clock that records its sleepers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_slept = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        asyncio.get_running_loop().call_soon(self.is_slept.set)
        await super().sleep(seconds)


class Place:
    """Prefill worker's side, on a manual clock."""

    def __init__(self, engine_type: EngineType = "vllm", *, only_missing: bool = False, timeout_s: float = WAIT_S):
        self.clock = WatchedClock()
        rules = TransferRules(1_000_000, 1.0, only_missing)
        self.server = HandoffServer(timeout_s, engine_type, rules, self.clock)
        self.engine_type = engine_type
        self.port = 0

    async def __aenter__(self) -> Self:
        self.port = await self.server.open(HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def decode(self, timeout_s: float = WAIT_S, engine_type: EngineType | None = None) -> Handoff:
        info = BootstrapInfo(HOST, self.port, 7, HANDOFF_ID)
        return Handoff(info, "r-1", engine_type or self.engine_type, timeout_s)


class Decode:
    """Request of the decode worker."""

    def __init__(self, tokens: int = 32) -> None:
        self.reserved = asyncio.Event()
        self.active = asyncio.Event()
        self._tokens = tokens

    async def reserve(self) -> int:
        self.reserved.set()
        return self._tokens

    async def take(self, handoff: Handoff) -> None:
        await handoff.receive(self.reserve, self.active.set)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with Place() as made:
        yield made


async def travel(place: Place, ms: float) -> None:
    """Wait until the blocks are in transit, and for the duration of the transfer."""
    await asyncio.wait_for(place.clock.is_slept.wait(), WAIT_S)
    place.clock.advance(ms / 1000)


@pytest.mark.parametrize("decode_is_first", [True, False])
async def test_handoff_completes_in_either_order_of_arrival(place: Place, decode_is_first: bool) -> None:
    gone, decode = asyncio.Event(), Decode()
    taking = asyncio.create_task(decode.take(place.decode())) if decode_is_first else None
    if decode_is_first:
        await turns()
    place.server.computed(7, 20, gone.set)
    taking = taking or asyncio.create_task(decode.take(place.decode()))
    await asyncio.wait_for(decode.reserved.wait(), WAIT_S)
    await travel(place, 19)
    assert not decode.active.is_set(), "20 tokens of a megabyte take 20 ms at 1 GB/s"
    assert not gone.is_set(), "the blocks are held until they were taken over"
    place.clock.advance(0.001)
    await asyncio.wait_for(taking, WAIT_S)
    assert decode.active.is_set()
    await asyncio.wait_for(gone.wait(), WAIT_S)


async def test_handoff_skips_blocks_cached_at_the_destination() -> None:
    async with Place(only_missing=True) as place:
        decode = Decode(tokens=4)
        taking = asyncio.create_task(decode.take(place.decode()))
        place.server.computed(7, 20, lambda: None)
        await travel(place, 4)
        await asyncio.wait_for(taking, WAIT_S)


async def test_sglang_reserves_before_the_prompt_is_computed() -> None:
    async with Place("sglang") as place:
        decode = Decode()
        taking = asyncio.create_task(decode.take(place.decode()))
        await asyncio.wait_for(place.server.reserved(7), WAIT_S)
        assert decode.reserved.is_set()
        assert not decode.active.is_set()
        place.server.computed(7, 20, lambda: None)
        await travel(place, 20)
        await asyncio.wait_for(taking, WAIT_S)


async def test_prompt_is_not_computed_for_a_disconnected_decode_worker() -> None:
    async with Place("sglang") as place:

        async def leave() -> int:
            raise WorkerUnavailable("no room")

        with pytest.raises(WorkerUnavailable, match="no room"):
            await place.decode().receive(leave, lambda: None)
        with pytest.raises(WorkerUnavailable, match="disconnected before"):
            await asyncio.wait_for(place.server.reserved(7), WAIT_S)


async def test_blocks_of_a_disconnected_decode_worker_are_freed(place: Place) -> None:
    async def leave() -> int:
        raise WorkerUnavailable("no room")

    gone = asyncio.Event()
    place.server.computed(7, 20, gone.set)
    with pytest.raises(WorkerUnavailable, match="no room"):
        await place.decode().receive(leave, lambda: None)
    await asyncio.wait_for(gone.wait(), WAIT_S)


async def test_decode_worker_is_notified_of_a_lost_prefill(place: Place) -> None:
    place.server.lost(7)
    with pytest.raises(WorkerUnavailable, match="cancelled"):
        await Decode().take(place.decode())


async def test_handoff_refuses_a_different_engine(place: Place) -> None:
    with pytest.raises(WorkerUnavailable, match="expected"):
        await Decode().take(place.decode(engine_type="sglang"))
    place.server.computed(7, 1, lambda: None)
    taking = asyncio.create_task(Decode().take(place.decode()))
    await travel(place, 1)
    await asyncio.wait_for(taking, WAIT_S)


async def test_handoff_refuses_a_second_decode_worker(place: Place) -> None:
    first = asyncio.create_task(Decode().take(place.decode()))
    decode = Decode()
    place.server.computed(7, 1, lambda: None)
    await asyncio.wait_for(place.clock.is_slept.wait(), WAIT_S)
    with pytest.raises(WorkerUnavailable, match="another peer"):
        await decode.take(place.decode())
    place.clock.advance(1)
    await asyncio.wait_for(first, WAIT_S)


async def test_unreachable_prefill_worker_is_a_retryable_error(place: Place) -> None:
    await place.server.close()
    with pytest.raises(WorkerUnavailable, match="cannot complete handoff"):
        await Decode().take(place.decode())


async def test_decode_worker_waits_at_most_the_session_timeout(place: Place) -> None:
    with pytest.raises(WorkerUnavailable, match="timed out"):
        await Decode().take(place.decode(timeout_s=0.05))


async def test_unclaimed_blocks_are_freed() -> None:
    place, gone = Place(timeout_s=0.01), asyncio.Event()
    place.server.computed(1, 20, gone.set)
    await asyncio.wait_for(gone.wait(), WAIT_S)
    await place.server.close()


async def test_closing_frees_all_blocks(place: Place) -> None:
    gone = asyncio.Event()
    place.server.computed(1, 20, gone.set)
    await place.server.close()
    assert gone.is_set()


# Frame by frame, as captured from the released mocker.


def frame(message: Any) -> bytes:
    data = json.dumps({"identity": IDENTITY, "message": message}).encode()
    return struct.pack("<I", len(data)) + data


async def read(reader: asyncio.StreamReader) -> Any:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    expected_message = json.loads(await reader.readexactly(length))
    assert expected_message["identity"] == IDENTITY
    return expected_message["message"]


def fact(name: str, **words: Any) -> Any:
    return {"Fact": {name: {"handoff_id": IDENTITY["handoff_id"], **words}}}


def action(number: int, name: str) -> Any:
    return {"Action": {"id": number, "action": {name: {"handoff_id": IDENTITY["handoff_id"]}}}}


REGISTER = {"Register": {"role": "Destination", "dp_rank": 0, "order": "SourceFirst", "engine_type": "vllm"}}


async def test_prefill_messages_equal_the_released_ones(place: Place) -> None:
    gone = asyncio.Event()
    reader, writer = await asyncio.open_connection(HOST, place.port)
    writer.write(b"DMHF\x01\x00\x00\x00" + frame(REGISTER))
    async with asyncio.timeout(WAIT_S):
        assert await read(reader) == "Registered"
        place.server.computed(7, 20, gone.set)
        timing = {"mode": "full_prompt", "full_prompt_tokens": 20, "kv_bytes_per_token": 1_000_000}
        assert await read(reader) == fact("SourceHeld", transfer_timing=timing | {"bandwidth_gb_s": 1.0})
        assert await read(reader) == action(1, "ReserveDestination")
        writer.write(frame({"ActionAck": {"action_id": 1, "outcome": "Accepted"}}))
        writer.write(frame(fact("DestinationReserved", transferable_prompt_tokens=32)))
        await travel(place, 20)
        assert await read(reader) == action(3, "ActivateDestination")
        writer.write(frame({"ActionAck": {"action_id": 3, "outcome": "Applied"}}))
        assert await read(reader) == "Complete"
        assert gone.is_set()
    writer.close()


async def test_decode_messages_equal_the_released_ones() -> None:
    received: list[Any] = []

    async def source(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(8))
        received.append(await read(reader))
        writer.write(frame("Registered") + frame(fact("SourceHeld")) + frame(action(1, "ReserveDestination")))
        received.extend([await read(reader), await read(reader)])
        writer.write(frame(action(3, "ActivateDestination")))
        received.append(await read(reader))
        writer.write(frame("Complete"))
        writer.close()

    decode = Decode(tokens=32)
    async with served(source) as port, asyncio.timeout(WAIT_S):
        await decode.take(Handoff(BootstrapInfo(HOST, port, 7, HANDOFF_ID), "r-1", "vllm", WAIT_S))
    assert decode.active.is_set()
    assert received == [
        b"DMHF\x01\x00\x00\x00",
        REGISTER,
        {"ActionAck": {"action_id": 1, "outcome": "Accepted"}},
        fact("DestinationReserved", transferable_prompt_tokens=32),
        {"ActionAck": {"action_id": 3, "outcome": "Applied"}},
    ]


@pytest.mark.parametrize(
    ("expected_message", "why"),
    [
        (frame({"Abort": {"message": "no"}}), "Abort no"),
        (frame("Registered") + frame("Complete"), "before activation"),
        (frame("Registered") + frame(action(1, "Dance")), "Dance"),
        (frame("Registered") + frame(action(3, "ActivateDestination")), "Activate"),
        (struct.pack("<I", 1 << 30), "invalid frame length"),
        (struct.pack("<I", 3) + b"{}}", "cannot decode frame"),
        (b"", "cannot complete handoff"),
    ],
)
async def test_invalid_message_ends_the_decode_session(expected_message: bytes, why: str) -> None:
    async def source(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        await read(reader)
        writer.write(expected_message)
        writer.close()

    async with served(source) as port, asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerUnavailable, match=why):
            await Decode().take(Handoff(BootstrapInfo(HOST, port, 7, HANDOFF_ID), "r-1", "vllm", WAIT_S))


class served:  # noqa: N801
    """A server of one test."""

    def __init__(self, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._talk = talk

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._talk, HOST, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
