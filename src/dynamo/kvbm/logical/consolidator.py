"""Consolidator: merge the KV events of an engine's cache and of the tiers below it into one stream for routers. Pure.

A router places a block after its parent, in whichever tier the parent is. A block whose parent is in no tier cannot be
published, because it is not a usable prefix; its removal is not published either.
"""

from collections.abc import Iterable, Iterator

from dynamo.kvbm.logical.blocks import Tier
from dynamo.kvbm.logical.pool import Change
from dynamo.protocols.kv_events import Cleared, KvEvent, Removed, Stored, StoredBlock

TierEvent = tuple[KvEvent, str]
"""An event and the tier that it applies to."""


class Consolidator:
    """The blocks of one worker as published to routers."""

    def __init__(self) -> None:
        self._tiers: dict[int, set[Tier]] = {}
        """Tiers of each block, as published."""

    def device(self, events: Iterable[KvEvent]) -> Iterator[TierEvent]:
        """Yield the engine's own events."""
        for event in events:
            if isinstance(event, Cleared):
                self._tiers.clear()
                yield event, Tier.DEVICE.value
            elif isinstance(event, Removed):
                yield from self._removed(event.block_hashes, Tier.DEVICE)
            else:
                yield from self._stored(event, Tier.DEVICE)

    def lower(self, tier: Tier, changes: Iterable[Change]) -> Iterator[TierEvent]:
        """Yield the events for changes in another tier."""
        run: list[StoredBlock] = []
        first_parent: int | None = None
        gone: list[int] = []
        for change in changes:
            identity = change.identity
            if not change.is_stored:
                yield from self._flush(tier, first_parent, run)
                run = []
                gone.append(identity.sequence_hash)
                continue
            yield from self._removed(gone, tier)
            gone = []
            if not run or run[-1].block_hash != identity.parent_hash:
                yield from self._flush(tier, first_parent, run)
                run, first_parent = [], identity.parent_hash
            run.append(StoredBlock(identity.sequence_hash, identity.tokens_hash))
        yield from self._flush(tier, first_parent, run)
        yield from self._removed(gone, tier)

    def _flush(self, tier: Tier, parent_hash: int | None, run: list[StoredBlock]) -> Iterator[TierEvent]:
        if run:
            yield from self._stored(Stored(parent_hash, None, run), tier)

    def _stored(self, event: Stored, tier: Tier) -> Iterator[TierEvent]:
        if event.parent_hash is not None and event.parent_hash not in self._tiers:
            return
        for block in event.blocks:
            self._tiers.setdefault(block.block_hash, set()).add(tier)
        yield event, tier.value

    def _removed(self, hashes: Iterable[int], tier: Tier) -> Iterator[TierEvent]:
        removed = [one for one in hashes if tier in self._tiers.get(one, ())]
        for one in removed:
            tiers = self._tiers[one]
            tiers.discard(tier)
            if not tiers:
                del self._tiers[one]
        if removed:
            yield Removed(removed), tier.value
