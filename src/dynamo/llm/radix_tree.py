"""RadixTree: upstream's Python API of the prefix index.

It wraps `kv_router.index` with upstream's names. Prompts are lists of tokens hashes (`compute_block_hash_for_seq`),
scores are by `(worker id, rank)`. One difference is deliberate: descendants of an evicted block count again when that
block returns; upstream's tree drops them.
"""

import threading
from collections.abc import Generator, Sequence
from typing import Annotated, Any

import msgspec

from dynamo.core.codec import json_decoder, json_encode
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import pack
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent

Rank = tuple[int, int]
Hash = Annotated[int, msgspec.Meta(ge=0)]


class OverlapScores:
    """Number of prompt blocks cached by each rank. Awaitable as well, for compatibility with older releases."""

    def __init__(self, scores: dict[Rank, int]) -> None:
        self._scores = scores

    @property
    def scores(self) -> dict[Rank, int]:
        """Consecutive blocks from the start, by worker id and rank; ranks without any are omitted."""
        return self._scores

    @property
    def frequencies(self) -> list[int]:
        """Number of requests for each block. Always empty, as in upstream without expiry."""
        return []

    def __await__(self) -> Generator[Any, None, "OverlapScores"]:
        """Return this object immediately."""
        return _at_once(self).__await__()

    def __repr__(self) -> str:
        return f"OverlapScores({self._scores!r})"


class GivenBlock(msgspec.Struct):
    """A stored block in the caller's JSON."""

    block_hash: Hash
    tokens_hash: Hash
    mm_extra_info: Any = None


class GivenStored(msgspec.Struct):
    """Stored blocks in the caller's JSON."""

    blocks: list[GivenBlock]
    parent_hash: Hash | None = None
    start_position: int | None = None


class GivenData(msgspec.Struct):
    """Event data in the caller's JSON."""

    stored: GivenStored | None = None
    removed: Removed | None = None


class GivenEvent(msgspec.Struct):
    """An event in the caller's JSON; the rank is optional."""

    event_id: int
    data: GivenData | str
    dp_rank: int = 0


decode_event = json_decoder(GivenEvent).decode


class RadixTree:
    """A prefix index. May be called from any thread."""

    def __init__(self) -> None:
        self._index = KvIndex()
        self._lock = threading.Lock()

    def find_matches(self, sequence: Sequence[int], early_exit: bool = False) -> OverlapScores:
        """Return the number of these blocks that each rank holds. `early_exit` has no effect (compatibility)."""
        with self._lock:
            return OverlapScores(scores_of(self._index, sequence))

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Apply an event in JSON. Raise `ValueError` for a malformed one, `RuntimeError` for unknown blocks."""
        if not isinstance(kv_cache_event_bytes, bytes):
            raise TypeError(f"kv_cache_event_bytes: expected bytes, found {type(kv_cache_event_bytes).__name__}")
        event = read_event(kv_cache_event_bytes)
        with self._lock:
            is_known = events.apply(self._index, WorkerKvEvent(worker_id, "device", "worker", event))
        if not is_known:
            missing = "parent block" if not isinstance(event.data, str) and event.data.stored else "block"
            raise RuntimeError(f"Failed to apply event: Failed to find {missing}")

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker."""
        with self._lock:
            self._index.remove_worker(worker_id)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Remove all blocks of a worker."""
        self.remove_worker(worker_id)

    def dump_tree_as_events(self) -> list[str]:
        """Return JSON events that recreate this tree."""
        with self._lock:
            return [json_encode(event).decode() for event in events.dump(self._index)]


async def _at_once(scores: OverlapScores) -> OverlapScores:
    return scores


def scores_of(index: KvIndex, sequence: Sequence[int]) -> dict[Rank, int]:
    """Return the number of consecutive blocks from the start that each rank holds on its device."""
    return index.depth_by_rank(index.find(pack(sequence)))


def read_event(text: bytes) -> NumberedKvEvent:
    """Decode an event in JSON. Raise `ValueError`."""
    try:
        given = decode_event(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"Failed to deserialize KvCacheEvent: {error}") from None
    data = given.data
    if isinstance(data, str):
        if data != "cleared":
            raise ValueError(f"Failed to deserialize KvCacheEvent: data {data!r}: expected stored, removed or cleared")
        return NumberedKvEvent(given.event_id, "cleared", given.dp_rank)
    if data.stored is not None:
        blocks = [StoredBlock(one.block_hash, one.tokens_hash, one.mm_extra_info) for one in data.stored.blocks]
        stored = Stored(data.stored.parent_hash, data.stored.start_position, blocks)
        return NumberedKvEvent(given.event_id, KvEventData(stored=stored), given.dp_rank)
    if data.removed is None:
        raise ValueError("Failed to deserialize KvCacheEvent: data: expected stored, removed or cleared")
    return NumberedKvEvent(given.event_id, KvEventData(removed=data.removed), given.dp_rank)
