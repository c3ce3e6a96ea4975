"""Source: the side that computed blocks: it publishes them, holds them for their puller, and sends them.

Each connection has a thread; there are few of them, they mostly wait for the kernel, and a stalled puller delays no other.
`publish` and `release` are thread-safe and do not block.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.core.boundaries import logged
from dynamo.kvbm.transfer import shared, wire
from dynamo.kvbm.transfer.accepting import accept_connections, is_own_user
from dynamo.kvbm.transfer.base import Descriptor, Freed, Region, TransferError, TransferOffer, Transport
from dynamo.kvbm.transfer.leases import Leases, TransferLease
from dynamo.kvbm.transfer.nixl import NixlAgent
from dynamo.kvbm.transfer.shared import SLOTS, SharedMemoryPages
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.runtime.request_plane.tcp.common import local_address
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 64  # Connections served concurrently; each puller may keep a few.
QUESTION_S = 5.0  # Maximum wait for the first request of a connection.
IDLE_S = 120.0  # Maximum age of an unused kept connection.
STALL_S = 10.0  # Maximum time in which a puller reads nothing; then its blocks are released for others.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Address of a source, and limits of its leases."""

    host: str = ""
    """Host to advertise and bind; empty: this machine's network address; a wildcard is bound, and that address advertised."""
    port: int = 0
    ttl_s: float = 30.0
    blocks_max: int = 1 << 30
    tls: TcpTls = PLAIN


