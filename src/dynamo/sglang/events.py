"""Events: sockets on which SGLang's ranks publish KV cache events and steps, and the subscribers."""

import json
from collections.abc import Mapping
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener

ENDPOINT = "tcp://*:5557"
"""SGLang's default."""


def publisher_of(kv_events_config: str | None) -> Mapping[str, Any] | None:
    """Return the value of `--kv-events-config`; None if nothing is published.

    Raise `ConfigError` for invalid JSON, and for publishers other than ZMQ.
    """
    if not kv_events_config:
        return None
    try:
        found = json.loads(kv_events_config)
    except ValueError as error:
        raise ConfigError(f"--kv-events-config: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--kv-events-config {kv_events_config}: must be a JSON object")
    publisher = found.get("publisher", "null")
    if publisher in (None, "null"):
        return None
    if publisher != "zmq":
        raise ConfigError(f'--kv-events-config: publisher {publisher!r}: must be "zmq"')
    return found


def kv_listeners(
    publisher: Mapping[str, Any], ranks: int, block_tokens: int, host: EngineHost, *, is_eagle: bool = False
) -> list[EngineListener]:
    """Return the subscribers of all ranks: each rank has its own port, counted from the first rank's."""
    endpoint, replay = publisher.get("endpoint") or ENDPOINT, publisher.get("replay_endpoint")
    return [
        kv_listener(
            of_rank(endpoint, rank),
            None if replay is None else of_rank(replay, rank),
            rank,
            block_tokens,
            host,
            is_eagle=is_eagle,
        )
        for rank in range(ranks)
    ]


def of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank. Raise `ConfigError` for one without a port."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{rank}"
    base, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"--kv-events-config: endpoint {endpoint}: must have a port, the first of consecutive ports")
    return f"{base}:{int(port) + rank}"
