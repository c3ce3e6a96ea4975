"""Peers: workers of one model copy blocks from each other's host tiers instead of computing them.

    worker with the blocks                         worker that needs them
    PeerServer ◀── Want(fingerprint, hashes) ────  PeerBlocks
               ──── descriptor or None ──────────▶
    Source     ◀── pull (NIXL, shared memory, TCP) ── Puller ──▶ slots in the own host tier

The request has its own port; the transfer itself is implemented by `kvbm.transfer`. Blocks are held until they are pulled
or their lease expires. Received bytes are used only after the pull has completed.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dynamo.core.boundaries import logged
from dynamo.core.errors import ConfigError
from dynamo.kvbm.physical.host import HostArena
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.accepting import accept_connections
from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Layout,
    PullMember,
    Region,
    SourceUnreachable,
    TransferError,
    TransferTimeout,
)
from dynamo.kvbm.transfer.puller import Puller
from dynamo.kvbm.transfer.shared import SharedMemoryPages, SharedMemoryPuller, is_available
from dynamo.kvbm.transfer.source import SourceOptions, TransferSource
from dynamo.kvbm.transfer.tcp import PLAIN, TcpPuller
from dynamo.runtime.request_plane.tcp.common import local_address
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)

SERVERS = 4  # Requests answered concurrently; an answer takes well under a millisecond.
HOLD_S = 10.0  # Longer than the longest wait for a prompt's blocks.
QUESTION_S = 2.0
LOOPBACK = "127.0.0.1"
PENDING_MAX = 64  # Connections answered or queued; further ones are closed, and their prompts are computed.


class Want(msgspec.Struct, frozen=True):
    """Request for a prefix."""

    fingerprint: int
    hashes: list[int]


class Lent(msgspec.Struct, frozen=True):
    """Descriptor of its first blocks; None if they are not available."""

    descriptor: Descriptor | None = None


_wants, _lents, _encoder = msgspec.msgpack.Decoder(Want), msgspec.msgpack.Decoder(Lent), msgspec.msgpack.Encoder()


class PackedLayout(Layout, frozen=True, kw_only=True):
    """Layout of a host tier's block for `kvbm.transfer`: one piece, padded to its page boundary."""

    @property
    def planes(self) -> int:
        return 1

    @property
    def piece_bytes(self) -> int:
        return self.item_bytes


def region_of(arena: HostArena) -> Region:
    """Return the host tier as a region."""
    layout: BlockLayout = arena.layout
    words = PackedLayout(
        model=f"{layout.fingerprint:016x}",
        dtype=layout.dtype,
        item_bytes=layout.stride_bytes,
        block_tokens=1,
        layers=1,
        kv_heads=1,
        head_dim=1,
    )
    return Region(words, arena.memory)


class PeerServer:
    """Server for blocks of the host tier. `find` holds the longest prefix of hashes, `release` releases slots."""

    def __init__(
        self,
        arena: HostArena,
        pages: SharedMemoryPages | None,
        find: Callable[[Sequence[int]], list[int]],
        release: Callable[[Sequence[int]], None],
        *,
        host: str = "",
        blocks_max: int = 1 << 30,
        tls: TcpTls = PLAIN,
    ) -> None:
        """Raise `ConfigError` for an address that cannot be bound.

        Without `host`, listen on this machine only, or, where clients must present a certificate, on its network address.
        """
        if not host:
            host = local_address() if tls.verifies_clients else LOOPBACK
            logger.info("serving KV blocks to peers at %s; set DYN_KVBM_PEER_HOST to use another address", host)
        self._fingerprint = arena.layout.fingerprint
        self._find = find
        self._release = release
        self._tls = tls
        options = SourceOptions(host=host, ttl_s=HOLD_S, blocks_max=blocks_max, tls=tls)
        self._region = region_of(arena)
        self._source = TransferSource(self._region, release, options, pages=pages)
        try:
            self._source.start()
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise ConfigError(f"cannot serve KV blocks to peers at {host!r}: {error.strerror}") from None
        bound = self._listener.getsockname()
        self.address = f"{bound[0]}:{bound[1]}"
        self._is_closed = threading.Event()
        self._pending = threading.Semaphore(PENDING_MAX)
        self._pool = ThreadPoolExecutor(SERVERS, thread_name_prefix="kvbm-peer")
        self._thread = threading.Thread(
            target=accept_connections,
            args=(self._listener, self._is_closed, self._take, "of peers"),
            name="kvbm-peers",
            daemon=True,
        )
        self._thread.start()

    def reidentify(self, arena: HostArena) -> None:
        """Switch to another model; the tier contains no blocks of the former one."""
        self._fingerprint = arena.layout.fingerprint
        self._region.layout = region_of(arena).layout

    @property
    def lent(self) -> int:
        """Blocks held for peers."""
        return self._source.held

    def close(self) -> None:
        """Stop serving and release the blocks held for peers."""
        self._is_closed.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the listener had no connection")
        self._listener.close()
        self._thread.join(QUESTION_S)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def _take(self, link: socket.socket) -> None:
        if not self._pending.acquire(blocking=False):
            logger.info("closed the connection of a peer: %d connections are queued", PENDING_MAX)
            link.close()
            return
        try:
            self._pool.submit(self._answer, link)
        except RuntimeError:  # The server is being closed.
            link.close()

    def _answer(self, raw: socket.socket) -> None:
        raw.settimeout(QUESTION_S)
        link = raw
        with logged(logger, "closed the connection of a peer: its request failed"):
            try:
                if self._tls.server is not None:
                    self._tls.refresh()
                    link = self._tls.server.wrap_socket(raw, server_side=True)
                want = _wants.decode(_read(link))
                wire.write_frame(link, _encoder.encode(Lent(self._lend(want))))
            except (OSError, TransferError, msgspec.DecodeError) as error:
                logger.info("closed the connection of a peer: %s", error)
            finally:
                link.close()
                self._pending.release()

    def _lend(self, want: Want) -> Descriptor | None:
        if want.fingerprint != self._fingerprint:
            return None
        slots = self._find(want.hashes)
        if want.fingerprint != self._fingerprint:  # The weights were exchanged meanwhile, and these may be new.
            self._release(slots)
            return None
        descriptor = self._source.publish(slots) if slots else None
        if descriptor is None:
            self._release(slots)
        return descriptor


