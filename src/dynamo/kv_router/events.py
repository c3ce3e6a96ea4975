"""Conversion between KV cache events and the index: apply a worker's events, dump the index as events."""

import itertools
import struct
from collections.abc import Iterable, Iterator

from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import DEVICE, TIERS, pack, unpack
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent
from dynamo.tokens.hashing import sequence_hashes

NUMBERS = {name: number for number, name in enumerate(TIERS)}

pack_one = struct.Struct(">Q").pack
"""`pack` of one hash."""


def apply(index: KvIndex, worker_event: WorkerKvEvent) -> bool:
    """Apply a worker's event to the index. Return False if it refers to an unknown block: an event was missed."""
    tier = NUMBERS.get(worker_event.storage_tier)
    if tier is None:
        return True  # An event of a cache outside the worker.
    event = worker_event.event
    data = event.data
    if isinstance(data, str):
        if tier == DEVICE:
            index.clear(worker_event.worker_id, event.dp_rank)
        return True
    stored = data.stored
    if stored is None:
        removed = data.removed
        return removed is None or index.remove(worker_event.worker_id, event.dp_rank, removed.block_hashes, tier)
    blocks = stored.blocks
    if len(blocks) == 1:  # The next block of an answer.
        keys, hashes = [blocks[0].block_hash], pack_one(blocks[0].tokens_hash)
    else:
        keys = [block.block_hash for block in blocks]
        hashes = pack([block.tokens_hash for block in blocks])
    return index.store(worker_event.worker_id, event.dp_rank, stored.parent_hash, keys, hashes, tier)


def dump(index: KvIndex, worker_ids: frozenset[int] | None = None) -> list[WorkerKvEvent]:
    """Return events that rebuild the index from empty, optionally of some workers only.

    Event ids count from 1 for each rank and have no other meaning.
    """
    events: list[WorkerKvEvent] = []
    numbers: dict[tuple[int, int], itertools.count[int]] = {}
    for worker_id, dp_rank, tier, change in index.dump():
        if worker_ids is None or worker_id in worker_ids:
            number = next(numbers.setdefault((worker_id, dp_rank), itertools.count(1)))
            events.append(_worker_event(worker_id, dp_rank, tier, number, change))
    return events


def dump_predicted(held: Iterable[tuple[tuple[int, int], bytes, bytes]]) -> list[WorkerKvEvent]:
    """Return events of the blocks that ranks are predicted to hold: rank, blocks, and the blocks before them.

    A block has no engine's key: its key is the hash of the prefix that ends with it.
    """
    events: list[WorkerKvEvent] = []
    numbers: dict[tuple[int, int], itertools.count[int]] = {}
    for (worker_id, dp_rank), blocks, before in held:
        ahead, hashes = unpack(before), unpack(blocks)
        keys = sequence_hashes((*ahead, *hashes))[len(ahead) :]
        parent = sequence_hashes(ahead)[-1] if ahead else None
        stored = Stored(parent, None, [StoredBlock(key, one) for key, one in zip(keys, hashes, strict=True)])
        number = next(numbers.setdefault((worker_id, dp_rank), itertools.count(1)))
        events.append(_worker_event(worker_id, dp_rank, DEVICE, number, stored))
    return events


def dump_rank(index: KvIndex, worker_id: int, dp_rank: int, event_id: int) -> Iterator[WorkerKvEvent]:
    """Yield events that rebuild one rank's blocks, each with the id of the last event received from the rank.

    At least one event is yielded, so that the id is transferred even if the rank holds no block.
    """
    is_empty = True
    for tier, change in index.dump_rank(worker_id, dp_rank):
        is_empty = False
        yield _worker_event(worker_id, dp_rank, tier, event_id, change)
    if is_empty:
        yield _worker_event(worker_id, dp_rank, DEVICE, event_id, Removed([]))


def _worker_event(worker_id: int, dp_rank: int, tier: int, number: int, change: Stored | Removed) -> WorkerKvEvent:
    data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
    return WorkerKvEvent(worker_id, TIERS[tier], "worker", NumberedKvEvent(number, data, dp_rank))
