"""Active load of each rank: requests that were routed to it and have not finished.

Prompt tokens still to be computed, blocks occupied by requests, and requests are counted for each slot. Requests
with a common prefix share its blocks while both run, so blocks are counted in a tree of the active prompts. These numbers are
released when their request ends; `expire` ends requests whose end was never reported. `recent` counts finished requests as well.
"""

from array import array

import msgspec

from dynamo.kv_router.config import EXPIRY_S
from dynamo.kv_router.prefill_decay import PrefillDecay
from dynamo.kv_router.prompts import PromptTree, SharedBlocks, up
from dynamo.kv_router.runs import WIDTH

RECENT_SLOT_REQUESTS = 25.0
"""Requests for each slot that `ActiveLoad.recent` covers: an older one weighs 1/e of a new one."""
RECENT_UNIT_MAX = 1e100


class Booking(msgspec.Struct, gc=False):
    """One request's share of the load."""

    slot: int
    prefill_tokens: int
    """Prompt tokens still to be computed; 0 after the first token."""
    end: SharedBlocks | None
    """End of the prompt in the prompt tree, where blocks are shared."""
    blocks: float
    """Blocks of this request alone: output blocks, and prompt blocks where they are not shared."""
    discount: float
    """Blocks subtracted because the request is near its end."""
    booked_at: float
    context: int = 0
    """Blocks of its prompt and output, shared or not."""


