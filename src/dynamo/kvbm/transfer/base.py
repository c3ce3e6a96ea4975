"""Interface: regions of pages, what a source publishes of them, and how pulling can fail.

    source = Source(region, …); descriptor = source.publish(blocks)       # the one who computed them
    puller = Puller(region, …); puller.pull(descriptor, pairs, deadline)  # the one who needs them; blocks its thread
    puller.release(descriptor)                                            # the source need not hold them any longer

A descriptor travels as plain values in whatever message there is. What it names may be gone when somebody comes: every
pull ends in whole blocks or in a `TransferError`, and after an error nothing in the destination may be believed.
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
VERSION = 1  # Of the descriptor and the frames; who speaks another is not understood.


class Transport(enum.Enum):
    """The ways in which blocks can travel."""

    NIXL = "nixl"
    SHARED_MEMORY = "shm"
    TCP = "tcp"
    LOCAL = "local"
    """Within one process."""


class TransferError(DynamoException):
    """The blocks were not transferred."""

    kind = "failed"
    """One word for metrics."""


class LayoutMismatch(TransferError):
    """The blocks of the two caches do not mean the same."""

    kind = "layout"


class NotHeld(TransferError):
    """The source does not hold these blocks, or held them no longer before they were read whole."""

    kind = "not_held"


class SourceUnreachable(TransferError):
    """The source does not answer in this way."""

    kind = "unreachable"


class TransferTimeout(TransferError):
    """The source was silent for too long, or the deadline has passed."""

    kind = "timeout"


class TransferAborted(TransferError):
    """Nobody wants the blocks any more."""

    kind = "aborted"


class Corrupt(TransferError):
    """The bytes that arrived are not those that were sent."""

    kind = "corrupt"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a block mean; two caches exchange blocks only if theirs are equal."""

    model: str
    """Whose keys and values they are: the same words only for the same weights."""
    dtype: str
    item_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def planes(self) -> int:
        """Parts that a block consists of: keys and values of every head in every layer."""
        return self.layers * 2 * self.kv_heads

    @property
    def piece_bytes(self) -> int:
        """Of a block in one plane."""
        return self.block_tokens * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.planes * self.piece_bytes

    def check(self, theirs: "Layout") -> None:
        """Raises `LayoutMismatch` that names what differs."""
        for name in self.__struct_fields__:
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise LayoutMismatch(f"{name} is {other!r} there and {ours!r} here")


class Region:
    """A cache's memory as (planes, blocks, bytes). A block's pieces lie in as many places as there are planes."""

    def __init__(self, layout: Layout, pages: npt.NDArray[Any]) -> None:
        """`pages` is what the engine computes with: contiguous, planes outermost, then slots."""
        assert pages.flags.c_contiguous, "a region must be contiguous"
        flat = pages.reshape(-1).view(np.uint8)
        assert flat.size % layout.block_bytes == 0, "the memory is not a whole number of blocks"
        self.layout = layout
        self.blocks = flat.size // layout.block_bytes
        self.flat: Bytes = flat
        self.pages: Bytes = flat.reshape(layout.planes, self.blocks, layout.piece_bytes)

    def pieces(self, blocks: Sequence[int]) -> list[memoryview]:
        """The blocks' memory, plane by plane, as few and as long pieces as can be."""
        return [memoryview(plane[first:end]).cast("B") for plane in self.pages for first, end in runs(blocks)]

    def copy(self, source: "Region", pairs: "Sequence[Pair]") -> None:
        """Copies blocks of another region of the same layout."""
        for theirs, ours, count in pair_runs(pairs):
            self.pages[:, ours : ours + count] = source.pages[:, theirs : theirs + count]


Pair = tuple[int, int]
"""A place among the blocks that a descriptor names, or their block there; and the block here."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to reach published blocks."""

    transport: str
    address: str
    slot: int | None = None
    """Shared memory: where the source says that it still holds them."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a source publishes: enough to pull blocks, and to see beforehand that it is of no use."""

    version: int = VERSION
    engine_id: str
    transfer_id: str
    """Unguessable: who knows it may read the blocks."""
    layout: Layout
    blocks: list[int]
    expires_at: float
    """Seconds since 1970 by the source's clock, for people and for logs: the source alone judges."""
    offers: list[Offer]

    def to_builtins(self) -> dict[str, Any]:
        """As plain values."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @classmethod
    def read(cls, value: object) -> "Descriptor":
        """Raises `TransferError` for what is none."""
        try:
            descriptor = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise TransferError(f"this is no descriptor of blocks: {error}") from None
        return cls.check(descriptor)

    @staticmethod
    def check(descriptor: "Descriptor") -> "Descriptor":
        """Raises `TransferError` for one that only a later version understands."""
        if descriptor.version != VERSION:
            raise TransferError(f"the descriptor is of version {descriptor.version}; {VERSION} is understood")
        return descriptor


@dataclass(slots=True)
class Deadline:
    """Until when, and whether, somebody waits."""

    at: float
    """By `time.monotonic`."""
    stall_s: float = 2.0
    """The longest silence of a source that still counts as one."""
    aborted: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def after(cls, seconds: float, stall_s: float = 2.0) -> "Deadline":
        return cls(time.monotonic() + seconds, stall_s)

    def left(self) -> float:
        """Seconds to wait for the next sign of life. Raises `TransferTimeout` or `TransferAborted` if none are left."""
        if self.aborted.is_set():
            raise TransferAborted("nobody wants the blocks any more")
        left = self.at - time.monotonic()
        if left <= 0:
            raise TransferTimeout("the deadline of the transfer has passed")
        return min(left, self.stall_s)


class PullMember(Protocol):
    """One way to pull. Its methods block their thread; several threads may be in them."""

    transport: Transport

    def pull(self, descriptor: Descriptor, offer: Offer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        """Fills the blocks here with those at the places there. Raises `TransferError`."""

    def release(self, descriptor: Descriptor, offer: Offer) -> None:
        """Release the blocks at the source. Raise `SourceUnreachable` where this way does not reach it."""

    def close(self) -> None:
        """Frees what it took."""


Freed = Callable[[Sequence[int]], None]
"""Told once for each transfer, on any thread, when its blocks may be used for something else."""


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive blocks as ranges: the first, and the one after the last."""
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
    """Pairs whose both sides are consecutive, as (first there, first here, count)."""
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
