"""Events: what vLLM's ranks say of their caches over sockets of their own, told to the host."""

from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener


def kv_listeners(sources: dict[int, Any], block_tokens: int, first_rank: int, host: EngineHost) -> list[EngineListener]:
    """Who listens to each rank that publishes; `sources` are vLLM's `KVEventsConfig` by rank.

    Raises `ConfigError` for a publisher other than ZMQ.
    """
    listeners: list[EngineListener] = []
    for rank, source in sorted(sources.items()):
        if source.publisher != "zmq":
            raise ConfigError(f'--kv-events-config: publisher {source.publisher!r}: expected "zmq"')
        listeners.append(kv_listener(source.endpoint, source.replay_endpoint, first_rank + rank, block_tokens, host))
    return listeners


def publishes(engine_config: Any) -> bool:
    """Whether an engine of this configuration tells what its cache holds."""
    events, cache = engine_config.kv_events_config, engine_config.cache_config
    return bool(events is not None and events.enable_kv_cache_events and cache.enable_prefix_caching)
