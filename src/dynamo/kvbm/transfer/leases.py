"""Leases: blocks held for pullers, with expiry times and a limit on their number. Pure.

A lease is *over* when its puller released it, when it expired, or when newer leases need its blocks; while its blocks are
read it is pinned, and they are freed only afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class TransferLease:
    """Blocks held for one puller."""

    transfer_id: str
    blocks: Sequence[int]
    expires_at: float
    slot: int
    readers: int = 0
    is_over: bool = False


class Leases:
    """All leases of one source. All times are of the same clock."""

    def __init__(self, *, blocks_max: int, slots: int) -> None:
        self._blocks_max = blocks_max
        self._leases: dict[str, TransferLease] = {}  # Oldest first.
        self._slots = list(range(slots - 1, -1, -1))
        self.held = 0
        """Blocks under lease; a block in two leases counts twice."""
        self.expired = 0
        """Leases that ended before they were pulled."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def next_expiry(self) -> float | None:
        """Time at which `expire` is due."""
        return min((lease.expires_at for lease in self._leases.values() if not lease.is_over), default=None)

    def grant(
        self, transfer_id: str, blocks: Sequence[int], expires_at: float
    ) -> tuple[TransferLease | None, list[TransferLease]]:
        """Return a new lease, or None if the limit does not allow one, and the older leases that were freed for it."""
        freed: list[TransferLease] = []
        if len(blocks) > self._blocks_max:
            return None, freed
        while self.held + len(blocks) > self._blocks_max or not self._slots:
            oldest = next((one for one in self._leases.values() if not one.readers), None)
            if oldest is None:
                return None, freed
            self.expired += not oldest.is_over
            freed += self._end(oldest)
        lease = TransferLease(transfer_id, list(blocks), expires_at, self._slots.pop())
        self._leases[transfer_id] = lease
        self.held += len(blocks)
        return lease, freed

    def find(self, transfer_id: str) -> TransferLease | None:
        """Return a lease that is not over."""
        lease = self._leases.get(transfer_id)
        return None if lease is None or lease.is_over else lease

    def pin(self, transfer_id: str) -> TransferLease | None:
        """Begin to read a lease's blocks, until `unpin`; return None if they are not held."""
        lease = self.find(transfer_id)
        if lease is not None:
            lease.readers += 1
        return lease

    def unpin(self, lease: TransferLease) -> list[TransferLease]:
        """End a read; return the leases freed."""
        lease.readers -= 1
        assert lease.readers >= 0, "a lease was unpinned twice"
        return self._end(lease) if lease.is_over else []

    def release(self, transfer_id: str) -> tuple[bool, list[TransferLease]]:
        """Return whether the lease was held until now, and the leases freed."""
        lease = self.find(transfer_id)
        return (True, self._end(lease)) if lease is not None else (False, [])

    def expire(self, now: float) -> list[TransferLease]:
        """End the expired leases; return those freed."""
        due = [lease for lease in self._leases.values() if not lease.is_over and lease.expires_at <= now]
        self.expired += len(due)
        return [freed for lease in due for freed in self._end(lease)]

    def drop_oldest(self) -> list[TransferLease]:
        """End the oldest lease that is not being read, to free its blocks at once; return the leases freed."""
        oldest = next((one for one in self._leases.values() if not one.readers), None)
        if oldest is None:
            return []
        self.expired += 1
        return self._end(oldest)

    def clear(self) -> list[TransferLease]:
        """End all leases; return those freed."""
        return [freed for lease in list(self._leases.values()) for freed in self._end(lease)]

    def validate(self) -> None:
        """Assert the invariants that hold between any two calls."""
        assert self.held == sum(len(lease.blocks) for lease in self._leases.values()), "held blocks are miscounted"
        assert self.held <= self._blocks_max, "more blocks are held than allowed"
        slots = [lease.slot for lease in self._leases.values()] + self._slots
        assert len(set(slots)) == len(slots), "a slot is used twice"
        for lease in self._leases.values():
            assert lease.readers or not lease.is_over, "a lease is over and not being read, but was kept"

    def _end(self, lease: TransferLease) -> list[TransferLease]:
        lease.is_over = True
        if lease.readers:
            return []
        del self._leases[lease.transfer_id]
        self._slots.append(lease.slot)
        self.held -= len(lease.blocks)
        return [lease]
