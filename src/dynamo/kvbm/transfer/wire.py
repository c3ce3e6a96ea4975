"""Wire: the messages between a puller and a source on a stream socket, and the blocks that follow them.

A frame is its length in four bytes, big-endian, and a tagged message in msgpack. Blocks follow a `Granted` as bare
bytes: batch by batch, within a batch plane by plane, within a plane in the requested order. Neither side copies them: both
pass the addresses of the blocks to the kernel.
"""

import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

import msgspec
from xxhash import xxh3_64

from dynamo.kvbm.transfer.base import (
    CorruptTransfer,
    Deadline,
    NotHeld,
    Region,
    SourceUnreachable,
    TransferError,
    TransferTimeout,
)

FRAME_BYTES_MAX = 1 << 20  # The indices of a quarter of a million blocks; longer frames are rejected.
FRAME_S = 5.0  # From a frame's first byte to its last; a megabyte takes milliseconds.
PART_BYTES = 64 << 10
BATCH_BYTES = 32 << 20  # Between two batches a puller may check its deadline; each is large enough to amortize that.
BUFFERS_MAX = 512  # Buffers per system call, whose limit is 1024.
_LENGTH = struct.Struct(">I")
_DIGEST = struct.Struct(">Q")


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """Request for blocks; answered by `Granted`, the blocks and, if requested, a digest of them."""

    transfer_id: str
    places: list[int]
    batch: int
    """Number of blocks per batch."""
    is_checked: bool = False


class Map(msgspec.Struct, tag="map", frozen=True):
    """Request for the shared memory; answered by `Mapped`, with a file descriptor."""

    transfer_id: str


class Agent(msgspec.Struct, tag="agent", frozen=True):
    """Request for the address of the NIXL agent; answered by `AgentIs`."""

    transfer_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """Notice that the blocks are no longer needed; answered by `Released` if requested."""

    transfer_id: str
    is_answered: bool = True


class Granted(msgspec.Struct, tag="granted", frozen=True):
    """Acceptance of a `Pull`; the blocks follow."""

    size: int


class Mapped(msgspec.Struct, tag="mapped", frozen=True):
    """Size of the shared memory, and of its pages, which the table of leases follows."""

    size: int
    pages: int


class AgentIs(msgspec.Struct, tag="agent_is", frozen=True):
    """Metadata of a NIXL agent, and the address of its pages."""

    name: str
    metadata: bytes
    address: int
    size: int


class Released(msgspec.Struct, tag="released", frozen=True):
    """Whether the blocks were held until now, so that a preceding read of them is valid."""

    was_held: bool


class TransferRefused(msgspec.Struct, tag="refused", frozen=True):
    """Rejection of a request; the connection is closed after it."""

    reason: str
    is_not_held: bool = False


Question = Pull | Map | Agent | Release
Answer = Granted | Mapped | AgentIs | Released | TransferRefused
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def write(link: socket.socket, message: Question | Answer) -> None:
    """Send one frame within the socket's timeout."""
    write_frame(link, _encoder.encode(message))


def write_frame(link: socket.socket, body: bytes) -> None:
    """Send bytes, prefixed with their length, within the socket's timeout."""
    link.sendall(_LENGTH.pack(len(body)) + body)


def read_question(link: socket.socket) -> Question | None:
    """Return the next request within the socket's timeout; None at the end. Raise `TransferError` for an invalid one."""
    body = read_frame(link)
    try:
        return None if body is None else _questions.decode(body)
    except msgspec.DecodeError as error:
        raise TransferError(f"cannot decode request: {error}") from None


def request(link: socket.socket, question: Question, deadline: Deadline) -> Answer:
    """Send a request and return the answer. Raise `TransferError`, also for a `TransferRefused`."""
    try:
        link.settimeout(deadline.left())
        write(link, question)
        body = read_frame(link)
    except TimeoutError:
        raise TransferTimeout("the source did not respond in time") from None
    except OSError as error:
        raise SourceUnreachable(f"lost the connection to the source: {error}") from None
    if body is None:
        raise SourceUnreachable("the source closed the connection")
    try:
        answer: Answer = _answers.decode(body)
    except msgspec.DecodeError as error:
        raise TransferError(f"cannot decode answer: {error}") from None
    if isinstance(answer, TransferRefused):
        raise (NotHeld if answer.is_not_held else TransferError)(answer.reason)
    return answer


