"""Puller: the side that needs blocks: it chooses among the ways that a source offers, and the next where one fails."""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Offer,
    Pair,
    PullMember,
    Region,
    SourceUnreachable,
    TransferTimeout,
    Transport,
)

logger = logging.getLogger(__name__)

SUSPECT_S = 3.0  # After a stall nobody else waits for that source in vain; a restart or a hiccup takes no longer.
SUSPECTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull did."""

    transport: Transport
    bytes: int
    seconds: float


class Puller:
    """All ways that this process has, the best first."""

    def __init__(self, region: Region, members: Iterable[PullMember]) -> None:
        self._region = region
        self._members = {member.transport: member for member in members}
        self._suspects: dict[str, float] = {}
        self._guard = threading.Lock()

    def pull(self, descriptor: Descriptor, pairs: Sequence[Pair], deadline: Deadline) -> Pulled:
        """Fills blocks here with those at places of the descriptor. Blocks its thread. Raises `TransferError`."""
        self._region.layout.check(descriptor.layout)
        assert all(0 <= place < len(descriptor.blocks) for place, _ in pairs), "a place that the descriptor has not"
        deadline.left()  # Whoever waited too long for a turn has no complaint against the source.
        self._check_suspect(descriptor.engine_id)
        unreachable = "it offers none that we have"
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
        raise SourceUnreachable(f"no way to the source is open: {unreachable}")

    def release(self, descriptor: Descriptor) -> None:
        """Release the blocks at the source by the first way that reaches it; wait a moment at most.

        Raise `TransferError` where none does: the source then releases them when the lease expires.
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
        """Frees what the members took."""
        for member in self._members.values():
            member.close()

    def _ways(self, descriptor: Descriptor) -> list[tuple[PullMember, Offer]]:
        """In our order: we know what we are good at."""
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
            raise SourceUnreachable("the source did not answer a moment ago")
