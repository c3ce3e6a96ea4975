"""KV cache events: changes of a worker's cached blocks, and queries for them (docs/kv-events.md).

A router decodes several events for each request. They are in no cycle and exempt from garbage collection (`gc=False`), which makes
them smaller and their decoding a fifth cheaper.
"""

from typing import Any, Literal

import msgspec


class StoredBlock(msgspec.Struct, gc=False):
    """A block that became readable. `block_hash` is the engine's key; `tokens_hash` the hash of its tokens alone."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: Any = None


class Stored(msgspec.Struct, gc=False):
    """Consecutive blocks of one sequence; `parent_hash` is the block before the first, None at the start."""

    parent_hash: int | None
    start_position: int | None
    blocks: list[StoredBlock]


class Removed(msgspec.Struct, gc=False):
    """Blocks that were evicted."""

    block_hashes: list[int]


class Cleared(msgspec.Struct):
    """The whole cache was dropped. On the wire the bare string `cleared`."""


KvEvent = Stored | Removed | Cleared


class KvEventData(msgspec.Struct, omit_defaults=True, gc=False):
    """One change of the cache; exactly one field is set. `Cleared` is sent as the string `cleared`."""

    stored: Stored | None = None
    removed: Removed | None = None


class NumberedKvEvent(msgspec.Struct, gc=False):
    """An event of one rank; ids count from 1, so that gaps can be detected."""

    event_id: int
    data: KvEventData | Literal["cleared"]
    dp_rank: int


class WorkerKvEvent(msgspec.Struct, gc=False):
    """One element of a `kv-events` message, which is an array of them."""

    worker_id: int
    storage_tier: str
    """`device`, `host_pinned`, `disk` or `external`."""
    residency_domain: str
    """Owner of the cache: `worker` for a worker's own."""
    event: NumberedKvEvent


class KvSourceQuery(msgspec.Struct):
    """A router's query to a source: the events from an id on or, without a start, all cached blocks."""

    worker_id: int
    dp_rank: int
    start_event_id: int | None = None
    end_event_id: int | None = None


class KvSourceEvents(msgspec.Struct):
    """The events from the requested id to the newest."""

    events: list[WorkerKvEvent]
    last_event_id: int


class KvSourceDump(msgspec.Struct):
    """Events that rebuild the source's current blocks from an empty state; events after the last id follow live."""

    events: list[WorkerKvEvent]
    last_event_id: int
    reset_scope: str = "all"


class KvSourceTooNew(msgspec.Struct):
    """The requested events have not occurred yet."""

    requested_start: int
    requested_end: int
    newest_available: int


class KvSourceInvalidRange(msgspec.Struct):
    """The requested end is before the start."""

    start_id: int
    end_id: int


class KvSourceAnswer(msgspec.Struct, omit_defaults=True):
    """A source's reply to a query; exactly one field is set."""

    events: KvSourceEvents | None = msgspec.field(default=None, name="Events")
    dump: KvSourceDump | None = msgspec.field(default=None, name="TreeDump")
    too_new: KvSourceTooNew | None = msgspec.field(default=None, name="TooNew")
    invalid_range: KvSourceInvalidRange | None = msgspec.field(default=None, name="InvalidRange")
    error: str | None = msgspec.field(default=None, name="Error")
