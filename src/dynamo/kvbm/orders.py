"""Orders: what the block manager is asked to do, and what it did. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from dynamo.kvbm.logical.blocks import Identity
from dynamo.kvbm.logical.book import Copy

Array = npt.NDArray[Any]
Fill = Callable[[Array], None]
"""Writes a block into the array that it is given."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block on the device that is complete, and how it is copied."""

    identity: Identity
    fill: Fill


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker that holds a prefix."""

    address: str
    blocks: int
    """How many of the blocks that are asked for, from the first on."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A prefix on its way into the host."""

    deadline: float
    copies: deque[Copy]
    peer: "Peer | None" = None
    held: list[int] = field(default_factory=list)
    is_done: bool = False
    is_ended: bool = False


@dataclass(slots=True)
class Traffic:
    """What the threads did since the start."""

    object_bytes_out: int = 0
    object_bytes_in: int = 0
    object_read_failures: int = 0
    object_write_failures: int = 0
    disk_write_failures: int = 0
    disk_read_failures: int = 0
    peer_failures: int = 0
    tickets: int = 0
    tickets_late: int = 0
    """Prompts that were computed because their blocks did not come in time."""
