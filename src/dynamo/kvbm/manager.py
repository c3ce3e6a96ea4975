"""BlockManager: the tiers below an engine's own cache, and the threads that copy between them.

    offload(blocks)            device → host, on the caller's thread; what is worth it goes on to disk and object store
    find(hashes), array(slot)  host → device: the caller copies, then releases
    begin(identities)          disk, object store → host, on a thread; a ticket says when it is over, and is to be ended
    reidentify(model)          the engine has other weights

A block is found only after its copy is whole. Who waits for a ticket waits until its deadline and no longer: what has
not come by then is computed. All methods may be called from any thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import Identity, Tier
from dynamo.kvbm.logical.book import Copy
from dynamo.kvbm.logical.pool import Change, told_anew
from dynamo.kvbm.orders import Array, Outgoing, Peer, Ticket, Traffic
from dynamo.kvbm.peers import PeerBlocks, PeerServer
from dynamo.kvbm.physical.disk import DiskFull
from dynamo.kvbm.physical.layout import BlockLayout, Corrupt
from dynamo.kvbm.physical.objects import ObjectBlocks, ObjectFailure, ObjectStore
from dynamo.kvbm.tiers import open_tiers, reopen_disk
from dynamo.kvbm.transfer.base import TransferError
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.runtime.request_plane.tcp import TcpTls

logger = logging.getLogger(__name__)


ONBOARDERS = 2  # One may wait for an object store while the other reads from disk.
TICKETS_MAX = 256  # Prompts that wait for their blocks; one more computes them.
PEER_BATCH = 4096  # A peer is asked once for a prefix, however long.
LENT_SHARE = 4  # At most one block of so many is held for peers.
PAUSE_S = 30.0  # After a failed write nothing is written to a tier for so long: a full disk does not empty itself.
QUIET_S = 60.0  # For copies that run when the model is exchanged: each has a deadline of its own, far below.
FLUSH_S = 2.0  # At the end: for what waits to be written.
IDLE_S = 60.0  # A thread without work looks again, though it is woken for work.


class BlockManager:
    """One engine's tiers."""

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
        """`on_change` is called, on any thread, when a thread changed what the tiers hold.

        Raises `ConfigError` for tiers that cannot be opened.
        """
        self.config = config
        self.layout = layout
        self.traffic = Traffic()
        self._clock = clock
        self._on_change = on_change
        tiers = open_tiers(config, layout, worker_id=worker_id, store=store)
        self.book, self.host, self._disk, self._objects = tiers.book, tiers.host, tiers.disk, tiers.objects
        self._pages = tiers.pages
        self._tls = tls
        self._peers: PeerBlocks | None = None
        self._server: PeerServer | None = None
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._is_quiet = threading.Condition(self._lock)
        self._working = 0
        """Threads that copy."""
        self._is_exchanging = False
        """No copy begins."""
        self._is_over = threading.Condition(self._lock)
        self._tickets: deque[Ticket] = deque()
        self._begun: list[Ticket] = []
        """Those that threads work at."""
        self._resume_at: dict[Tier, float] = {}
        self._close_by: float | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads, and serves peers. Raises `ConfigError` where it cannot."""
        if self.config.has_peers:
            self._peers = PeerBlocks(self.host, tls=self._tls)
            self._server = PeerServer(
                self.host,
                self._pages,
                self._lend,
                self.release,
                host=self.config.peer_host,
                blocks_max=max(1, self.book.host.total // LENT_SHARE),
                tls=self._tls,
            )
        writers = {Tier.DISK: self._write_disk, Tier.OBJECT: self._write_objects}
        for tier in self.book.lower:
            self._start(f"offload-{tier.name.lower()}", self._run_offloads, tier, writers[tier])
        if self.book.lower or self._peers is not None:
            for number in range(ONBOARDERS):
                self._start(f"onboard-{number}", self._run_onboards)

    def close(self) -> None:
        """Writes what waits, as far as that is quick, and ends the threads; safe to call twice."""
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
                logger.error("the thread %s did not end", thread.name)
        is_quiet = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        if self._disk is not None and is_quiet:
            self._disk.close()
        if self._objects is not None:
            self._objects.store.close()
        if self._peers is not None and is_quiet:
            self._peers.close()

    @property
    def peer_address(self) -> str | None:
        """Where peers ask for blocks; None where they cannot."""
        return None if self._server is None else self._server.address

    # From and to the device.

    def offload(self, blocks: Sequence[Outgoing]) -> int:
        """Copies a sequence's consecutive blocks into the host, those that are worth it. How many were copied."""
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
        """Holds the longest prefix that the host has, until `release`."""
        now = self._clock()
        with self._lock:
            self._resume(now)
            slots = self.book.find(hashes, now)
            self._has_work.notify_all()
        return slots

    def touch(self, hashes: Sequence[int]) -> None:
        """The device has these and uses them again: they stay longer here, and may be worth a place further down."""
        now = self._clock()
        with self._lock:
            self.book.touch(hashes, now)
            self._has_work.notify_all()

    def array(self, slot: int) -> Array:
        """A held block, as it lay on the device."""
        return self.host.array(slot)

    def release(self, slots: Sequence[int]) -> None:
        with self._lock:
            self.book.host.release(slots)

    # From slower tiers.

    def begin(self, identities: Sequence[Identity], peer: Peer | None = None) -> Ticket | None:
        """Brings the longest prefix into the host that slower tiers or a peer have; None: there is nothing to wait for."""
        now = self._clock()
        from_peer = peer.blocks if peer is not None and self._peers is not None else 0
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
            ticket = Ticket(now + self.config.onboard_timeout_s, deque(found.copies), peer, found.held)
            self._tickets.append(ticket)
            self.traffic.tickets += 1
            self._has_work.notify_all()
        return ticket

    def reaches(self, hashes: Sequence[int]) -> bool:
        """Whether `begin` would find something to wait for."""
        with self._lock:
            return self.book.reach(hashes)

    def is_over(self, ticket: Ticket) -> bool:
        """Whether all came that will, or the time is over."""
        return ticket.is_done or self._clock() >= ticket.deadline

    def end(self, ticket: Ticket) -> None:
        """Nobody waits for it any more. What it holds may be given away from now on."""
        with self._lock:
            if ticket.is_ended:
                return
            ticket.is_ended = True
            if not ticket.is_done:
                self.traffic.tickets_late += 1
            held, ticket.held = ticket.held, []
            self.book.host.release(held)

    def wait(self, timeout_s: float) -> None:
        """Until a ticket is over, or for so long."""
        with self._lock:
            self._is_over.wait(timeout_s)

    # About them.

    def take_changes(self) -> list[tuple[Tier, list[Change]]]:
        """What became readable or unreadable since the last call, tier by tier."""
        with self._lock:
            pools = {**({Tier.HOST: self.book.host} if self.book.host.is_keeping else {}), **self.book.lower}
            return [(tier, changes) for tier, pool in pools.items() if (changes := pool.take_changes())]

    def take_all(self) -> list[tuple[Tier, list[Change]]]:
        """What is readable now, for somebody who knows nothing: every block after its parent. Changes so far are in it."""
        with self._lock:
            pools = {**({Tier.HOST: self.book.host} if self.book.host.is_keeping else {}), **self.book.lower}
            for pool in pools.values():
                pool.take_changes()
            return told_anew({tier: pool.content() for tier, pool in pools.items()})

    def clear(self) -> None:
        """Forgets all blocks. Objects stay in their store, and are found there again."""
        with self._lock:
            self.book.clear()
            if self._disk is not None:
                try:
                    self._disk.clear()
                except OSError as error:
                    self._pause(Tier.DISK, error)

    def reidentify(self, model: str) -> None:
        """From now on blocks are of this model, by its fingerprint; those of another one are never found again.

        To be called while nothing computes. The disk tier's file of the other model is removed; a file that this
        model's blocks were left in serves again. Objects stay. Waits for copies that run. Raises `ConfigError` for a
        tier that cannot be opened again.
        """
        with self._lock:
            if model == self.layout.model:
                return
            self.book.clear()
            self._is_exchanging = True
            try:
                for ticket in (*self._tickets, *self._begun):
                    self._finish(ticket)
                self._tickets.clear()
                self._fall_quiet()
                self.layout = replace(self.layout, model=model)
                self.host.layout = self.layout
                if self._disk is not None:
                    self._disk.discard()
                    self._disk = reopen_disk(self.config, self.layout, self.book)
                    if self._disk is None:
                        self._resume_at.pop(Tier.DISK, None)
                if self._objects is not None:
                    self._objects = ObjectBlocks(self._objects.store, self.layout, self.config.object_timeout_s)
                for one in (self._peers, self._server):
                    if one is not None:
                        one.reidentify(self.host)
            except BaseException:
                self._close_by = self._clock()  # Nothing is read or written any more, rather than anything wrong.
                raise
            finally:
                self._is_exchanging = False
                self._has_work.notify_all()

    def status(self) -> dict[str, Any]:
        """How full the tiers are, and what is on its way."""
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
        """Asserts what must hold between any two calls."""
        with self._lock:
            self.book.validate()

    # The threads.

    def _start(self, name: str, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._watched, args=(run, *args), name=f"kvbm-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watched(self, run: Callable[..., None], *args: Any) -> None:
        try:
            run(*args)
        except Exception:  # The task's owner: nobody else would hear of it.
            logger.exception("a thread of the block manager failed: its tier is not used any more")
            with self._lock:
                self.book.paused.update(self.book.lower)
                self._resume_at = dict.fromkeys(self.book.lower, float("inf"))

    def _run_offloads(self, tier: Tier, write: Callable[[list[Copy]], list[bool]]) -> None:
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
        """Of one that works, until it does not."""
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
                self._is_quiet.notify_all()

    def _write_disk(self, copies: list[Copy]) -> list[bool]:
        assert self._disk is not None, "a disk tier without a disk"
        blocks = [(copy.lower, copy.identity, self.host.padded(copy.host)) for copy in copies if copy.lower is not None]
        try:
            self._disk.write(sorted(blocks, key=_place))
        except (DiskFull, OSError) as error:
            with self._lock:
                self.traffic.disk_write_failures += 1
                self._pause(Tier.DISK, error)
            return [False] * len(copies)
        return [True] * len(copies)

    def _write_objects(self, copies: list[Copy]) -> list[bool]:
        assert self._objects is not None, "an object tier without a store"
        outcomes: list[bool] = []
        for copy in copies:
            written = 0
            if Tier.OBJECT not in self.book.paused:
                try:
                    written = self._objects.write(copy.identity, self.host.raw(copy.host))
                    self.traffic.object_bytes_out += written
                except ObjectFailure as error:
                    with self._lock:
                        self.traffic.object_write_failures += 1
                        self._pause(Tier.OBJECT, error)
            outcomes.append(written > 0)
        return outcomes

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

    def _take_part(self, ticket: Ticket) -> bool:
        """Copies the next blocks of a ticket. False when it is over: there are no more, one is missing, nobody waits."""
        with self._lock:
            if not ticket.copies or ticket.is_ended or self._clock() >= ticket.deadline or self._close_by is not None:
                return False
            part = [ticket.copies.popleft()]
            tier = part[0].tier
            limit = PEER_BATCH if tier is Tier.PEER else self.config.transfer_batch
            while ticket.copies and ticket.copies[0].tier is tier and len(part) < limit:
                part.append(ticket.copies.popleft())
        reads = {Tier.DISK: self._read_disk, Tier.OBJECT: self._read_objects, Tier.PEER: self._read_peer}
        try:
            outcomes = reads[tier](part, ticket)
        except Exception as failure:  # The request's boundary: its prompt is computed, and others are read on.
            logger.exception("blocks could not be read from %s", tier.value)
            outcomes = [failure] * len(part)
        came: list[int] = []
        with self._lock:
            for copy, error in zip(part, outcomes, strict=True):
                is_corrupt = isinstance(error, Corrupt)
                if is_corrupt:
                    logger.warning("block %016x of %s: %s", copy.identity.sequence_hash, copy.tier.value, error)
                slot = self.book.onboarded(copy, is_whole=error is None, is_corrupt=is_corrupt)
                if slot is not None:
                    came.append(slot)
            self._keep(ticket, came)
        return not any(outcomes)

    def _read_disk(self, part: list[Copy], ticket: Ticket) -> list[Exception | None]:
        assert self._disk is not None, "a disk tier without a disk"
        places = [(copy.lower or 0, copy.identity.sequence_hash, self.host.padded(copy.host)) for copy in part]
        outcomes: list[Exception | None] = []
        try:
            outcomes += self._disk.read(places)
        except OSError as error:
            outcomes = [error] * len(part)
        for copy, outcome in zip(part, outcomes, strict=True):
            if outcome is not None:
                self.traffic.disk_read_failures += 1
                self._erase(copy)
        return outcomes

    def _read_peer(self, part: list[Copy], ticket: Ticket) -> list[Exception | None]:
        assert self._peers is not None, "a peer without means to reach it"
        assert ticket.peer is not None, "a peer without an address"
        hashes, slots = [copy.identity.sequence_hash for copy in part], [copy.host for copy in part]
        missing: Exception = KeyError("the peer does not have it")
        try:
            timeout_s = max(0.001, ticket.deadline - self._clock())
            count = self._peers.read(ticket.peer.address, hashes, slots, timeout_s)
        except TransferError as error:
            logger.info("blocks of %s could not be copied (%s): %s", ticket.peer.address, error.kind, error)
            self.traffic.peer_failures += 1
            count, missing = 0, error
        return [None if at < count else missing for at in range(len(part))]

    def _erase(self, copy: Copy) -> None:
        if self._disk is not None and copy.lower is not None:
            try:
                self._disk.erase(copy.lower)
            except OSError as error:
                logger.warning("a corrupt block could not be erased: %s", error)

    def _read_objects(self, part: list[Copy], ticket: Ticket) -> list[Exception | None]:
        assert self._objects is not None, "an object tier without a store"
        outcomes: list[Exception | None] = []
        for copy in part:
            outcome: Exception | None = None
            if outcomes and outcomes[-1] is not None:
                outcome = outcomes[-1]  # What follows a block that is missing is of no use.
            else:
                left = max(0.001, ticket.deadline - self._clock())
                try:
                    count = self._objects.read(copy.identity.sequence_hash, self.host.raw(copy.host), left)
                    self.traffic.object_bytes_in += count
                    outcome = None if count else KeyError("there is no such object")
                except (ObjectFailure, Corrupt) as error:
                    self.traffic.object_read_failures += 1
                    outcome = error
            outcomes.append(outcome)
        return outcomes

    def _lend(self, hashes: Sequence[int]) -> list[int]:
        """Holds what a peer may copy."""
        with self._lock:
            return self.book.host.match(hashes)

    # All of these hold the lock.

    def _fall_quiet(self) -> None:
        if not self._is_quiet.wait_for(lambda: not self._working, QUIET_S):
            raise ConfigError(f"the KV tiers still copy blocks of another model after {QUIET_S:g} s")

    def _keep(self, ticket: Ticket, slots: list[int]) -> None:
        if ticket.is_ended:
            self.book.host.release(slots)
        else:
            ticket.held += slots

    def _finish(self, ticket: Ticket) -> None:
        for copy in ticket.copies:
            self.book.cancelled(copy)
        ticket.copies.clear()
        ticket.is_done = True
        self._is_over.notify_all()

    def _pause(self, tier: Tier, error: Exception) -> None:
        if tier not in self.book.paused:
            logger.warning("%s tier: nothing is written for %.0f s: %s", tier.value, PAUSE_S, error)
        self.book.paused.add(tier)
        self._resume_at[tier] = self._clock() + PAUSE_S

    def _resume(self, now: float) -> None:
        for tier in [tier for tier, at in self._resume_at.items() if now >= at]:
            del self._resume_at[tier]
            self.book.paused.discard(tier)


def _place(block: tuple[int, Identity, npt.NDArray[np.uint8]]) -> int:
    return block[0]
