"""Events of an engine that is not our worker: decoded from its format, in order, and queried again after gaps."""

import struct
from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.engine_subscriber import EngineEvents, EngineListener, Status, check_endpoint, number_of, replayed
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import pack
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Stored, StoredBlock, WorkerKvEvent
from dynamo.runtime.event_plane import envelope
from dynamo.text.multimodal.routing_hashes import hashes_of

TOKENS = list(range(1, 13))


def stored(hashes: list[int], parent: int | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "medium": "GPU",
        **more,
    }


def message(number: int, *worker_event: Any, topic: bytes = b"kv") -> list[bytes]:
    return [topic, struct.pack(">Q", number), msgspec.msgpack.encode([0.0, list(worker_event), 0])]


class ReceivedOutput:
    """An index that receives the events of one engine."""

    def __init__(self, **more: Any) -> None:
        self.index = KvIndex()
        self.engine = EngineEvents(7, 1, 4, self.put, **more)

    def put(self, worker_event: WorkerKvEvent) -> None:
        events.apply(self.index, worker_event)

    def live(self, *frames: list[bytes]) -> list[int | None]:
        missing = []
        for one in frames:
            missing.append(self.engine.arrived(one))
            self.engine.process(one)
        return missing

    def depth(self, tokens: list[int] | None = None, **more: Any) -> int:
        found = self.index.find(pack(hashes_of(TOKENS if tokens is None else tokens, 4, **more)))
        return self.index.depth_by_rank(found).get((7, 1), 0)


def test_engine_subscriber_hashes_tokens_under_the_registered_rank() -> None:
    received = ReceivedOutput()
    assert received.live(message(0, stored([1, 2], None, TOKENS[:8])), message(1, stored([3], 2, TOKENS[8:]))) == [
        None,
        None,
    ]
    assert received.depth() == 3
    received.live(message(2, {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}))
    assert received.depth() == 2
    received.live(message(3, {"type": "AllBlocksCleared"}))
    assert received.depth() == 0


def test_engine_subscriber_requests_a_missing_message_and_applies_it_once() -> None:
    received = ReceivedOutput()
    first, second, third = (
        message(0, stored([1], None, TOKENS[:4])),
        message(1, stored([2], 1, TOKENS[4:8])),
        message(2, stored([3], 2, TOKENS[8:])),
    )
    received.live(first)
    assert received.engine.arrived(third) == 1
    for frames in (second, third, third):  # Events that the engine sends again.
        received.engine.process([b"", *frames[1:]])
    received.engine.process(third)
    assert received.depth() == 3
    assert (received.engine.gaps, received.engine.lost) == (0, 0)


def test_engine_subscriber_requests_a_full_replay_when_late() -> None:
    received = ReceivedOutput()
    assert received.engine.arrived(message(5, stored([1], None, TOKENS[:4]))) == 0


def test_engine_subscriber_clears_the_index_when_replay_fails() -> None:
    received = ReceivedOutput()
    received.live(message(0, stored([1], None, TOKENS[:4])))
    assert received.live(message(3, stored([9], None, [9, 9, 9, 9]))) == [1]
    assert received.depth() == 0
    assert received.depth([9, 9, 9, 9]) == 1
    assert (received.engine.gaps, received.engine.lost) == (1, 2)


def test_engine_subscriber_detects_an_engine_restart_by_its_sequence() -> None:
    received = ReceivedOutput()
    received.live(message(0, stored([1], None, TOKENS[:4])), message(1, stored([2], 1, TOKENS[4:8])))
    assert received.live(message(0, stored([5], None, [5, 5, 5, 5]))) == [None]
    assert received.depth() == 0
    assert received.depth([5, 5, 5, 5]) == 1


def test_engine_subscriber_reads_the_event_envelope_of_dynamo_workers() -> None:
    received = ReceivedOutput()
    blocks = [StoredBlock(1, hashes_of(TOKENS[:4], 4)[0])]
    event = NumberedKvEvent(1, KvEventData(stored=Stored(None, None, blocks)), 1)
    payload = msgspec.msgpack.encode([WorkerKvEvent(99, "device", "worker", event)])
    frames = envelope.pack(envelope.EventEnvelope(5, 0, 0, "kv-events", payload))
    received.live(frames)
    assert received.depth() == 1
    frames = envelope.pack(envelope.EventEnvelope(5, 1, 0, "kv-events", b"\xc1"))
    received.live(frames)  # Received, and omitted.
    assert received.depth() == 1


def test_engine_subscriber_separates_salts_and_adapters() -> None:
    received = ReceivedOutput(salt="s")
    received.live(message(0, stored([1], None, TOKENS[:4], lora_name="l")))
    assert received.depth() == 0
    assert received.depth(cache_salt="s", lora_name="l") == 1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"topic"],
        [b"topic", b"short", b""],
        message(0, {"type": "Moved"}),
        [b"", struct.pack(">Q", 0), b"\xc1"],
        message(0, stored([1, 2], None, [1, 2])),
    ],
)
def test_engine_subscriber_ignores_a_malformed_message(frames: list[bytes]) -> None:
    received = ReceivedOutput()
    received.engine.arrived(frames)
    received.engine.process(frames)
    assert received.index.size == 0


def test_engine_subscriber_replay_end_marker_has_no_number() -> None:
    assert number_of([b"", struct.pack(">q", -1), b""]) is None
    assert number_of(message(3)) == 3


@pytest.mark.parametrize("topic", [b"", b"kv@model"])
def test_engine_subscriber_reads_a_replay_with_an_empty_frame(topic: bytes) -> None:
    received = ReceivedOutput()
    received.engine.process(replayed([b"", *message(0, stored([1], None, TOKENS[:4]), topic=topic)]))
    received.engine.process(replayed([b"", *message(1, stored([2], 1, TOKENS[4:8]), topic=topic)[1:]]))
    assert received.index.size == 2


def test_engine_subscriber_error_names_an_invalid_address() -> None:
    assert check_endpoint("tcp://host:1") == "tcp://host:1"
    for wrong, why in (("bogus", "missing scheme"), ("http://x", "expected tcp"), ("tcp://", "expected tcp")):
        with pytest.raises(InvalidArgument, match=why):
            check_endpoint(wrong)
    with pytest.raises(InvalidArgument):
        EngineListener(ReceivedOutput().engine, "tcp://ok:1", replay_endpoint="bogus")
    assert EngineListener(ReceivedOutput().engine, "tcp://ok:1").status is Status.PENDING
