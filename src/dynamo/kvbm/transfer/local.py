"""Local: transfers within one process: a source without sockets, and its puller."""

import secrets
import time
from collections.abc import Sequence

from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Freed,
    NotHeld,
    Pair,
    Region,
    SourceUnreachable,
    TransferOffer,
    Transport,
)
from dynamo.kvbm.transfer.leases import Leases
from dynamo.kvbm.transfer.shared import SLOTS


class LocalSource:
    """Counterpart of `Source` within one process. Leases do not expire by themselves: the caller calls `expire`."""

    def __init__(self, region: Region, freed: Freed, *, blocks_max: int = 1 << 30, ttl_s: float = 30.0) -> None:
        self.engine_id = secrets.token_hex(16)
        self.region = region
        self._freed = freed
        self._ttl_s = ttl_s
        self._leases = Leases(blocks_max=blocks_max, slots=SLOTS)
        self.pulled = 0

    @property
    def held(self) -> int:
        return self._leases.held

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def expired(self) -> int:
        return self._leases.expired

    def start(self) -> None: ...

    def publish(self, blocks: Sequence[int]) -> Descriptor | None:
        transfer_id = secrets.token_hex(16)
        now = time.monotonic()
        lease, freed = self._leases.grant(transfer_id, blocks, now + self._ttl_s)
        for one in freed:
            self._freed(one.blocks)
        if lease is None:
            return None
        return Descriptor(
            engine_id=self.engine_id,
            transfer_id=transfer_id,
            layout=self.region.layout,
            blocks=list(blocks),
            expires_at=time.time() + self._ttl_s,
            offers=[TransferOffer(transport=Transport.LOCAL.value, address=self.engine_id)],
        )

    def release(self, transfer_id: str) -> bool:
        was_held, freed = self._leases.release(transfer_id)
        self.pulled += was_held
        for lease in freed:
            self._freed(lease.blocks)
        return was_held

    def drop_oldest(self) -> bool:
        freed = self._leases.drop_oldest()
        for lease in freed:
            self._freed(lease.blocks)
        return bool(freed)

    def expire(self, now: float) -> None:
        """End the leases due at that time of `time.monotonic`."""
        for lease in self._leases.expire(now):
            self._freed(lease.blocks)

    def held_blocks(self, transfer_id: str) -> Sequence[int] | None:
        """Return the blocks of a transfer while they are held."""
        lease = self._leases.find(transfer_id)
        return None if lease is None else lease.blocks

    def close(self) -> None:
        for lease in self._leases.clear():
            self._freed(lease.blocks)


class LocalPuller:
    """`PullMember` between regions of one process."""

    transport = Transport.LOCAL

    def __init__(self, region: Region, *sources: LocalSource) -> None:
        self._region = region
        self._sources = {source.engine_id: source for source in sources}

    def pull(self, descriptor: Descriptor, offer: TransferOffer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        deadline.left()
        source = self._sources.get(offer.address)
        if source is None:
            raise SourceUnreachable("the source is in another process")
        blocks = source.held_blocks(descriptor.transfer_id)
        if blocks is None:
            raise NotHeld("the source does not hold these blocks")
        self._region.copy(source.region, [(blocks[place], block) for place, block in pairs])

    def release(self, descriptor: Descriptor, offer: TransferOffer) -> None:
        source = self._sources.get(offer.address)
        if source is not None:
            source.release(descriptor.transfer_id)

    def close(self) -> None:
        self._sources.clear()
