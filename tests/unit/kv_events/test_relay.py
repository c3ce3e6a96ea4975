"""KV event relay: events in vLLM's format are decoded, and malformed ones have no effect."""

import asyncio
import logging
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.relay import KvEventRelay, Relayed, hash_of, relayed
from dynamo.protocols.kv_events import Cleared, KvEvent, Removed, Stored, StoredBlock


def make_stored(
    tokens: Sequence[int],
    sizes: Sequence[int],
    hashes: Sequence[int],
    parent: int | None,
    *,
    lora_name: str | None,
    block_mm_infos: Sequence[Any] | None,
) -> KvEvent:
    """Marks an adapter's blocks, so that a test can identify them, and records the images they show."""
    infos = block_mm_infos or [None] * len(hashes)
    size = len(tokens) + (100 if lora_name else 0)
    return Stored(parent, None, [StoredBlock(one, size, info) for one, info in zip(hashes, infos, strict=True)])


def read(*events: Any, rank: Any = 3) -> list[Relayed]:
    return relayed(msgpack_encode([1.0, list(events), rank]), 4, 0, make_stored)


STORED = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 4,
}


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", "device"),
        (None, "device"),
        ("CPU", "host_pinned"),
        ("STORAGE", "disk"),
        ("disk", "disk"),
        ("REMOTE", "external"),
    ],
)
def test_kv_relay_forwards_a_stored_block_with_its_tier(medium: str | None, tier: str) -> None:
    stored = Stored(None, None, [StoredBlock(7, 4)])
    assert read({**STORED, "medium": medium}) == [Relayed(stored, 3, tier)]


def test_kv_relay_reads_maps_and_arrays_equally() -> None:
    as_map = {**STORED, "parent_block_hash": 6, "lora_id": 1, "medium": "GPU", "lora_name": "adapter", "group_idx": 0}
    as_array = ["BlockStored", [7], 6, [1, 2, 3, 4], 4, 1, "GPU", "adapter"]
    assert read(as_map) == read(as_array) == [Relayed(Stored(6, None, [StoredBlock(7, 104)]), 3, "device")]
    assert read({"type": "BlockRemoved", "block_hashes": [7]}) == read(["BlockRemoved", [7]])
    assert read(["BlockRemoved", [7], "CPU"]) == [Relayed(Removed([7]), 3, "host_pinned")]
    assert read({"type": "AllBlocksCleared"}) == read(["AllBlocksCleared"]) == [Relayed(Cleared(), 3, "device")]


def test_kv_relay_hashes_images_by_their_engine_names() -> None:
    """Observed of ai-dynamo 1.6.1: names that the frontend gave count, with or without where the image begins."""
    image, other = "c04e5527423bb9fb" + "0" * 48, "be55e72a82f09a72" + "0" * 48
    shown = {"mm_objects": [{"mm_hash": 0xC04E5527423BB9FB, "offsets": []}]}
    both = {"mm_objects": [*shown["mm_objects"], {"mm_hash": 0xBE55E72A82F09A72, "offsets": []}]}
    two = {**STORED, "block_hashes": [7, 8], "token_ids": list(range(8))}
    for keys, infos in (
        ([[image], [image, other]], [shown, both]),
        ([["salt", [image, 1]], [[image, -3], [other, 2]]], [shown, both]),
        ([None, [other[:16], image]], [None, shown]),
        ([["x" * 16 + "0" * 48], ["c04e5527423bb9fb"]], [None, None]),
        ([["c04e5527423bb9fb" + "1" * 48], [[]]], [None, None]),
        (None, [None, None]),
        ("x", [None, None]),
    ):
        (worker_event,) = read({**two, "extra_keys": keys})
        assert isinstance(worker_event.event, Stored)
        assert [block.mm_extra_info for block in worker_event.event.blocks] == infos
    array = ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", None, [[image]]]
    assert read(array) == read({**STORED, "extra_keys": [[image]]})
    assert read([*array, 1]) == [], "another attention group"


def test_kv_relay_uses_the_publishers_rank_by_default() -> None:
    payload = msgpack_encode([1.0, [["AllBlocksCleared"]]])
    assert [one.dp_rank for one in relayed(payload, 4, 5, make_stored)] == [5]


def test_kv_relay_skips_other_groups_and_block_sizes(caplog: pytest.LogCaptureFixture) -> None:
    assert read({**STORED, "group_idx": 1}) == []
    with caplog.at_level(logging.WARNING):
        assert read({**STORED, "block_size": 16}) == []
    assert "16 tokens, expected 4" in caplog.text


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgpack_encode(5),
        msgpack_encode([1.0]),
        msgpack_encode([1.0, 5]),
        msgpack_encode([1.0, [5]]),
        msgpack_encode([1.0, [["BlockMoved", [7]]]]),
        msgpack_encode([1.0, [{"type": "BlockStored"}]]),
        msgpack_encode([1.0, [{"type": "BlockRemoved", "block_hashes": 5}]]),
        msgpack_encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"]}]]),
    ],
)
def test_kv_relay_refuses_a_message_with_a_malformed_event(payload: bytes) -> None:
    with pytest.raises(InvalidArgument):
        relayed(payload, 4, 0, make_stored)


@given(st.binary(max_size=64))
def test_kv_relay_raises_only_invalid_argument_for_random_bytes(payload: bytes) -> None:
    try:
        relayed(payload, 4, 0, make_stored)
    except InvalidArgument:
        return


def test_kv_relay_masks_hashes_to_64_bits() -> None:
    assert hash_of(-1) == (1 << 64) - 1
    assert hash_of(b"\x01" * 24 + struct.pack(">Q", 77)) == 77
    for wrong in ("x", True, b"", None):
        with pytest.raises(InvalidArgument):
            hash_of(wrong)  # type: ignore[arg-type]


def test_kv_relay_reports_lost_messages_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    put: list[tuple[KvEvent, int, str]] = []
    relay = KvEventRelay(
        "tcp://engine", "", block_tokens=4, dp_rank=0, make_stored=make_stored, put=lambda *what: put.append(what)
    )
    good = msgpack_encode([1.0, [["BlockRemoved", [7]]], 1])
    with caplog.at_level(logging.WARNING):
        relay.process([b"", struct.pack(">Q", 4), good])
        relay.process([b"", struct.pack(">Q", 5), b"\xc1"])
        relay.process([b"only one"])
        relay.process([b"", struct.pack(">Q", 9), good])
    assert put == [(Removed([7]), 1, "device")] * 2
    assert [record.message.split(" from tcp")[0] for record in caplog.records] == [
        "malformed message 5", "malformed KV event", "3 messages",
    ]  # fmt: skip


async def test_kv_relay_ends_on_cancellation() -> None:
    relay = KvEventRelay(
        "inproc://unknown", "", block_tokens=4, dp_rank=0, make_stored=make_stored, put=lambda *_: None
    )
    running = asyncio.ensure_future(relay.run())
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