class TransferSource:
    """Publisher of blocks of one region. It offers TCP, and shared memory or NIXL if it was given them."""

    def __init__(
        self,
        region: Region,
        freed: Freed,
        options: SourceOptions,
        *,
        pages: SharedMemoryPages | None = None,
        agent: NixlAgent | None = None,
        is_tcp_offered: bool = True,
    ) -> None:
        """`pages`: the region's memory, if it can be shared; `agent`: the NIXL agent that registered it, if any."""
        self.engine_id = secrets.token_hex(16)
        self._region = region
        self._freed = freed
        self._options = options
        self._pages = pages
        self._agent = agent
        self._is_tcp_offered = is_tcp_offered
        self._leases = Leases(blocks_max=options.blocks_max, slots=SLOTS)
        self._changed = threading.Condition()
        self._links: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        self._offers: list[tuple[Transport, str]] = []
        self._is_closed = threading.Event()
        self.pulled = 0
        """Leases released by their puller."""

    @property
    def held(self) -> int:
        """Blocks held."""
        return self._leases.held

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def expired(self) -> int:
        """Leases that ended before they were pulled."""
        return self._leases.expired

    def start(self) -> None:
        """Start to listen. Raise `OSError` if the address cannot be bound."""
        host = self._options.host or local_address()
        listener = socket.create_server((host, self._options.port), backlog=CONNECTIONS_MAX)
        advertised = local_address() if host in WILDCARDS else host
        address = f"{advertised}:{listener.getsockname()[1]}"
        self._accept_from(listener, "tcp")
        if self._agent is not None:
            self._offers.append((Transport.NIXL, address))
        if self._pages is not None:
            local, name = shared.listener()
            self._accept_from(local, "shm")
            self._offers.append((Transport.SHARED_MEMORY, name))
        if self._is_tcp_offered:
            self._offers.append((Transport.TCP, address))
        threading.Thread(target=self._expire, name="dynamo-kv-expiry", daemon=True).start()

    def publish(self, blocks: Sequence[int]) -> Descriptor | None:
        """Hold the blocks until they are pulled or their lease expires; return None if too many are held already."""
        transfer_id = secrets.token_hex(16)
        with self._changed:
            lease, freed = self._leases.grant(transfer_id, blocks, time.monotonic() + self._options.ttl_s)
            self._strike(freed)
            if lease is not None and self._pages is not None:
                self._pages.mark(lease.slot, transfer_id)
            self._changed.notify()
        self._notify_freed(freed)
        if lease is None:
            return None
        return Descriptor(
            engine_id=self.engine_id,
            transfer_id=transfer_id,
            layout=self._region.layout,
            blocks=list(blocks),
            expires_at=time.time() + self._options.ttl_s,
            offers=[
                TransferOffer(
                    transport=transport.value,
                    address=address,
                    slot=lease.slot if transport is Transport.SHARED_MEMORY else None,
                )
                for transport, address in self._offers
            ],
        )

    def release(self, transfer_id: str) -> bool:
        """Release a transfer's blocks; return whether they were held until now."""
        with self._changed:
            was_held, freed = self._leases.release(transfer_id)
            self.pulled += was_held
            self._strike(freed)
        self._notify_freed(freed)
        return was_held

    def drop_oldest(self) -> bool:
        """Release the blocks held longest, to free them; return False if there are none."""
        with self._changed:
            freed = self._leases.drop_oldest()
            self._strike(freed)
        self._notify_freed(freed)
        return bool(freed)

    def close(self) -> None:
        """Stop serving, and release all blocks that are not being read."""
        with self._changed:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
            freed = self._leases.clear()
            self._strike(freed)
            links = list(self._links)
            self._changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for the next connection.
            listener.close()
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._notify_freed(freed)
        if self._agent is not None:
            self._agent.close()
        if self._pages is not None:
            self._pages.close()

    # Connections -----------------------------------------------------------------------------------------------------

    def _accept_from(self, listener: socket.socket, kind: str) -> None:
        self._listeners.append(listener)
        arguments = (listener, self._is_closed, self._take, "for blocks")
        threading.Thread(
            target=accept_connections, args=arguments, name=f"dynamo-kv-accept-{kind}", daemon=True
        ).start()

    def _take(self, link: socket.socket) -> None:
        with self._changed:
            # A local connection gives access to all of the memory, not only to a lease's blocks.
            is_trusted = link.family != socket.AF_UNIX or is_own_user(link)
            is_taken = is_trusted and len(self._links) < CONNECTIONS_MAX
            if is_taken:
                self._links.add(link)
        if is_taken:
            threading.Thread(target=self._serve, args=(link,), name="dynamo-kv-serve", daemon=True).start()
        else:
            link.close()

    def _serve(self, raw: socket.socket) -> None:
        link = raw
        with logged(logger, "a connection of a puller failed"):
            try:
                raw.settimeout(QUESTION_S)
                if raw.family != socket.AF_UNIX:
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._options.tls.server is not None:
                        self._options.tls.refresh()
                        link = self._options.tls.server.wrap_socket(raw, server_side=True)
                while (question := wire.read_question(link)) is not None and not self._is_closed.is_set():
                    link.settimeout(STALL_S)
                    if not self._answer(link, question):
                        return
                    # A local puller keeps its connection for as long as it maps our memory.
                    link.settimeout(None if raw.family == socket.AF_UNIX else IDLE_S)
            except (OSError, TransferError) as error:
                logger.debug("a connection of a puller ended: %s", error)
            finally:
                with self._changed:
                    self._links.discard(raw)
                link.close()

    def _answer(self, link: socket.socket, question: wire.Question) -> bool:
        """Answer a request; return whether the connection is kept."""
        if isinstance(question, wire.Release):
            was_held = self.release(question.transfer_id)
            if question.is_answered:
                wire.write(link, wire.Released(was_held))
            return True
        with self._changed:
            lease = self._leases.pin(question.transfer_id)
        if lease is None:
            wire.write(link, wire.TransferRefused("the source does not hold these blocks", is_not_held=True))
            return False
        try:
            return self._give(link, question, lease)
        finally:
            with self._changed:
                freed = self._leases.unpin(lease)
                self._strike(freed)
            self._notify_freed(freed)

    def _give(self, link: socket.socket, question: wire.Pull | wire.Map | wire.Agent, lease: TransferLease) -> bool:
        if isinstance(question, wire.Pull):
            if question.batch < 1 or any(not 0 <= place < len(lease.blocks) for place in question.places):
                wire.write(link, wire.TransferRefused("requested blocks are outside the transfer"))
                return False
            blocks = [lease.blocks[place] for place in question.places]
            wire.write(link, wire.Granted(len(blocks) * self._region.layout.block_bytes))
            wire.send_blocks(link, self._region, blocks, question.batch, is_checked=question.is_checked)
        elif isinstance(question, wire.Map) and self._pages is not None and link.family == socket.AF_UNIX:
            shared.send_memory(link, self._pages)
        elif isinstance(question, wire.Agent) and self._agent is not None:
            wire.write(link, self._agent.description())
        else:
            wire.write(link, wire.TransferRefused("this source does not offer this transport"))
            return False
        return True

    # Time ------------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self._is_closed.is_set():
                    return
                freed = self._leases.expire(time.monotonic())
                self._strike(freed)
                if not freed:
                    due = self._leases.next_expiry
                    self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            self._notify_freed(freed)

    def _strike(self, leases: Sequence[TransferLease]) -> None:
        """Clear the leases' rows in the shared table, before their blocks are reused."""
        if self._pages is not None:
            for lease in leases:
                self._pages.strike(lease.slot)

    def _notify_freed(self, leases: Sequence[TransferLease]) -> None:
        for lease in leases:
            self._freed(lease.blocks)
