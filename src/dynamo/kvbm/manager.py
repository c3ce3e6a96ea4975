"""BlockManager: the tiers below an engine's own cache, and the threads that copy between them.

offload(blocks)            device → host, on the caller's thread; policies select blocks for disk and object store
find(hashes), array(slot)  host → device: the caller copies, then releases
begin(identities)          disk, object store → host, on a thread; returns a ticket, which the caller must end
reidentify(model)          the engine's weights were exchanged

A block can be found only after its copy is complete. A ticket expires at its deadline: blocks that have not arrived by
then are computed. All methods are thread-safe.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dynamo.core.boundaries import ErrorBoundary, Rollback, logged
from dynamo.core.errors import ConfigError
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.logical.book import TierCopy
from dynamo.kvbm.logical.pool import Change, changes_from_empty
from dynamo.kvbm.orders import Array, LoadTicket, Outgoing, Peer, TierTraffic
from dynamo.kvbm.peers import PeerBlocks, PeerServer
from dynamo.kvbm.physical.layout import BlockLayout, CorruptBlock
from dynamo.kvbm.physical.objects import ObjectBlocks, ObjectStore
from dynamo.kvbm.tier_io import TierIo
from dynamo.kvbm.tiers import open_tiers, reopen_disk
from dynamo.kvbm.transfer.base import TransferError
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)


ONBOARDERS = 2  # One thread can wait for an object store while the other reads from disk.
TICKETS_MAX = 256  # Prompts waiting for their blocks; beyond it, prompts are computed.
PEER_BATCH = 4096  # Blocks per request to a peer: a prefix is requested at once, however long.
LENT_SHARE = 4  # At most one in this many host blocks is held for peers.
PAUSE_S = 30.0  # Pause of writes to a tier after a failed write: a full disk stays full for a while.
QUIET_S = 60.0  # Maximum wait for running copies when the model is exchanged; each has its own, far shorter deadline.
FLUSH_S = 2.0  # Time to write queued blocks at shutdown.
IDLE_S = 60.0  # Idle threads also poll for work at this interval, though new work wakes them.


class BlockManager:
    """The KV tiers of one engine."""

    def __init__(
        self,
        config: KvbmConfig,
        layout: BlockLayout,
        *,
        worker_id: str = "",
        store: ObjectStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        tls: TcpTls = PLAIN,
    ) -> None:
        """`on_change` is called, on any thread, after a thread changed the content of the tiers.

        Raise `ConfigError` for tiers that cannot be opened.
        """
        self.config = config
        self.layout = layout
        self.traffic = TierTraffic()
        self._clock = clock
        self._on_change = on_change
        tiers = open_tiers(config, layout, worker_id=worker_id, store=store)
        self.book, self.host = tiers.book, tiers.host
        self._io = TierIo(
            tiers.host,
            tiers.disk,
            tiers.objects,
            self.traffic,
            paused=tiers.book.paused,
            clock=clock,
            on_write_failure=self._write_failed,
        )
        self._pages = tiers.pages
        self._tls = tls
        self._server: PeerServer | None = None
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._is_quiet = threading.Condition(self._lock)
        self._working = 0
        """Threads that copy at the moment."""
        self._is_exchanging = False
        """While set, no copy begins."""
        self._is_over = threading.Condition(self._lock)
        self._tickets: deque[LoadTicket] = deque()
        self._begun: list[LoadTicket] = []
        """Tickets in progress on a thread."""
        self._resume_at: dict[Tier, float] = {}
        self._close_by: float | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads and the server for peers. Raise `ConfigError` if it cannot listen."""
        if self.config.has_peers:
            self._io.peers = PeerBlocks(self.host, tls=self._tls)
            self._server = PeerServer(
                self.host,
                self._pages,
                self._lend,
                self.release,
                host=self.config.peer_host,
                blocks_max=max(1, self.book.host.total // LENT_SHARE),
                tls=self._tls,
            )
        writers = {Tier.DISK: self._io.write_disk, Tier.OBJECT: self._io.write_objects}
        for tier in self.book.lower:
            self._start(f"offload-{tier.name.lower()}", self._run_offloads, tier, writers[tier])
        if self.book.lower or self._io.peers is not None:
            for number in range(ONBOARDERS):
                self._start(f"onboard-{number}", self._run_onboards)

    def close(self) -> None:
        """Write queued blocks for up to `FLUSH_S`, then end the threads; idempotent."""
        with self._lock:
            if self._close_by is None:
                self._close_by = self._clock() + FLUSH_S
            self._has_work.notify_all()
            self._is_over.notify_all()
        if self._server is not None:
            self._server.close()
            self._server = None
        for thread in self._threads:
            thread.join(FLUSH_S * 2 + self.config.object_timeout_s)
            if thread.is_alive():
                logger.error("thread %s of the block manager did not end", thread.name)
        is_quiet = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        self._io.close(is_quiet=is_quiet)

    @property
    def peer_address(self) -> str | None:
        """Address where peers request blocks; None if peers are disabled."""
        return None if self._server is None else self._server.address

    # From and to the device.

    def offload(self, blocks: Sequence[Outgoing]) -> int:
        """Copy consecutive blocks of a sequence into the host tier if policies select them; return the number copied."""
        now = self._clock()
        fills = {one.identity.sequence_hash: one.fill for one in blocks}
        with self._lock:
            self._resume(now)
            chosen = self.book.worthy([one.identity for one in blocks], now)
            slots = self.book.admit(len(chosen))
        for identity, slot in zip(chosen, slots, strict=False):
            fills[identity.sequence_hash](self.host.array(slot))
        with self._lock:
            for identity, slot in zip(chosen, slots, strict=False):
                self.book.admitted(slot, identity, now)
            self._has_work.notify_all()
        return len(slots)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Hold the longest prefix in the host tier until `release`."""
        now = self._clock()
        with self._lock:
            self._resume(now)
            slots = self.book.find(hashes, now)
            self._has_work.notify_all()
        return slots

    def touch(self, hashes: Sequence[int]) -> None:
        """Record that the device reused its own copies: they are kept longer here, and may qualify for a lower tier."""
        now = self._clock()
        with self._lock:
            self.book.touch(hashes, now)
            self._has_work.notify_all()

    def array(self, slot: int) -> Array:
        """Return a held block in the device's layout."""
        return self.host.array(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Release blocks of `find`."""
        with self._lock:
            self.book.host.release(slots)

    # From slower tiers.

    def begin(self, identities: Sequence[BlockIdentity], peer: Peer | None = None) -> LoadTicket | None:
        """Start to copy the longest prefix in slower tiers or at a peer into the host tier; None if there is none."""
        now = self._clock()
        from_peer = peer.blocks if peer is not None and self._io.peers is not None else 0
        with self._lock:
            if self._close_by is not None or self._is_exchanging:
                return None
            if len(self._tickets) >= TICKETS_MAX or not self._threads:
                return None
            if not self.book.reach([one.sequence_hash for one in identities], from_peer):
                return None
            found = self.book.take_onboards(identities, from_peer)
            if not found.copies:
                self.book.host.release(found.held)
                return None
            ticket = LoadTicket(now + self.config.onboard_timeout_s, deque(found.copies), peer, found.held)
            self._tickets.append(ticket)
            self.traffic.tickets += 1
            self._has_work.notify_all()
        return ticket

    def reaches(self, hashes: Sequence[int]) -> bool:
        """Return whether `begin` would return a ticket."""
        with self._lock:
            return self.book.reach(hashes)

    def is_over(self, ticket: LoadTicket) -> bool:
        """Return whether all available blocks have arrived, or the deadline has passed."""
        return ticket.is_done or self._clock() >= ticket.deadline

    def end(self, ticket: LoadTicket) -> None:
        """End a ticket and release its blocks."""
        with self._lock:
            if ticket.is_ended:
                return
            ticket.is_ended = True
            if not ticket.is_done:
                self.traffic.tickets_late += 1
            held, ticket.held = ticket.held, []
            self.book.host.release(held)

    def wait(self, timeout_s: float) -> None:
        """Wait until a ticket is over, at most `timeout_s`."""
        with self._lock:
            self._is_over.wait(timeout_s)

    # Inspection.

    def take_changes(self) -> list[tuple[Tier, list[Change]]]:
        """Return the blocks that became readable or unreadable since the last call, tier by tier."""
        with self._lock:
            pools = {**({Tier.HOST: self.book.host} if self.book.host.is_keeping else {}), **self.book.lower}
            return [(tier, changes) for tier, pool in pools.items() if (changes := pool.take_changes())]

    def take_all(self) -> list[tuple[Tier, list[Change]]]:
        """Return all readable blocks, parents first, for a new subscriber. Pending changes are included and cleared."""
        with self._lock:
            pools = {**({Tier.HOST: self.book.host} if self.book.host.is_keeping else {}), **self.book.lower}
            for pool in pools.values():
                pool.take_changes()
            return changes_from_empty({tier: pool.content() for tier, pool in pools.items()})

    def clear(self) -> None:
        """Drop all blocks. Objects stay in their store, and can be found there again."""
        with self._lock:
            self.book.clear()
            if self._io.disk is not None:
                try:
                    self._io.disk.clear()
                except OSError as error:
                    self._pause(Tier.DISK, error)

    def reidentify(self, model: str) -> None:
        """Switch to another model, given by its fingerprint; blocks of the former model are never found again.

        To be called while nothing computes. The former model's disk file is removed; a file with blocks of the new model
        is reused. Objects stay. Waits for running copies. Raise `ConfigError` for a tier that cannot be reopened.
        """
        with self._lock:
            if model == self.layout.model:
                return
            self.book.clear()
            self._is_exchanging = True
            try:
                with Rollback(self._stop_copies):  # Rather than use blocks of a wrong model.
                    self._exchange_model(model)
            finally:
                self._is_exchanging = False
                self._has_work.notify_all()

    def _stop_copies(self) -> None:
        self._close_by = self._clock()

    def _exchange_model(self, model: str) -> None:
        for ticket in (*self._tickets, *self._begun):
            self._finish(ticket)
        self._tickets.clear()
        self._wait_for_copies()
        self.layout = replace(self.layout, model=model)
        self.host.layout = self.layout
        if self._io.disk is not None:
            self._io.disk.discard()
            self._io.disk = reopen_disk(self.config, self.layout, self.book)
            if self._io.disk is None:
                self._resume_at.pop(Tier.DISK, None)
        if self._io.objects is not None:
            self._io.objects = ObjectBlocks(self._io.objects.store, self.layout, self.config.object_timeout_s)
        for one in (self._io.peers, self._server):
            if one is not None:
                one.reidentify(self.host)

    def status(self) -> dict[str, Any]:
        """Return the fill of the tiers and the copies in progress."""
        with self._lock:
            host = self.book.host
            tiers = {Tier.HOST: host, **self.book.lower}
            return {
                "tiers": {
                    tier.name.lower(): {
                        "blocks": pool.total if pool.is_keeping else 0,
                        "stored": len(pool) if pool.is_keeping else 0,
                        "held": pool.held(),
                        "paused": tier in self.book.paused,
                    }
                    for tier, pool in tiers.items()
                },
                "waiting_offloads": {tier.name.lower(): self.book.waiting(tier) for tier in self.book.lower},
                "waiting_onboards": len(self._tickets),
                "block_bytes": self.layout.block_bytes,
                "fingerprint": f"{self.layout.fingerprint:016x}",
            }

    def validate(self) -> None:
        """Assert the invariants that hold between any two calls."""
        with self._lock:
            self.book.validate()

    # The threads.

    def _start(self, name: str, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._watched, args=(run, *args), name=f"kvbm-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watched(self, run: Callable[..., None], *args: Any) -> None:
        with ErrorBoundary(self._disable_tiers):  # No caller receives the exception.
            run(*args)

    def _disable_tiers(self, error: Exception) -> None:
        logger.error("a thread of the block manager failed: its tier is disabled", exc_info=error)
        with self._lock:
            self.book.paused.update(self.book.lower)
            self._resume_at = dict.fromkeys(self.book.lower, float("inf"))

    def _run_offloads(self, tier: Tier, write: Callable[[list[TierCopy]], list[bool]]) -> None:
        while True:
            with self._lock:
                while (not self.book.waiting(tier) or self._is_exchanging) and self._close_by is None:
                    self._has_work.wait(IDLE_S)
                if self._close_by is not None and (not self.book.waiting(tier) or self._clock() >= self._close_by):
                    return
                copies = self.book.take_offloads(tier, self.config.transfer_batch)
                self._working += 1
            with self._copying():
                outcomes = write(copies)
                with self._lock:
                    for copy, is_whole in zip(copies, outcomes, strict=True):
                        self.book.offloaded(copy, is_whole=is_whole)
            if copies:
                self._on_change()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Count the calling thread, already added to `_working`, as copying until the end of the block."""
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
                self._is_quiet.notify_all()

    def _run_onboards(self) -> None:
        while True:
            with self._lock:
                while not self._tickets and self._close_by is None:
                    self._has_work.wait(IDLE_S)
                if self._close_by is not None:
                    for ticket in self._tickets:
                        self._finish(ticket)
                    self._tickets.clear()
                    return
                ticket = self._tickets.popleft()
                self._begun.append(ticket)
                self._working += 1
            try:
                with self._copying():
                    while self._take_part(ticket):
                        pass
            finally:
                with self._lock:
                    self._begun.remove(ticket)
                    self._finish(ticket)
            self._on_change()

    def _take_part(self, ticket: LoadTicket) -> bool:
        """Copy the next blocks of a ticket. Return False when it is over: complete, a block missing, or ended."""
        with self._lock:
            if not ticket.copies or ticket.is_ended or self._clock() >= ticket.deadline or self._close_by is not None:
                return False
            part = [ticket.copies.popleft()]
            tier = part[0].tier
            limit = PEER_BATCH if tier is Tier.PEER else self.config.transfer_batch
            while ticket.copies and ticket.copies[0].tier is tier and len(part) < limit:
                part.append(ticket.copies.popleft())
        reads = {Tier.DISK: self._io.read_disk, Tier.OBJECT: self._io.read_objects, Tier.PEER: self._io.read_peer}
        outcomes: Sequence[Exception | None] = [TransferError("failed to read")] * len(part)
        with logged(logger, "failed to read blocks from %s", tier.value):  # This prompt is computed; others are served.
            outcomes = reads[tier](part, ticket)
        came: list[int] = []
        with self._lock:
            for copy, error in zip(part, outcomes, strict=True):
                is_corrupt = isinstance(error, CorruptBlock)
                if is_corrupt:
                    logger.warning(
                        "failed to read block %016x from %s: %s", copy.identity.sequence_hash, copy.tier.value, error
                    )
                slot = self.book.onboarded(copy, is_whole=error is None, is_corrupt=is_corrupt)
                if slot is not None:
                    came.append(slot)
            self._keep(ticket, came)
        return not any(outcomes)

    def _lend(self, hashes: Sequence[int]) -> list[int]:
        """Hold blocks for a peer to copy."""
        with self._lock:
            return self.book.host.match(hashes)

    def _write_failed(self, tier: Tier, error: Exception) -> None:
        """Count a failed write to a tier, and pause its writes."""
        with self._lock:
            if tier is Tier.DISK:
                self.traffic.disk_write_failures += 1
            else:
                self.traffic.object_write_failures += 1
            self._pause(tier, error)

    # Called with the lock held.

    def _wait_for_copies(self) -> None:
        """Wait until no thread copies. Raise `ConfigError` after `QUIET_S`."""
        if not self._is_quiet.wait_for(lambda: not self._working, QUIET_S):
            raise ConfigError(f"the KV tiers still copy blocks of the former model after {QUIET_S:g} s")

    def _keep(self, ticket: LoadTicket, slots: list[int]) -> None:
        """Hold blocks that arrived for a ticket, until it is ended."""
        if ticket.is_ended:
            self.book.host.release(slots)
        else:
            ticket.held += slots

    def _finish(self, ticket: LoadTicket) -> None:
        """Cancel the copies of a ticket that have not begun, and mark it done."""
        for copy in ticket.copies:
            self.book.cancelled(copy)
        ticket.copies.clear()
        ticket.is_done = True
        self._is_over.notify_all()

    def _pause(self, tier: Tier, error: Exception) -> None:
        """Write nothing to a tier for `PAUSE_S`."""
        if tier not in self.book.paused:
            logger.warning("%s tier: writes paused for %.0f s: %s", tier.value, PAUSE_S, error)
        self.book.paused.add(tier)
        self._resume_at[tier] = self._clock() + PAUSE_S

    def _resume(self, now: float) -> None:
        """Resume writes to the tiers whose pause is over."""
        for tier in [tier for tier, at in self._resume_at.items() if now >= at]:
            del self._resume_at[tier]
            self.book.paused.discard(tier)