class PeerBlocks:
    """Client that copies blocks of peers into the own host tier."""

    def __init__(self, arena: HostArena, *, tls: TcpTls = PLAIN, members: Iterable[PullMember] | None = None) -> None:
        self._fingerprint = arena.layout.fingerprint
        self._tls = tls
        self._region = region = region_of(arena)
        if members is None:
            local: list[PullMember] = [SharedMemoryPuller(region)] if is_available() else []
            members = [*local, TcpPuller(region, tls, is_checked=True)]
        self._puller = Puller(region, members)

    def reidentify(self, arena: HostArena) -> None:
        """Switch to another model. Must not be called while a read runs."""
        self._fingerprint = arena.layout.fingerprint
        self._region.layout = region_of(arena).layout

    def read(self, address: str, hashes: Sequence[int], slots: Sequence[int], timeout_s: float) -> int:
        """Fill slots with the longest prefix that the peer has; return its number of blocks. Raise `TransferError`."""
        deadline = Deadline.after(timeout_s)
        descriptor = self._request_descriptor(address, hashes, deadline)
        if descriptor is None:
            return 0
        count = min(len(descriptor.blocks), len(slots))
        try:
            self._puller.pull(descriptor, list(enumerate(slots[:count])), deadline)
        finally:
            with contextlib.suppress(TransferError):  # The lease expires by itself.
                self._puller.release(descriptor)
        return count

    def close(self) -> None:
        self._puller.close()

    def _request_descriptor(self, address: str, hashes: Sequence[int], deadline: Deadline) -> Descriptor | None:
        host, _, port = address.rpartition(":")
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), min(QUESTION_S, deadline.left()))
            link = raw
            try:
                if self._tls.client is not None:
                    self._tls.refresh()
                    link = self._tls.client.wrap_socket(raw, server_hostname=self._tls.server_name or host)
                link.settimeout(deadline.left())
                wire.write_frame(link, _encoder.encode(Want(self._fingerprint, list(hashes))))
                lent = _lents.decode(_read(link))
            finally:
                link.close()
        except TimeoutError:
            raise TransferTimeout("the peer did not respond in time") from None
        except msgspec.DecodeError as error:
            raise TransferError(f"unexpected answer from peer {address}: {error}") from None
        except (OSError, ValueError) as error:
            raise SourceUnreachable(f"cannot reach peer {address}: {error}") from None
        if lent.descriptor is None:
            return None
        layout = self._region.layout
        layout.check(lent.descriptor.layout)
        return msgspec.structs.replace(Descriptor.check(lent.descriptor), layout=layout)


def _read(link: socket.socket) -> bytes:
    """Return one frame. Raise `TransferError` for a malformed one, `OSError`."""
    body = wire.read_frame(link)
    if body is None:
        raise SourceUnreachable("the connection ended without a frame")
    return body
