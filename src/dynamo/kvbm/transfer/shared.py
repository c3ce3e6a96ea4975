"""Shared memory: pages that other processes of this machine may read where they lie, and how they read them.

The memory has no name. A puller asks for it over a socket of the machine, by a transfer id, and is given a file
descriptor that can only read; when the last process that has it ends, however it ends, the kernel takes the memory
back, so that nothing is ever left over.

The descriptor opens all of the memory, beyond the lease's blocks. Both sides therefore refuse a peer of another user:
a process of the same user could read this process's memory anyway.

Behind the pages lies a table with a row for each lease: its id for as long as the blocks are held. A puller copies, and
then looks whether the id still stands there: the source strikes it out before the blocks are used for anything else, so
an id that stands means that what was copied is right, even where the source stands still or has died.
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

from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.accepting import is_own_user
from dynamo.kvbm.transfer.base import (
    Bytes,
    Deadline,
    Descriptor,
    Layout,
    NotHeld,
    Offer,
    Pair,
    Region,
    SourceUnreachable,
    TransferError,
    TransferTimeout,
    Transport,
)

SLOTS = 4096
"""Leases that can be held at once."""
ID_BYTES = 16
_PAGE = mmap.PAGESIZE
COPIED_AT_ONCE = 64 << 20  # Bytes between two looks at the deadline.


def is_available() -> bool:
    """Whether this machine can share memory without a name."""
    return hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")


class SharedPages:
    """Memory for a cache, and the table of what is held in it. It is taken as it is used."""

    def __init__(self, size: int) -> None:
        self.pages_bytes = size
        self.bytes_total = _table_at(size) + SLOTS * ID_BYTES
        self._file = os.memfd_create("dynamo-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.bytes_total)
        memory = np.frombuffer(mmap.mmap(self._file, self.bytes_total), np.uint8)
        self.array: Bytes = memory[:size]
        self._table = memory[_table_at(size) :].reshape(SLOTS, ID_BYTES)

    def mark(self, slot: int, transfer_id: str) -> None:
        """The blocks of that lease are held."""
        self._table[slot] = np.frombuffer(bytes.fromhex(transfer_id), np.uint8)

    def strike(self, slot: int) -> None:
        """They are not, from now on."""
        self._table[slot] = 0

    def readable(self) -> int:
        """A new file descriptor that can read the memory, and not write it."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Gives up the file; the memory lives as long as somebody uses it."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def listener() -> tuple[socket.socket, str]:
    """A socket of this machine under an unguessable name, which ends with the process."""
    name = f"dynamo-kv-{secrets.token_hex(16)}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(f"\0{name}")
    made.listen(64)
    return made, name


def send_memory(link: socket.socket, shared: SharedPages) -> None:
    """Answers a `Map`."""
    wire.write(link, wire.Mapped(shared.bytes_total, shared.pages_bytes))
    file = shared.readable()
    try:
        link.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
    finally:
        os.close(file)


class _Mapping:
    """The memory of one source, as this process reads it, and the line to the source."""

    def __init__(self, link: socket.socket, memory: Bytes, pages_bytes: int, layout: Layout) -> None:
        self.link = link
        self.region = Region(layout, memory[:pages_bytes])
        self.table = memory[_table_at(pages_bytes) :].reshape(SLOTS, ID_BYTES)
        self.sends = threading.Lock()


