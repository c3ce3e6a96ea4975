"""Orders: requests to the block manager, and counters of its work. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.logical.book import TierCopy

Array = npt.NDArray[Any]
Fill = Callable[[Array], None]
"""Function that writes a block into the given array."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A complete block on the device, and the function that copies it."""

    identity: BlockIdentity
    fill: Fill


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker that holds a prefix."""

    address: str
    blocks: int
    """Number of consecutive requested blocks, from the first, that the peer has."""


@dataclass(eq=False, slots=True)
class LoadTicket:
    """A prefix being copied into the host tier."""

    deadline: float
    copies: deque[TierCopy]
    peer: "Peer | None" = None
    held: list[int] = field(default_factory=list)
    is_done: bool = False
    is_ended: bool = False


@dataclass(slots=True)
class TierTraffic:
    """Counters of the threads since the start."""

    object_bytes_out: int = 0
    object_bytes_in: int = 0
    object_read_failures: int = 0
    object_write_failures: int = 0
    disk_write_failures: int = 0
    disk_read_failures: int = 0
    peer_failures: int = 0
    tickets: int = 0
    tickets_late: int = 0
    """Prompts computed because their blocks did not arrive in time."""
