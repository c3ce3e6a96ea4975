"""HostTier: a second, larger cache in host memory.

    device ── complete block ──▶ copying, one after the other ──▶ readable ── evicted ──▶ gone
                                                                    └── a prompt with this prefix ──▶ device

Blocks are copied as soon as they are complete (write-through), so the device can evict them at any time. The host tier
evicts the least recently used block.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.mocker.simulation.rules import HostRules
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A block that is being copied to the host."""

    done_ms: float
    parent: int | None
    block: StoredBlock


class HostTier:
    """The host cache of one rank. Times are simulation times in milliseconds."""

    def __init__(self, rules: HostRules) -> None:
        self.rules = rules
        self.held: OrderedDict[int, None] = OrderedDict()
        """Readable blocks, least recently used first."""
        self.offloaded = 0
        """Blocks copied to the host so far."""
        self.onboarded = 0
        """Blocks copied back to the device so far."""
        self._copies: deque[HostCopy] = deque()
        self._copying: set[int] = set()
        self._to_host_free_ms = 0.0
        self._to_device_free_ms = 0.0
        self._events: list[KvEvent] = []

    def offload(self, events: Iterable[KvEvent], now_ms: float) -> None:
        """Start copies of newly stored device blocks that the host does not hold."""
        for event in events:
            if not isinstance(event, Stored):
                continue
            parent = event.parent_hash
            for block in event.blocks:
                self._offload(parent, block, now_ms)
                parent = block.block_hash

    def settle(self, now_ms: float) -> None:
        """Make blocks readable whose copy is complete."""
        while self._copies and self._copies[0].done_ms <= now_ms:
            copy = self._copies.popleft()
            self._copying.discard(copy.block.block_hash)
            if len(self.held) >= self.rules.num_blocks:
                self._record_removed(self.held.popitem(last=False)[0])
            self.held[copy.block.block_hash] = None
            self.offloaded += 1
            self._record_stored(copy)

    @property
    def next_ms(self) -> float:
        """Return the time at which the next copy completes; infinity without copies."""
        return self._copies[0].done_ms if self._copies else math.inf

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that are readable."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.held:
                return index
        return len(hashes)

    def fetch(self, hashes: Sequence[int], now_ms: float) -> float:
        """Queue copies of readable blocks to the device; return the time at which they complete."""
        for block_hash in reversed(hashes):
            self.held.move_to_end(block_hash)
        self.onboarded += len(hashes)
        begin_ms = max(now_ms, self._to_device_free_ms)
        self._to_device_free_ms = begin_ms + len(hashes) * self.rules.to_device_ms()
        return self._to_device_free_ms

    def events(self) -> list[KvEvent]:
        """Return the stored and removed blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is violated."""
        assert len(self.held) <= self.rules.num_blocks, "more blocks are held than the tier has"
        assert len(self._copies) == len(self._copying) <= self.rules.num_blocks
        assert not self._copying & self.held.keys(), "a held block is copied again"

    def _offload(self, parent: int | None, block: StoredBlock, now_ms: float) -> None:
        if block.block_hash in self.held:
            self.held.move_to_end(block.block_hash)
        elif block.block_hash not in self._copying and len(self._copying) < self.rules.num_blocks:
            self._to_host_free_ms = max(now_ms, self._to_host_free_ms) + self.rules.to_host_ms()
            self._copies.append(HostCopy(self._to_host_free_ms, parent, block))
            self._copying.add(block.block_hash)

    def _record_stored(self, copy: HostCopy) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.blocks[-1].block_hash == copy.parent:
            last.blocks.append(copy.block)
        else:
            self._events.append(Stored(copy.parent, None, [copy.block]))

    def _record_removed(self, block_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(Removed([block_hash]))
