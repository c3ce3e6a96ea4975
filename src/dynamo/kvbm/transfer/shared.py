"""Shared memory: pages that other processes of this machine can map, and the puller that copies from them.

The memory has no name. A puller requests it over a local socket, by a transfer id, and receives a read-only file
descriptor; when the last process that has it ends, for whatever reason, the kernel frees the memory, so that nothing is
left over.

The descriptor opens all of the memory, beyond the lease's blocks. Both sides therefore refuse a peer of another user:
a process of the same user could read this process's memory anyway.

After the pages lies a table with a row for each lease: its id for as long as the blocks are held. A puller copies, and
then checks that the id is still there: the source clears it before the blocks are reused, so an id that is present means
that the copy is valid, even if the source is unresponsive or has died.
"""

import array
import contextlib
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Sequence

import numpy as np

from dynamo.core.boundaries import Rollback
from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.accepting import is_own_user
from dynamo.kvbm.transfer.base import (
    Bytes,
    Deadline,
    Descriptor,
    Layout,
    NotHeld,
    Pair,
    Region,
    SourceUnreachable,
    TransferError,
    TransferOffer,
    TransferTimeout,
    Transport,
)

SLOTS = 4096
"""Maximum number of leases held at once."""
ID_BYTES = 16
_PAGE = mmap.PAGESIZE
COPIED_AT_ONCE = 64 << 20  # Bytes between two checks of the deadline.


def is_available() -> bool:
    """Return whether this machine supports anonymous shared memory."""
    return hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")