class ActiveLoad:
    """The load of all ranks, by slot."""

    def __init__(self, *, shares_blocks: bool = True, expiry_s: float = EXPIRY_S, counts_recent: bool = True) -> None:
        """`shares_blocks`: count the common prefix of concurrent requests once (`--router-assume-kv-reuse`).

        `counts_recent`: count `recent`, which only the policy `balanced` uses.
        """
        self._counts_recent = counts_recent
        self.prefill_tokens = array("q")
        self.blocks = array("d")
        self.requests = array("q")
        self.contexts = array("q")
        """Blocks that the requests read in a decode step: a shared block once for each of them."""
        self.recent = array("d")
        """Decaying counts of all requests. Instead of the counts, the unit changes: a new request counts more than the one before."""
        self._recent_unit = 1.0
        self._recent_sum = 0.0
        self._shares = shares_blocks
        self._expiry_s = expiry_s
        self._prompts = PromptTree()
        self._bookings: dict[str, Booking] = {}
        self.decay: PrefillDecay | None = None
        """Estimated prefill progress, if enabled; `prefill_tokens` always holds the full prompts."""

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

    def reach(self, slot: int) -> None:
        """Allocate a slot."""
        while len(self.requests) <= slot:
            self.prefill_tokens.append(0)
            self.blocks.append(0)
            self.requests.append(0)
            self.contexts.append(0)
            self.recent.append(0)

    def recent_scale(self, ranks: int) -> float:
        """Return the factor that makes `recent` multiples of the mean of so many ranks; 0 before the first request."""
        return ranks / self._recent_sum if self._recent_sum > 0 else 0.0

    def _note_recent(self, slot: int) -> None:
        self._recent_unit *= 1.0 + 1.0 / (RECENT_SLOT_REQUESTS * len(self.recent))
        self.recent[slot] += self._recent_unit
        self._recent_sum += self._recent_unit
        if self._recent_unit > RECENT_UNIT_MAX:
            for one in range(len(self.recent)):
                self.recent[one] /= self._recent_unit
            self._recent_sum, self._recent_unit = sum(self.recent), 1.0

    def overlap(self, blocks: bytes) -> list[tuple[int, int]]:
        """Return pairs of (blocks from the start, slots as bits whose requests share exactly that many)."""
        return self._prompts.overlap(blocks)

    def book(
        self,
        request_id: str,
        slot: int,
        blocks: bytes,
        *,
        prefill_tokens: int,
        now: float,
        tracks_blocks: bool = True,
        shares_blocks: bool | None = None,
        prefill_s: float | None = None,
    ) -> None:
        """Add a request to a slot; a request that is already booked is booked again.

        `tracks_blocks=False` counts no blocks for it; `shares_blocks` overrides the load's setting for this request.
        `prefill_s` is the expected duration of its prefill in seconds.
        """
        if request_id in self._bookings:
            self.finish(request_id)
        if slot >= len(self.requests):
            self.reach(slot)
        own, end, context = 0.0, None, 0
        if tracks_blocks:
            context = len(blocks) // WIDTH
            if self._shares if shares_blocks is None else shares_blocks:
                node = end = self._prompts.enter(blocks)
                while node is not None and node.parent is not None:
                    count = node.marks.get(slot)
                    if count is None:
                        node.mark(slot, 1)
                        self.blocks[slot] += len(node.blocks) // WIDTH
                    else:
                        node.marks[slot] = count + 1
                    node = node.parent
            else:
                own = context
                self.blocks[slot] += own
            self.contexts[slot] += context
        self.prefill_tokens[slot] += prefill_tokens
        self.requests[slot] += 1
        if self._counts_recent:
            self._note_recent(slot)
        self._bookings[request_id] = Booking(slot, prefill_tokens, end, own, 0.0, now, context)
        if self.decay is not None and prefill_s is not None and prefill_tokens:
            self.decay.add(slot, request_id, prefill_tokens, prefill_s, now)

    def prefill_tokens_at(self, now: float) -> "array[float]":
        """Return a copy of the prompt tokens still to be computed, by slot, reduced by estimated progress."""
        found = array("d", self.prefill_tokens)
        if self.decay is not None:
            self.decay.subtract(found, now)
        return found

    def slot_of(self, request_id: str) -> int | None:
        """Return the slot of a request; None if it is not booked."""
        booking = self._bookings.get(request_id)
        return None if booking is None else booking.slot

    def prefill_of(self, request_id: str) -> int:
        """Return the prompt tokens of a request still to be computed; 0 for an unknown request."""
        booking = self._bookings.get(request_id)
        return 0 if booking is None else booking.prefill_tokens

    def prefilled(self, request_id: str, now: float | None = None) -> bool:
        """Record the first token of a request. Return False for an unknown request."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return False
        if self.decay is not None:
            self.decay.remove(booking.slot, request_id, now)
        self.prefill_tokens[booking.slot] -= booking.prefill_tokens
        booking.prefill_tokens = 0
        return True

    def grow(self, request_id: str, weight: float | None = None) -> bool:
        """Add one output block to a request. Return False for an unknown request.

        `weight`, from 1 to 0, is the expected share of the output still to come. Output blocks and prompt blocks that no
        other request uses are multiplied by it, because they will be free soon.
        """
        booking = self._bookings.get(request_id)
        if booking is None:
            return False
        booking.blocks += 1
        booking.context += 1
        self.contexts[booking.slot] += 1
        discount = 0.0
        if weight is not None:
            discount = (1.0 - min(1.0, max(0.0, weight))) * (booking.blocks + self._exclusive(booking))
        self.blocks[booking.slot] += 1 + booking.discount - discount
        booking.discount = discount
        return True

    def finish(self, request_id: str, now: float | None = None) -> bool:
        """Remove a finished request. Return False for an unknown request."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return False
        slot = booking.slot
        if self.decay is not None:
            self.decay.remove(slot, request_id, now)
        self.prefill_tokens[slot] -= booking.prefill_tokens
        self.requests[slot] -= 1
        self.contexts[slot] -= booking.context
        node = booking.end
        while node is not None and (above := node.parent) is not None:
            count = node.marks[slot]
            if count > 1:
                node.marks[slot] = count - 1
            else:
                node.unmark(slot)
                self.blocks[slot] -= len(node.blocks) // WIDTH
            node = above
        self.blocks[slot] += booking.discount - booking.blocks
        if not self.requests[slot]:
            self.blocks[slot] = 0.0  # Discard the rounding error left by past requests.
        return True

    def drop(self, slot: int) -> list[str]:
        """Remove all requests of a rank that left; return their ids."""
        ids = [request_id for request_id, booking in self._bookings.items() if booking.slot == slot]
        for request_id in ids:
            self.finish(request_id)
        if slot < len(self.recent):
            self.recent[slot] = 0.0
            self._recent_sum = sum(self.recent)
        return ids

    def expire(self, now: float) -> list[str]:
        """Remove requests booked more than the expiry time ago; return their ids."""
        ids = []
        for request_id, booking in self._bookings.items():  # Oldest booking first.
            if now - booking.booked_at < self._expiry_s:
                break
            ids.append(request_id)
        for request_id in ids:
            self.finish(request_id)
        return ids

    def validate(self) -> None:
        """Raise `AssertionError` if the totals differ from the sum of the bookings."""
        for slot in range(len(self.requests)):
            mine = [booking for booking in self._bookings.values() if booking.slot == slot]
            assert self.requests[slot] == len(mine), "requests are miscounted"
            assert self.contexts[slot] == sum(one.context for one in mine), "contexts are miscounted"
            assert self.prefill_tokens[slot] == sum(one.prefill_tokens for one in mine), "tokens are miscounted"
            own = sum(one.blocks - one.discount for one in mine)
            shared = sum(len(node) for node in self._prompts if slot in node.marks)
            assert abs(self.blocks[slot] - own - shared) < 1e-6, "blocks are miscounted"
        self._prompts.validate()

    def _exclusive(self, booking: Booking) -> int:
        """Return the number of prompt blocks that no other request of the slot uses."""
        found = 0
        for node in up(booking.end):
            if node.marks[booking.slot] > 1:
                break
            found += len(node)
        return found
