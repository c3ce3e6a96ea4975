"""TierIo: reads and writes of blocks in the tiers below the host's, on the threads of the block manager.

All calls block. A tier that fails returns the error of each block; the prompt is then computed, others are served.
"""

import logging
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.logical.book import TierCopy
from dynamo.kvbm.orders import LoadTicket, TierTraffic
from dynamo.kvbm.peers import PeerBlocks
from dynamo.kvbm.physical.disk import Disk, DiskFull
from dynamo.kvbm.physical.host import HostArena
from dynamo.kvbm.physical.layout import CorruptBlock
from dynamo.kvbm.physical.objects import ObjectBlocks, ObjectFailure
from dynamo.kvbm.transfer.base import TransferError

logger = logging.getLogger(__name__)


class TierIo:
    """The disk file, the object store and the peers of one block manager."""

    def __init__(
        self,
        host: HostArena,
        disk: Disk | None,
        objects: ObjectBlocks | None,
        traffic: TierTraffic,
        *,
        paused: Collection[Tier],
        clock: Callable[[], float],
        on_write_failure: Callable[[Tier, Exception], None],
    ) -> None:
        """`paused`: tiers to which nothing is written at present, which `on_write_failure` extends."""
        self.disk = disk
        self.objects = objects
        self.peers: PeerBlocks | None = None
        self._host = host
        self._traffic = traffic
        self._paused = paused
        self._clock = clock
        self._on_write_failure = on_write_failure

    def close(self, *, is_quiet: bool) -> None:
        """Close the tiers. Unless `is_quiet`, disk and peers stay open: a thread still copies."""
        if self.disk is not None and is_quiet:
            self.disk.close()
        if self.objects is not None:
            self.objects.store.close()
        if self.peers is not None and is_quiet:
            self.peers.close()

    def write_disk(self, copies: list[TierCopy]) -> list[bool]:
        """Write blocks of the host tier to the disk file; return for each whether it is whole."""
        assert self.disk is not None, "a disk tier without a disk"
        blocks = [
            (copy.lower, copy.identity, self._host.padded(copy.host)) for copy in copies if copy.lower is not None
        ]
        try:
            self.disk.write(sorted(blocks, key=_place))
        except (DiskFull, OSError) as error:
            self._on_write_failure(Tier.DISK, error)
            return [False] * len(copies)
        return [True] * len(copies)

    def write_objects(self, copies: list[TierCopy]) -> list[bool]:
        """Write blocks of the host tier to the object store; return for each whether it is whole."""
        assert self.objects is not None, "an object tier without a store"
        outcomes: list[bool] = []
        for copy in copies:
            written = 0
            if Tier.OBJECT not in self._paused:
                try:
                    written = self.objects.write(copy.identity, self._host.raw(copy.host))
                    self._traffic.object_bytes_out += written
                except ObjectFailure as error:
                    self._on_write_failure(Tier.OBJECT, error)
            outcomes.append(written > 0)
        return outcomes

    def read_disk(self, part: list[TierCopy], ticket: LoadTicket) -> list[Exception | None]:
        """Read blocks from the disk file into the host tier; return the error of each."""
        assert self.disk is not None, "a disk tier without a disk"
        places = [(copy.lower or 0, copy.identity.sequence_hash, self._host.padded(copy.host)) for copy in part]
        outcomes: list[Exception | None] = []
        try:
            outcomes += self.disk.read(places)
        except OSError as error:
            outcomes = [error] * len(part)
        for copy, outcome in zip(part, outcomes, strict=True):
            if outcome is not None:
                self._traffic.disk_read_failures += 1
                self._erase_disk(copy)
        return outcomes

    def read_peer(self, part: list[TierCopy], ticket: LoadTicket) -> list[Exception | None]:
        """Copy blocks from the ticket's peer into the host tier; return the error of each."""
        assert self.peers is not None, "a peer without a client for peers"
        assert ticket.peer is not None, "a peer without an address"
        hashes, slots = [copy.identity.sequence_hash for copy in part], [copy.host for copy in part]
        missing: Exception = KeyError("the peer does not have the block")
        try:
            timeout_s = max(0.001, ticket.deadline - self._clock())
            count = self.peers.read(ticket.peer.address, hashes, slots, timeout_s)
        except TransferError as error:
            logger.info("failed to copy blocks from peer %s (%s): %s", ticket.peer.address, error.kind, error)
            self._traffic.peer_failures += 1
            count, missing = 0, error
        return [None if at < count else missing for at in range(len(part))]

    def _erase_disk(self, copy: TierCopy) -> None:
        """Erase a block that could not be read, so that it is not restored at the next start."""
        if self.disk is not None and copy.lower is not None:
            try:
                self.disk.erase(copy.lower)
            except OSError as error:
                logger.warning("failed to erase a corrupt block: %s", error)

    def read_objects(self, part: list[TierCopy], ticket: LoadTicket) -> list[Exception | None]:
        """Read blocks from the object store into the host tier; return the error of each."""
        assert self.objects is not None, "an object tier without a store"
        outcomes: list[Exception | None] = []
        for copy in part:
            outcome: Exception | None = None
            if outcomes and outcomes[-1] is not None:
                outcome = outcomes[-1]  # Blocks after a missing one are unusable.
            else:
                left = max(0.001, ticket.deadline - self._clock())
                try:
                    count = self.objects.read(copy.identity.sequence_hash, self._host.raw(copy.host), left)
                    self._traffic.object_bytes_in += count
                    outcome = None if count else KeyError("no such object")
                except (ObjectFailure, CorruptBlock) as error:
                    self._traffic.object_read_failures += 1
                    outcome = error
            outcomes.append(outcome)
        return outcomes


def _place(block: tuple[int, BlockIdentity, npt.NDArray[np.uint8]]) -> int:
    return block[0]
