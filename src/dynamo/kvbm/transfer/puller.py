"""Puller: the side that needs blocks; it tries the transports that a source offers in order of preference."""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Pair,
    PullMember,
    Region,
    SourceUnreachable,
    TransferOffer,
    TransferTimeout,
    Transport,
)

logger = logging.getLogger(__name__)

SUSPECT_S = 3.0  # Time for which a stalled source is not tried again; a restart takes no longer.
SUSPECTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Pulled:
    """Result of one pull."""

    transport: Transport
    bytes: int
    seconds: float


class Puller:
    """All transports of this process, in order of preference."""

    def __init__(self, region: Region, members: Iterable[PullMember]) -> None:
        self._region = region
        self._members = {member.transport: member for member in members}
        self._suspects: dict[str, float] = {}
        self._guard = threading.Lock()

    def pull(self, descriptor: Descriptor, pairs: Sequence[Pair], deadline: Deadline) -> Pulled:
        """Fill own blocks with those at indices of the descriptor. Block the thread. Raise `TransferError`."""
        self._region.layout.check(descriptor.layout)
        assert all(0 <= place < len(descriptor.blocks) for place, _ in pairs), "a pair is outside the descriptor"
        deadline.left()  # A pull that is already late must not mark the source as stalled.
        self._check_suspect(descriptor.engine_id)
        unreachable = "no transport in common"
        for member, offer in self._ways(descriptor):
            began = time.monotonic()
            try:
                member.pull(descriptor, offer, pairs, deadline)
            except SourceUnreachable as error:
                unreachable = str(error)
                logger.debug("blocks of %s by %s: %s", descriptor.engine_id, offer.transport, error)
                continue
            except TransferTimeout:
                self._suspect(descriptor.engine_id)
                raise
            size = len(pairs) * self._region.layout.block_bytes
            return Pulled(member.transport, size, time.monotonic() - began)
        self._suspect(descriptor.engine_id)
        raise SourceUnreachable(f"no transport to the source works: {unreachable}")

    def release(self, descriptor: Descriptor) -> None:
        """Release the blocks at the source by the first transport that reaches it, with a short timeout.

        Raise `TransferError` if none does: the source then releases them when the lease expires.
        """
        if self._is_suspect(descriptor.engine_id):
            return
        unreachable: SourceUnreachable | None = None
        for member, offer in self._ways(descriptor):
            try:
                member.release(descriptor, offer)
            except SourceUnreachable as error:
                unreachable = error
                continue
            return
        if unreachable is not None:
            raise unreachable

    def close(self) -> None:
        """Close the members."""
        for member in self._members.values():
            member.close()

    def _ways(self, descriptor: Descriptor) -> list[tuple[PullMember, TransferOffer]]:
        """Return the offered transports in this process's order of preference."""
        offers = {offer.transport: offer for offer in descriptor.offers}
        return [
            (member, offers[transport.value])
            for transport, member in self._members.items()
            if transport.value in offers
        ]

    def _suspect(self, engine_id: str) -> None:
        with self._guard:
            if len(self._suspects) >= SUSPECTS_MAX:
                self._suspects.clear()
            self._suspects[engine_id] = time.monotonic() + SUSPECT_S

    def _is_suspect(self, engine_id: str) -> bool:
        with self._guard:
            return self._suspects.get(engine_id, 0.0) > time.monotonic()

    def _check_suspect(self, engine_id: str) -> None:
        if self._is_suspect(engine_id):
            raise SourceUnreachable("the source stalled recently")