def batches(blocks: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
    """Yield the blocks in the batches in which they are sent."""
    for first in range(0, len(blocks), batch):
        yield blocks[first : first + batch]


def batch_of(region: Region) -> int:
    """Return the number of blocks per batch."""
    return max(1, BATCH_BYTES // region.layout.block_bytes)


def send_blocks(link: socket.socket, region: Region, blocks: Sequence[int], batch: int, *, is_checked: bool) -> None:
    """Send blocks, each system call within the socket's timeout."""
    digest = xxh3_64() if is_checked else None
    for portion in batches(blocks, batch):
        pieces = region.pieces(portion)
        if digest is not None:
            for piece in pieces:
                digest.update(piece)
        _send(link, pieces)
    if digest is not None:
        link.sendall(_DIGEST.pack(digest.intdigest()))


def receive_blocks(
    link: socket.socket, region: Region, blocks: Sequence[int], batch: int, deadline: Deadline, *, is_checked: bool
) -> None:
    """Receive blocks into their destinations. Raise `TransferError`."""
    digest = xxh3_64() if is_checked else None
    try:
        for portion in batches(blocks, batch):
            pieces = region.pieces(portion)
            _receive(link, pieces, deadline)
            if digest is not None:
                for piece in pieces:
                    digest.update(piece)
        if digest is not None:
            theirs = bytearray(_DIGEST.size)
            _receive(link, [memoryview(theirs)], deadline)
            if bytes(theirs) != _DIGEST.pack(digest.intdigest()):
                raise CorruptTransfer("the digest of the blocks does not match")
    except TimeoutError:
        deadline.left()  # Raises if the deadline has passed; else the source stalled.
        raise TransferTimeout(f"the source sent nothing for {deadline.stall_s:g} s") from None
    except OSError as error:
        raise SourceUnreachable(f"lost the connection to the source: {error}") from None


def _send(link: socket.socket, pieces: list[memoryview]) -> None:
    if isinstance(link, ssl.SSLSocket):
        for piece in pieces:
            link.sendall(piece)
        return
    for window in _windows(pieces):
        while window:
            _advance(window, link.sendmsg(window))


def _receive(link: socket.socket, pieces: list[memoryview], deadline: Deadline) -> None:
    has_many = not isinstance(link, ssl.SSLSocket)
    for window in _windows(pieces):
        while window:
            link.settimeout(deadline.left())
            count = link.recvmsg_into(window)[0] if has_many else link.recv_into(window[0])
            if count == 0:
                raise SourceUnreachable("the source closed the connection before the end")
            _advance(window, count)


def _windows(pieces: list[memoryview]) -> Iterator[list[memoryview]]:
    for first in range(0, len(pieces), BUFFERS_MAX):
        yield pieces[first : first + BUFFERS_MAX]


def _advance(window: list[memoryview], count: int) -> None:
    """Remove the bytes that the kernel has transferred."""
    done = 0
    while done < len(window) and count >= len(window[done]):
        count -= len(window[done])
        done += 1
    del window[:done]
    if count:
        window[0] = window[0][count:]


def read_frame(link: socket.socket, bytes_max: int = FRAME_BYTES_MAX) -> bytes | None:
    """Return the next frame, or None at the end. Raise `TransferError` for a malformed frame, `OSError`.

    The first byte may take as long as the socket's timeout allows; the rest must follow within the same time again,
    and within `FRAME_S`.
    """
    idle_s = link.gettimeout()
    head = bytearray(_LENGTH.size)
    count = link.recv_into(head)
    if count == 0:
        return None
    until = time.monotonic() + (FRAME_S if idle_s is None else min(FRAME_S, idle_s))
    try:
        _read_rest(link, memoryview(head)[count:], until, idle_s)
        (size,) = _LENGTH.unpack(head)
        if size > bytes_max:
            raise TransferError(f"a frame of {size} bytes: expected at most {bytes_max}")
        body = bytearray()
        while len(body) < size:  # Allocated as bytes arrive, not by the announced length.
            part = bytearray(min(PART_BYTES, size - len(body)))
            _read_rest(link, memoryview(part), until, idle_s)
            body += part
    finally:
        link.settimeout(idle_s)
    return bytes(body)


def _read_rest(link: socket.socket, rest: memoryview, until: float, idle_s: float | None) -> None:
    while rest:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("incomplete frame")
        link.settimeout(left if idle_s is None else min(left, idle_s))
        count = link.recv_into(rest)
        if count == 0:
            raise SourceUnreachable("the connection ended within a frame")
        rest = rest[count:]
