"""Interface of transfers: regions of pages, descriptors of published blocks, and errors of pulls.

    source = Source(region, …); descriptor = source.publish(blocks)       # the worker that computed the blocks
    puller = Puller(region, …); puller.pull(descriptor, pairs, deadline)  # the worker that needs them; blocks its thread
    puller.release(descriptor)                                            # end the lease at the source

A descriptor travels as plain values in any message. Its blocks may have been released before they are pulled: every
pull ends in complete blocks or in a `TransferError`, and after an error the destination's content is undefined.
"""

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo.core.errors import DynamoException

Bytes = npt.NDArray[np.uint8]
VERSION = 1  # Version of the descriptor and the frames; other versions are rejected.


class Transport(enum.Enum):
    """Transports for blocks."""

    NIXL = "nixl"
    SHARED_MEMORY = "shm"
    TCP = "tcp"
    LOCAL = "local"
    """Within one process."""


class TransferError(DynamoException):
    """The blocks were not transferred."""

    kind = "failed"
    """One word that identifies the error in metrics."""


class LayoutMismatch(TransferError):
    """The layouts of the two caches differ."""

    kind = "layout"


class NotHeld(TransferError):
    """The source does not hold these blocks, or released them before they were completely read."""

    kind = "not_held"


class SourceUnreachable(TransferError):
    """The source cannot be reached by this transport."""

    kind = "unreachable"


class TransferTimeout(TransferError):
    """The source sent nothing for too long, or the deadline has passed."""

    kind = "timeout"


class TransferAborted(TransferError):
    """The pull was cancelled."""

    kind = "aborted"


class CorruptTransfer(TransferError):
    """The bytes received differ from those sent."""

    kind = "corrupt"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout and meaning of a block's bytes; two caches exchange blocks only if their layouts are equal."""

    model: str
    """Model that computed the keys and values; must be equal only for equal weights."""
    dtype: str
    item_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def planes(self) -> int:
        """Number of planes of a block: keys and values of every head in every layer."""
        return self.layers * 2 * self.kv_heads

    @property
    def piece_bytes(self) -> int:
        """Bytes of a block in one plane."""
        return self.block_tokens * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.planes * self.piece_bytes

    def check(self, theirs: "Layout") -> None:
        """Raise `LayoutMismatch` with the differing field."""
        for name in self.__struct_fields__:
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise LayoutMismatch(f"layouts differ: {name} is {other!r} at the source and {ours!r} at the puller")


class Region:
    """A cache's memory as (planes, blocks, bytes). A block has one piece in each plane."""

    def __init__(self, layout: Layout, pages: npt.NDArray[Any]) -> None:
        """`pages` is the engine's cache: contiguous, planes outermost, then slots."""
        assert pages.flags.c_contiguous, "a region must be contiguous"
        flat = pages.reshape(-1).view(np.uint8)
        assert flat.size % layout.block_bytes == 0, "the memory is not a whole number of blocks"
        self.layout = layout
        self.blocks = flat.size // layout.block_bytes
        self.flat: Bytes = flat
        self.pages: Bytes = flat.reshape(layout.planes, self.blocks, layout.piece_bytes)

    def pieces(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the blocks' memory, plane by plane, in the fewest contiguous pieces."""
        return [memoryview(plane[first:end]).cast("B") for plane in self.pages for first, end in runs(blocks)]

    def copy(self, source: "Region", pairs: "Sequence[Pair]") -> None:
        """Copy blocks of another region of the same layout."""
        for theirs, ours, count in pair_runs(pairs):
            self.pages[:, ours : ours + count] = source.pages[:, theirs : theirs + count]


Pair = tuple[int, int]
"""Source and destination of a block: its index in the descriptor or its source block, and the block in the own region."""


class TransferOffer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transport to published blocks, and its address."""

    transport: str
    address: str
    slot: int | None = None
    """Shared memory: row of the source's table that indicates whether the blocks are still held."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Published blocks: everything needed to pull them, and to reject them beforehand."""

    version: int = VERSION
    engine_id: str
    transfer_id: str
    """Unguessable id; grants access to the blocks."""
    layout: Layout
    blocks: list[int]
    expires_at: float
    """Expiry by the source's clock, in seconds since 1970; informational, because only the source enforces it."""
    offers: list[TransferOffer]

    def to_builtins(self) -> dict[str, Any]:
        """Convert to plain values."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def read(cls, value: object) -> "Descriptor":
        """Parse a descriptor. Raise `TransferError` for an invalid one."""
        try:
            descriptor = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise TransferError(f"invalid block descriptor: {error}") from None
        return cls.check(descriptor)

    @staticmethod
    def check(descriptor: "Descriptor") -> "Descriptor":
        """Raise `TransferError` for a descriptor of a later version."""
        if descriptor.version != VERSION:
            raise TransferError(f"descriptor version {descriptor.version} is not supported: expected {VERSION}")
        return descriptor


@dataclass(slots=True)
class Deadline:
    """Time limit and cancellation of a transfer."""

    at: float
    """Deadline by `time.monotonic`."""
    stall_s: float = 2.0
    """Maximum time without data before the source counts as stalled."""
    aborted: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def after(cls, seconds: float, stall_s: float = 2.0) -> "Deadline":
        return cls(time.monotonic() + seconds, stall_s)

    def left(self) -> float:
        """Return the seconds to wait for the next data. Raise `TransferTimeout` or `TransferAborted` if none are left."""
        if self.aborted.is_set():
            raise TransferAborted("the transfer was cancelled")
        left = self.at - time.monotonic()
        if left <= 0:
            raise TransferTimeout("the deadline of the transfer has passed")
        return min(left, self.stall_s)


class PullMember(Protocol):
    """One transport for pulls. Its methods block their thread, and are thread-safe."""

    transport: Transport

    def pull(self, descriptor: Descriptor, offer: TransferOffer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        """Fill the destination blocks of `pairs` from their sources. Raise `TransferError`."""

    def release(self, descriptor: Descriptor, offer: TransferOffer) -> None:
        """Release the blocks at the source. Raise `SourceUnreachable` if this transport does not reach it."""

    def close(self) -> None:
        """Release all resources."""


Freed = Callable[[Sequence[int]], None]
"""Callback, called once per transfer, on any thread, when its blocks may be reused."""


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield consecutive blocks as ranges: the first, and the one after the last."""
    first = end = -1
    for block in blocks:
        if block == end:
            end += 1
            continue
        if first >= 0:
            yield first, end
        first, end = block, block + 1
    if first >= 0:
        yield first, end


def pair_runs(pairs: Sequence[Pair]) -> Iterator[tuple[int, int, int]]:
    """Yield pairs with both sides consecutive, as (first source block, first own block, count)."""
    theirs = ours = count = 0
    for one, other in pairs:
        if count and one == theirs + count and other == ours + count:
            count += 1
            continue
        if count:
            yield theirs, ours, count
        theirs, ours, count = one, other, 1
    if count:
        yield theirs, ours, count