class SharedMemoryPages:
    """Memory of a cache, and the table of its leases. Pages are allocated when touched."""

    def __init__(self, size: int) -> None:
        self.pages_bytes = size
        self.bytes_total = _table_at(size) + SLOTS * ID_BYTES
        self._file = os.memfd_create("dynamo-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.bytes_total)
        memory = np.frombuffer(mmap.mmap(self._file, self.bytes_total), np.uint8)
        self.array: Bytes = memory[:size]
        self._table = memory[_table_at(size) :].reshape(SLOTS, ID_BYTES)

    def mark(self, slot: int, transfer_id: str) -> None:
        """Record that the blocks of a lease are held."""
        self._table[slot] = np.frombuffer(bytes.fromhex(transfer_id), np.uint8)

    def strike(self, slot: int) -> None:
        """Record that the blocks of a lease are no longer held."""
        self._table[slot] = 0

    def readable(self) -> int:
        """Return a new read-only file descriptor of the memory."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file; the memory lives as long as it is mapped."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def listener() -> tuple[socket.socket, str]:
    """Return a local socket with an unguessable name, which vanishes with the process."""
    name = f"dynamo-kv-{secrets.token_hex(16)}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(f"\0{name}")
    made.listen(64)
    return made, name


def send_memory(link: socket.socket, shared: SharedMemoryPages) -> None:
    """Answer a `Map`."""
    wire.write(link, wire.Mapped(shared.bytes_total, shared.pages_bytes))
    file = shared.readable()
    try:
        link.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
    finally:
        os.close(file)


class _Mapping:
    """Memory of one source, mapped into this process, and the connection to the source."""

    def __init__(self, link: socket.socket, memory: Bytes, pages_bytes: int, layout: Layout) -> None:
        self.link = link
        self.region = Region(layout, memory[:pages_bytes])
        self.table = memory[_table_at(pages_bytes) :].reshape(SLOTS, ID_BYTES)
        self.sends = threading.Lock()


class SharedMemoryPuller:
    """`PullMember` for sources on this machine. A source's memory is mapped once, and unmapped when the source ends."""

    transport = Transport.SHARED_MEMORY

    def __init__(self, region: Region) -> None:
        self._region = region
        self._mappings: dict[str, _Mapping] = {}
        self._guard = threading.Lock()
        self._is_closed = False

    @property
    def mapped(self) -> int:
        """Number of sources whose memory is mapped."""
        return len(self._mappings)

    def pull(self, descriptor: Descriptor, offer: TransferOffer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        mapping = self._mapping(descriptor, offer, deadline)
        if offer.slot is None or not 0 <= offer.slot < SLOTS:
            raise TransferError("the descriptor has no slot in the source's table")
        of_source = [(descriptor.blocks[place], block) for place, block in pairs]
        if any(not 0 <= theirs < mapping.region.blocks for theirs, _ in of_source):
            raise TransferError("the descriptor has blocks outside the source's memory")
        at_once = max(1, COPIED_AT_ONCE // self._region.layout.block_bytes)
        for first in range(0, len(of_source), at_once):
            deadline.left()
            self._region.copy(mapping.region, of_source[first : first + at_once])
        if mapping.table[offer.slot].tobytes().hex() != descriptor.transfer_id:
            raise NotHeld("the source released the blocks while they were read")

    def release(self, descriptor: Descriptor, offer: TransferOffer) -> None:
        mapping = self._mappings.get(offer.address)
        if mapping is None:
            with _connect(offer, 1.0) as link, contextlib.suppress(OSError):
                wire.write(link, wire.Release(descriptor.transfer_id, is_answered=False))
            return
        with mapping.sends, contextlib.suppress(OSError):  # A source that has ended holds nothing.
            wire.write(mapping.link, wire.Release(descriptor.transfer_id, is_answered=False))

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            mappings, self._mappings = list(self._mappings.values()), {}
        for mapping in mappings:
            with contextlib.suppress(OSError):
                mapping.link.shutdown(socket.SHUT_RDWR)

    def _mapping(self, descriptor: Descriptor, offer: TransferOffer, deadline: Deadline) -> _Mapping:
        known = self._mappings.get(offer.address)
        if known is not None:
            return known
        mapping = self._map(descriptor, offer, deadline)
        with self._guard:
            known = self._mappings.get(offer.address)
            if known is None and not self._is_closed:
                self._mappings[offer.address] = mapping
                threading.Thread(
                    target=self._watch, args=(offer.address, mapping.link), name="dynamo-kv-watch", daemon=True
                ).start()
                return mapping
        mapping.link.close()
        if known is None:
            raise TransferError("the puller is closed")
        return known

    def _map(self, descriptor: Descriptor, offer: TransferOffer, deadline: Deadline) -> _Mapping:
        link = _connect(offer, deadline.left())
        with Rollback(link.close):
            try:
                return _mapped(link, descriptor, deadline)
            except TimeoutError:
                raise TransferTimeout("the source did not respond in time") from None
            except (OSError, ValueError) as error:
                raise SourceUnreachable(f"cannot map the source's memory: {error}") from None

    def _watch(self, address: str, link: socket.socket) -> None:
        """Unmap the memory when the source ends, because mapped memory is not freed."""
        with contextlib.suppress(OSError):
            while link.recv(1):
                pass
        with self._guard:
            self._mappings.pop(address, None)
        link.close()


def _mapped(link: socket.socket, descriptor: Descriptor, deadline: Deadline) -> _Mapping:
    answer = wire.request(link, wire.Map(descriptor.transfer_id), deadline)
    if not isinstance(answer, wire.Mapped):
        raise TransferError("unexpected message from the source")
    _, files, _, _ = socket.recv_fds(link, 1, 1)
    try:
        if len(files) != 1:
            raise TransferError("the source sent no file descriptor")
        expected = _table_at(answer.pages) + SLOTS * ID_BYTES
        whole = answer.pages > 0 and answer.pages % descriptor.layout.block_bytes == 0
        if not whole or not expected == answer.size == os.fstat(files[0]).st_size:
            raise TransferError("the source's memory is smaller than announced")
        memory = np.frombuffer(mmap.mmap(files[0], answer.size, prot=mmap.PROT_READ), np.uint8)
    finally:
        for file in files:
            os.close(file)
    link.settimeout(None)  # Idle until the source ends.
    return _Mapping(link, memory, answer.pages, descriptor.layout)


def _table_at(pages_bytes: int) -> int:
    """Return the offset of the table: the next page boundary."""
    return -(-pages_bytes // _PAGE) * _PAGE


def _connect(offer: TransferOffer, timeout_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(f"\0{offer.address}")
    except TimeoutError:
        link.close()
        raise TransferTimeout("the source did not accept the connection in time") from None
    except OSError as error:
        link.close()
        raise SourceUnreachable(f"the source is on another machine or has ended: {error.strerror}") from None
    if not is_own_user(link):
        link.close()
        raise SourceUnreachable("the source runs as another user, to whom shared memory is refused")
    return link
