"""Blocks: what identifies a block's content, and the states between an empty place and a readable one. Pure."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """The life of a place in a pool (control-plane.md §4.4); only what is registered can be found."""

    RESET = "reset"
    """Nobody's, without content."""
    MUTABLE = "mutable"
    """Somebody's, who fills it."""
    STAGED = "staged"
    """Whole, and not yet findable."""
    REGISTERED = "registered"
    """Whole and findable; nobody changes it any more."""


class Tier(Enum):
    """Where blocks are; the value is the routers' word for it."""

    DEVICE = "device"
    HOST = "host_pinned"
    DISK = "disk"
    OBJECT = "external"
    PEER = "peer"
    """Another worker's host; never told, for it is that worker's to tell."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a block holds. The sequence hash covers the whole prefix, so equal hashes mean equal content."""

    sequence_hash: int
    tokens_hash: int
    parent_hash: int | None = None
    """The block before it in its sequence; None at the start."""
    priority: int = 0
    """How much it is worth to keep, from 0 to 100."""
