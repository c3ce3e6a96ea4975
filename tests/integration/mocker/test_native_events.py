"""KV events in vLLM's own format: their contents, and that they are replayed."""

import asyncio
import struct

import pytest
import zmq
import zmq.asyncio
from benchmarks.ports import free_port

from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import ConfigError
from dynamo.kv_events.relay import relayed
from dynamo.mocker.native_events import NativeEvents, native
from dynamo.protocols.kv_events import Cleared, Removed, Stored, StoredBlock

HOST = "127.0.0.1"
WAIT_S = 60.0
STORED = Stored(3, None, [StoredBlock(11, 1), StoredBlock(12, 2)])
TOKENS = {11: [5, 6], 12: [7, 8]}


def test_native_event_has_the_field_names_of_the_released_mocker() -> None:
    assert native(STORED, TOKENS, 2) == {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 3,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "group_idx": 0,
    }
    assert native(Removed([11]), {}, 2) == {"type": "BlockRemoved", "block_hashes": [11], "group_idx": 0}
    assert native(Cleared(), {}, 2) == {"type": "AllBlocksCleared"}


async def test_replay_resends_messages_from_a_sequence_number() -> None:
    port = free_port()
    events = NativeEvents(HOST, free_port(), port, dp_rank=1)
    answering = asyncio.create_task(events.answer())
    context = zmq.asyncio.Context()
    try:
        for _ in range(3):
            events.publish([native(STORED, TOKENS, 2)], 1.5)
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://{HOST}:{port}")
        await asker.send_multipart([b"", struct.pack(">Q", 1)])
        received = []
        while True:
            frames = await asyncio.wait_for(asker.recv_multipart(), WAIT_S)
            if not frames[-1]:
                break
            received.append(frames)
        assert [struct.unpack(">Q", frames[2])[0] for frames in received] == [1, 2]
        time_s, reported, rank = msgpack_decode(received[0][3])
        assert (time_s, rank, reported[0]["block_hashes"]) == (1.5, 1, [11, 12])
        (found,) = relayed(
            received[0][3], 2, 0, lambda tokens, *_, **__: Stored(None, None, [StoredBlock(len(tokens), 0)])
        )
        assert found.dp_rank == 1, "our own relay reads it"
    finally:
        answering.cancel()
        context.destroy(linger=0)
        events.close()


async def test_occupied_port_is_named() -> None:
    port = free_port()
    first = NativeEvents(HOST, port, None, 0)
    try:
        with pytest.raises(ConfigError, match=str(port)):
            NativeEvents(HOST, port, None, 0)
    finally:
        first.close()
