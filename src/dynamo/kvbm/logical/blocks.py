"""Blocks: the identity of a block's content, and the states of a slot from empty to readable. Pure."""

from dataclasses import dataclass
from enum import Enum


class BlockState(Enum):
    """The states of a slot in a pool; only registered blocks can be found."""

    RESET = "reset"
    """Free, without content."""
    MUTABLE = "mutable"
    """Allocated, being filled by its holder."""
    STAGED = "staged"
    """Completely written, not yet findable."""
    REGISTERED = "registered"
    """Completely written, findable, and immutable."""


class Tier(Enum):
    """Storage tiers; the value is the tier's name in KV events."""

    DEVICE = "device"
    HOST = "host_pinned"
    DISK = "disk"
    OBJECT = "external"
    PEER = "peer"
    """Another worker's host tier; never published, because that worker publishes its own blocks."""


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Identity of a block's content. The sequence hash covers the whole prefix, so equal hashes mean equal content."""

    sequence_hash: int
    tokens_hash: int
    parent_hash: int | None = None
    """Sequence hash of the preceding block; None for the first block of a sequence."""
    priority: int = 0
    """Retention priority, from 0 to 100."""
