"""Events: subscribers of the KV cache events that vLLM's ranks publish on ZMQ sockets."""

from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener


def kv_listeners(sources: dict[int, Any], block_tokens: int, first_rank: int, host: EngineHost) -> list[EngineListener]:
    """Return the subscribers of all publishing ranks; `sources` are vLLM's `KVEventsConfig` by rank.

    Raise `ConfigError` for a publisher other than ZMQ.
    """
    listeners: list[EngineListener] = []
    for rank, source in sorted(sources.items()):
        if source.publisher != "zmq":
            raise ConfigError(f'--kv-events-config: publisher {source.publisher!r}: must be "zmq"')
        listeners.append(kv_listener(source.endpoint, source.replay_endpoint, first_rank + rank, block_tokens, host))
    return listeners


def publishes(engine_config: Any) -> bool:
    """Return whether an engine with this configuration publishes KV cache events."""
    events, cache = engine_config.kv_events_config, engine_config.cache_config
    return bool(events is not None and events.enable_kv_cache_events and cache.enable_prefix_caching)