class SharedMemoryPuller:
    """`PullMember` within one machine. A source's memory is mapped once, and let go when the source ends."""

    transport = Transport.SHARED_MEMORY

    def __init__(self, region: Region) -> None:
        self._region = region
        self._mappings: dict[str, _Mapping] = {}
        self._guard = threading.Lock()
        self._is_closed = False

    @property
    def mapped(self) -> int:
        """Sources whose memory is mapped."""
        return len(self._mappings)

    def pull(self, descriptor: Descriptor, offer: Offer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        mapping = self._mapping(descriptor, offer, deadline)
        if offer.slot is None or not 0 <= offer.slot < SLOTS:
            raise TransferError("the descriptor names no slot of the source's table")
        of_source = [(descriptor.blocks[place], block) for place, block in pairs]
        if any(not 0 <= theirs < mapping.region.blocks for theirs, _ in of_source):
            raise TransferError("the descriptor names blocks that the source does not have")
        at_once = max(1, COPIED_AT_ONCE // self._region.layout.block_bytes)
        for first in range(0, len(of_source), at_once):
            deadline.left()
            self._region.copy(mapping.region, of_source[first : first + at_once])
        if mapping.table[offer.slot].tobytes().hex() != descriptor.transfer_id:
            raise NotHeld("the source gave the blocks up while they were read")

    def release(self, descriptor: Descriptor, offer: Offer) -> None:
        mapping = self._mappings.get(offer.address)
        if mapping is None:
            with _connect(offer, 1.0) as link, contextlib.suppress(OSError):
                wire.write(link, wire.Release(descriptor.transfer_id, is_answered=False))
            return
        with mapping.sends, contextlib.suppress(OSError):  # A source that is gone holds nothing.
            wire.write(mapping.link, wire.Release(descriptor.transfer_id, is_answered=False))

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            mappings, self._mappings = list(self._mappings.values()), {}
        for mapping in mappings:
            with contextlib.suppress(OSError):
                mapping.link.shutdown(socket.SHUT_RDWR)

    def _mapping(self, descriptor: Descriptor, offer: Offer, deadline: Deadline) -> _Mapping:
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

    def _map(self, descriptor: Descriptor, offer: Offer, deadline: Deadline) -> _Mapping:
        link = _connect(offer, deadline.left())
        try:
            return _mapped(link, descriptor, deadline)
        except TimeoutError:
            link.close()
            raise TransferTimeout("the source does not answer") from None
        except (OSError, ValueError) as error:
            link.close()
            raise SourceUnreachable(f"the source's memory cannot be mapped: {error}") from None
        except BaseException:
            link.close()
            raise

    def _watch(self, address: str, link: socket.socket) -> None:
        """Lets the memory go when the source ends: as long as it is mapped, it takes room."""
        with contextlib.suppress(OSError):
            while link.recv(1):
                pass
        with self._guard:
            self._mappings.pop(address, None)
        link.close()


def _mapped(link: socket.socket, descriptor: Descriptor, deadline: Deadline) -> _Mapping:
    answer = wire.ask(link, wire.Map(descriptor.transfer_id), deadline)
    if not isinstance(answer, wire.Mapped):
        raise TransferError("the source answered something else")
    _, files, _, _ = socket.recv_fds(link, 1, 1)
    try:
        if len(files) != 1:
            raise TransferError("the source gave no memory")
        expected = _table_at(answer.pages) + SLOTS * ID_BYTES
        whole = answer.pages > 0 and answer.pages % descriptor.layout.block_bytes == 0
        if not whole or not expected == answer.size == os.fstat(files[0]).st_size:
            raise TransferError("the source's memory is not as large as it says")
        memory = np.frombuffer(mmap.mmap(files[0], answer.size, prot=mmap.PROT_READ), np.uint8)
    finally:
        for file in files:
            os.close(file)
    link.settimeout(None)  # The line stays silent until the source ends.
    return _Mapping(link, memory, answer.pages, descriptor.layout)


def _table_at(pages_bytes: int) -> int:
    """Where the table begins: at the next page of the machine's."""
    return -(-pages_bytes // _PAGE) * _PAGE


def _connect(offer: Offer, timeout_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(f"\0{offer.address}")
    except TimeoutError:
        link.close()
        raise TransferTimeout("the source does not take connections") from None
    except OSError as error:
        link.close()
        raise SourceUnreachable(f"the source is not on this machine, or has ended: {error.strerror}") from None
    if not is_own_user(link):
        link.close()
        raise SourceUnreachable("the source belongs to another user of this machine, with whom no memory is shared")
    return link
