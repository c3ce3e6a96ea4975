"""Sources of KV events that an engine declares, and the load of a rank that it publishes."""

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.kv_events.publisher import KvEventPublisher

__all__ = ["ComponentSnapshot", "KvEventSource", "PushSource", "ZmqSource"]


@dataclass
class ComponentSnapshot:
    """KV cache of one rank, for the metrics of the worker and for routers."""

    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    """Fraction of KV blocks in use, 0 to 1."""
    dp_rank: int
    kv_cache_hit_rate: float | None = None
    """Fraction of prompt tokens found in the cache, 0 to 1; None if it was not measured."""


@dataclass(frozen=True)
class ZmqSource:
    """KV events that the engine publishes at a ZMQ address, to which the worker subscribes."""

    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass(frozen=True)
class PushSource:
    """KV events that the engine passes to a publisher. The engine stops using it in `cleanup`."""

    on_ready: Callable[[KvEventPublisher], None]
    """Called once with the publisher, which may be used from any thread."""
    dp_rank: int = 0


KvEventSource = ZmqSource | PushSource
