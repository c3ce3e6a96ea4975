"""RunTree: the linked runs of an index and the operations that change them. Pure; a part of `index`."""

from dataclasses import dataclass

from dynamo.kv_router.names import Names
from dynamo.kv_router.ranks import IndexedRank
from dynamo.kv_router.recent_runs import RecentRuns, RootRuns
from dynamo.kv_router.runs import (
    DEVICE,
    NO_RUNS,
    TIERS,
    WIDTH,
    Key,
    Run,
    common,
    held_anywhere,
    held_bits,
    hold_on_device,
    keep,
    release_on_device,
)


@dataclass(slots=True)
class EventCounts:
    """Counts of events and entries since the start, named as the metric's labels."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    parent_block_not_found: int = 0
    block_not_found: int = 0
    evicted: int = 0
    """Blocks evicted because the index was full."""


class RunTree:
    """All runs, and the table of their common names."""

    def __init__(self, names: Names, slots: list[IndexedRank | None]) -> None:
        """`slots`: the rank of each slot, maintained by the index."""
        self.names = names
        self.roots = RootRuns()
        """Runs at the start of prompts, by first block."""
        self.used = RecentRuns()
        """All runs, least recently used first."""
        self.size = 0
        """Blocks, each counted once regardless of the ranks that hold it."""
        self.lower = 0
        """Slots, as bits, that have held a block in a slower tier."""
        self.counts = EventCounts()
        self._slots = slots

    def __del__(self) -> None:
        for run in self.used:  # Runs may be exempt from garbage collection (`names`): break their cycles.
            run.parent, run.used_with = None, NO_RUNS

    # Queries.

    def find(self, rank: IndexedRank, key: Key) -> tuple[Run | None, int]:
        """Return run and position of the block that a rank holds under this key; no run where there is none."""
        if rank.segments:
            run = rank.find(key)
            if run is not None:
                return run, rank.place(run, key)
        run = self.names.get(key)
        if run is None:
            return None, -1
        at = run.place(key)
        if not run.full & rank.bit and not held_anywhere(run, rank.slot) >> at & 1:
            return None, -1
        if rank.named and rank.named.get(run, 0) >> at & 1:
            return None, -1
        return run, at

    def _knows(self, rank: IndexedRank, keys: list[Key]) -> bool:
        return any(self.find(rank, key)[0] is not None for key in keys)

    # Storing.

    def store(
        self, rank: IndexedRank, parent: Key | None, run: Run | None, at: int, keys: list[Key], blocks: bytes, tier: int
    ) -> bool:
        """Store consecutive blocks of a rank after position `at` of a run, whose block the rank names `parent`.

        Return False if they turn out to follow a block that the rank no longer holds.
        """
        if (
            run is not None
            and len(keys) == 1
            and tier == DEVICE
            and not rank.segments
            and self._is_last(rank, run, at)
            and self._extend(rank, run, keys, blocks)
        ):
            return True  # The next block of an answer, on a shorter path.
        is_own = bool(rank.segments) and rank.knows_any(keys)
        if parent is None and tier == DEVICE and not is_own and self._begin(rank, keys, blocks):
            return True
        if is_own or (len(keys) > 1 and len(set(keys)) < len(keys)):
            return self._store_again(rank, parent, keys, blocks, tier)
        return self._store(rank, parent, run, at, keys, blocks, tier)

    def _begin(self, rank: IndexedRank, keys: list[Key], blocks: bytes) -> bool:
        """Store the start of a new prompt: the most frequent event, on the shortest path.

        Return False if the prompt is known or a key is taken.
        """
        if self.roots.get(blocks[:WIDTH]) is not None:
            return False
        run = Run(None, -1, blocks, keys, rank.bit)
        if not self.names.claim(keys, run):
            return False
        self.roots.add(blocks[:WIDTH], run)
        self.used.add(run)
        rank.runs[run] = None
        rank.count += len(keys)
        self.size += len(keys)
        return True

    def _store(
        self,
        rank: IndexedRank,
        parent: Key | None,
        run: Run | None,
        at: int,
        keys: list[Key],
        blocks: bytes,
        tier: int,
        *,
        is_fresh: bool = False,
    ) -> bool:
        """Follow the runs that contain these blocks, then create a run for the rest.

        `parent` names the block at position `at` of `run`. `is_fresh`: the rank uses none of the keys for another block.
        """
        done, total = 0, len(keys)
        while done < total:
            into, first, count = self._known(run, at, blocks, done)
            if into is None or not count:
                rest, new = (keys[done:], blocks[done * WIDTH :]) if done else (keys, blocks)
                if run is not None and tier == DEVICE and self._is_last(rank, run, at):
                    is_stored = self._extend(rank, run, rest, new)
                else:
                    is_stored = self._grow(rank, run, at, rest, new, tier)
                if is_stored:
                    return True
                if not is_fresh and self._knows(rank, rest):
                    return self._store_again(rank, keys[done - 1] if done else parent, rest, new, tier)
                self._grow(rank, run, at, rest, new, tier, is_common=False)
                return True
            here = keys if count == total else keys[done : done + count]
            if not (into.is_common and into.keys[first : first + count] == here) and not is_fresh:
                rest = keys[done:]
                if self._knows(rank, rest):
                    before = keys[done - 1] if done else parent
                    return self._store_again(rank, before, rest, blocks[done * WIDTH :], tier)
                is_fresh = True
            self._hold(rank, into, first, here, tier)
            run, at = into, first + count - 1
            done += count
        return True

    def _known(self, run: Run | None, at: int, blocks: bytes, done: int) -> tuple[Run | None, int, int]:
        """Return where the blocks from number `done` on follow position `at`: run, position, number of consecutive blocks."""
        if run is not None and at + 1 < len(run.keys):
            count = common(run.blocks[(at + 1) * WIDTH :], blocks, done * WIDTH)
            if count:
                return run, at + 1, count
        first = blocks[done * WIDTH : (done + 1) * WIDTH]
        follower = self.roots.get(first) if run is None else run.children.get((at, first)) if run.children else None
        return (None, 0, 0) if follower is None else (follower, 0, common(follower.blocks, blocks, done * WIDTH))

    def _is_last(self, rank: IndexedRank, run: Run, at: int) -> bool:
        """Return whether a rank is the only holder of a run, holds all of it, and nothing follows position `at`."""
        return (
            run.full == rank.bit
            and run.is_common
            and at == len(run.keys) - 1
            and not (run.shorter or run.children or run.stray or run.lower)
        )

    def _extend(self, rank: IndexedRank, run: Run, keys: list[Key], blocks: bytes) -> bool:
        """Append blocks to a run that only this rank holds. Return False if one of the keys is taken."""
        if not self.names.claim(keys, run):
            return False
        run.keys += keys
        run.blocks += blocks
        self.size += len(keys)
        rank.count += len(keys)
        return True

    def _grow(
        self,
        rank: IndexedRank,
        parent: Run | None,
        anchor: int,
        keys: list[Key],
        blocks: bytes,
        tier: int,
        *,
        is_common: bool = True,
    ) -> bool:
        """Create a new run. Return False if its keys should be common and one is taken."""
        run = Run(parent, anchor, blocks, keys, rank.bit if tier == DEVICE else 0)
        if not is_common:
            run.is_common = False
            rank.learn(keys, run, 0)
        elif not self.names.claim(keys, run):
            return False
        if parent is None:
            self.roots.add(blocks[:WIDTH], run)
        else:
            if parent.children is None:
                parent.children = {}
            parent.children[(anchor, blocks[:WIDTH])] = run
        self.used.add(run)
        self.size += len(keys)
        rank.runs[run] = None
        rank.count += len(keys)
        if tier != DEVICE:
            self._note_lower(rank)
            run.lower = {(tier, rank.slot): (1 << len(keys)) - 1}
        return True

    def _note_lower(self, rank: IndexedRank) -> None:
        rank.has_lower = True
        self.lower |= rank.bit

    def _hold(self, rank: IndexedRank, run: Run, at: int, keys: list[Key], tier: int) -> None:
        """Mark blocks of a known run as held by a rank that uses these keys for no other block."""
        count = len(keys)
        is_common = run.is_common and run.keys[at : at + count] == keys
        if is_common and tier == DEVICE and not (rank.named or rank.has_lower or run.stray):
            lead = run.lead(rank.bit)
            if at <= lead:
                if at + count > lead:
                    run.set_lead(rank.bit, lead, at + count)
                    rank.runs[run] = None
                    rank.count += at + count - lead
                return
        span = ((1 << count) - 1) << at
        again = held_anywhere(run, rank.slot) & span
        if again:  # The keys may differ: a block keeps only the newest.
            self._rename(rank, run, at, keys, again)
        if not is_common:
            if again:
                for number, key in enumerate(keys):
                    if not again >> at + number & 1:
                        rank.learn([key], run, at + number)
            else:
                rank.learn(keys, run, at)
        rank.runs[run] = None
        rank.count += (span & ~again).bit_count()
        if tier == DEVICE:
            hold_on_device(run, rank.slot, at, count)
        else:
            self._note_lower(rank)
            if run.lower is None:
                run.lower = {}
            name = (tier, rank.slot)
            run.lower[name] = run.lower.get(name, 0) | span

    def _rename(self, rank: IndexedRank, run: Run, at: int, keys: list[Key], again: int) -> None:
        """Replace the keys of blocks that a rank already holds (those in `again`)."""
        named = rank.named.get(run, 0)
        own = rank.own_keys(run) if named & again else {}
        for place, key in enumerate(keys, at):
            if not again >> place & 1:
                continue
            is_common = run.is_common and run.keys[place] == key
            if named >> place & 1:
                if own[place] == key and not is_common:
                    continue
                rank.forget(run, place, [own[place]])
            if not is_common:
                rank.learn([key], run, place)

    def _store_again(self, rank: IndexedRank, parent: Key | None, keys: list[Key], blocks: bytes, tier: int) -> bool:
        """Store blocks of which some keys are known: repeated, in another tier, or keys that now name other blocks."""
        before = parent
        for number, key in enumerate(keys):
            block = blocks[number * WIDTH : (number + 1) * WIDTH]
            run, at = self._place(rank, before)
            known, place = self.find(rank, key)
            if known is not None and not self._is_at(known, place, run, at, block):
                self._give_up(rank, known, place)
                run, at = self._place(rank, before)
                if before is not None and run is None:
                    self.counts.parent_block_not_found += 1
                    return False
            self._store(rank, before, run, at, [key], block, tier, is_fresh=True)
            before = key
        return True

    def _place(self, rank: IndexedRank, key: Key | None) -> tuple[Run | None, int]:
        return (None, -1) if key is None else self.find(rank, key)

    def _give_up(self, rank: IndexedRank, run: Run, at: int) -> None:
        """Release, in all tiers, the block that a rank's key named before the key was reused."""
        for tier in range(len(TIERS)):
            if held_bits(run, rank.slot, tier) >> at & 1:
                self._release_tier(rank, run, at, tier)

    def _is_at(self, known: Run, place: int, run: Run | None, at: int, block: bytes) -> bool:
        """Return whether a known block is the one after position `at` of `run`."""
        if known.blocks[place * WIDTH : (place + 1) * WIDTH] != block:
            return False
        if known is run:
            return place == at + 1
        return place == 0 and known.parent is run and known.anchor == at

    # Removal.

    def release(self, rank: IndexedRank, keys: list[Key], tier: int) -> bool:
        """Release blocks of a rank. Return False if one is unknown; the others are released nevertheless."""
        is_known, done, total = True, 0, len(keys)
        while done < total:
            run, at = self.find(rank, keys[done])
            if run is None:
                self.counts.block_not_found += 1
                is_known = False
                done += 1
            elif tier != DEVICE or rank.has_lower:
                self._release_tier(rank, run, at, tier)
                done += 1
            elif done + 1 == total:
                self._release(rank, run, at, 1)
                done += 1
            else:
                first, count = self._stretch(rank, run, at, keys, done)
                self._release(rank, run, first, count)
                done += count
        return is_known

    def _stretch(self, rank: IndexedRank, run: Run, at: int, keys: list[Key], done: int) -> tuple[int, int]:
        """Return the blocks that consecutive keys from number `done` on name in sequence, in either direction of the run.

        Return the first position and their number. Engines report evicted blocks in either order.
        """
        lead = run.lead(rank.bit)
        if rank.named or at >= lead or len(keys) == done + 1:
            return at, 1
        own, following = run.keys, keys[done + 1]
        if at and own[at - 1] == following:
            count = min(len(keys) - done, at + 1)
            some = own[at + 1 - count : at + 1][::-1]
        elif at + 1 < lead and own[at + 1] == following:
            count = min(len(keys) - done, lead - at)
            some = own[at : at + count]
        else:
            return at, 1
        expected = keys[done : done + count] if count < len(keys) else keys
        if some != expected:
            count = next(number for number, pair in enumerate(zip(some, expected, strict=True)) if pair[0] != pair[1])
        return (at + 1 - count if at and own[at - 1] == following else at), count

    def _release(self, rank: IndexedRank, run: Run, at: int, count: int) -> None:
        """Release consecutive blocks of a rank without slower tiers."""
        if (
            run.full == rank.bit
            and at + count == len(run.keys)
            and not (run.children or run.shorter or run.stray or run.lower or rank.named)
        ):
            self._cut(rank, run, at)
            return
        if rank.named:
            self._unname(rank, run, ((1 << count) - 1) << at)
        release_on_device(run, rank.slot, at, count)
        rank.count -= count
        if not run.full & rank.bit and not held_anywhere(run, rank.slot):
            rank.runs.pop(run, None)
        if not run.full:
            self._reclaim(run)

    def _cut(self, rank: IndexedRank, run: Run, at: int) -> None:
        """Truncate a run at position `at`; only this rank held it. The most frequent form of removal."""
        if at:
            gone = run.keys[at:]
            self.size -= len(gone)
            rank.count -= len(gone)
            if run.is_common:
                self.names.release(gone)
            run.blocks = run.blocks[: at * WIDTH]
            del run.keys[at:]
            return
        rank.count -= len(run.keys)
        del rank.runs[run]
        self.size -= len(run.keys)
        if run.is_common:
            self.names.release(run.keys)
        self._unhook(run)
        if run.parent is not None and not run.parent.full:
            self._reclaim(run.parent)

    def _release_tier(self, rank: IndexedRank, run: Run, at: int, tier: int) -> None:
        """Release a block in one tier; its key is dropped with the last tier."""
        if not held_bits(run, rank.slot, tier) >> at & 1:
            self.counts.block_not_found += 1
            return
        if tier == DEVICE:
            release_on_device(run, rank.slot, at, 1)
        else:
            assert run.lower is not None
            keep(run.lower, (tier, rank.slot), run.lower[(tier, rank.slot)] & ~(1 << at))
        held = held_anywhere(run, rank.slot)
        if not held >> at & 1:
            self._unname(rank, run, 1 << at)
            rank.count -= 1
            if not held:
                rank.runs.pop(run, None)
        self._reclaim(run)

    def _unname(self, rank: IndexedRank, run: Run, places: int) -> None:
        """Drop a rank's own keys of these positions, if any."""
        if rank.named.get(run, 0) & places:
            for at, key in rank.own_keys(run).items():
                if places >> at & 1:
                    rank.forget(run, at, [key])

    def drop(self, run: Run, rank: IndexedRank) -> None:
        """Release all blocks of a departed rank in a run."""
        bit = rank.bit
        lead = run.lead(bit)
        if lead:
            run.set_lead(bit, lead, 0)
        if run.stray:
            run.stray.pop(rank.slot, None)
        if run.lower:
            for tier in range(1, len(TIERS)):
                run.lower.pop((tier, rank.slot), None)
        if not run.full and run in self.used:
            self._reclaim(run)

    def _reclaim(self, run: Run) -> None:
        """Drop unheld blocks at the end of a run, and the run with its last block."""
        above: Run | None = run
        while above is not None:
            length = above.held_until()
            gone = len(above) - length
            if not gone:
                return
            self.size -= gone
            if above.is_common:
                self.names.release(above.keys[length:])
            if length:
                above.blocks = above.blocks[: length * WIDTH]
                del above.keys[length:]
                if above.shorter and length in above.shorter:
                    above.full |= above.shorter.pop(length)
                return
            self._unhook(above)
            above = above.parent

    def _unhook(self, run: Run) -> None:
        """Remove a run that has no children."""
        self.used.remove(run)
        first = run.blocks[:WIDTH]
        if run.parent is None:
            self.roots.remove(first)
            return
        children = run.parent.children
        assert children is not None, "a parent has no table of children"
        del children[(run.anchor, first)]
        if not children:
            run.parent.children = None

    def shrink(self, blocks_max: int) -> None:
        """Evict the least recently used runs until the index is within its bound."""
        while self.size > blocks_max:
            run = self.used.oldest()
            if run.children:
                self.used.touch(run)
                run = next(iter(run.children.values()))
                while run.children:
                    run = next(iter(run.children.values()))
            self._evict(run, max(0, len(run) - (self.size - blocks_max)))

    def _evict(self, run: Run, until: int) -> None:
        """Evict the blocks of a run from position `until` on, for all ranks."""
        before = self.size
        for slot in sorted(run.holders()):
            rank = self._slots[slot]
            assert rank is not None, "a run is held by an unassigned slot"
            gone = held_anywhere(run, slot) >> until << until
            self._unname(rank, run, gone)
            rank.count -= gone.bit_count()
            lead = run.lead(rank.bit)
            if lead > until:
                run.set_lead(rank.bit, lead, until)
            mask = (1 << until) - 1
            if run.stray and slot in run.stray:
                keep(run.stray, slot, run.stray[slot] & mask)
            if run.lower:
                for tier in range(1, len(TIERS)):
                    if (tier, slot) in run.lower:
                        keep(run.lower, (tier, slot), run.lower[(tier, slot)] & mask)
            if not held_anywhere(run, slot):
                rank.runs.pop(run, None)
        self._reclaim(run)
        self.counts.evicted += before - self.size
