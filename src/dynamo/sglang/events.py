"""Events: where SGLang's ranks say what their caches hold and what their steps computed, and who listens there."""

import json
from collections.abc import Mapping
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener

ENDPOINT = "tcp://*:5557"
"""SGLang's, unless it is told another."""


def publisher_of(kv_events_config: str | None) -> Mapping[str, Any] | None:
    """What `--kv-events-config` says; None where nothing is published.

    Raises `ConfigError` for what cannot be read, and for publishers other than ZMQ.
    """
    if not kv_events_config:
        return None
    try:
        found = json.loads(kv_events_config)
    except ValueError as error:
        raise ConfigError(f"--kv-events-config: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--kv-events-config {kv_events_config}: expected an object")
    publisher = found.get("publisher", "null")
    if publisher in (None, "null"):
        return None
    if publisher != "zmq":
        raise ConfigError(f'--kv-events-config: publisher {publisher!r}: expected "zmq"')
    return found


def kv_listeners(
    publisher: Mapping[str, Any], ranks: int, block_tokens: int, host: EngineHost, *, is_eagle: bool = False
) -> list[EngineListener]:
    """Who listens to each rank: each has a port of its own, counted from the first one's."""
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
    """A rank's own endpoint. Raises `ConfigError` for one without a port."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{rank}"
    base, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"--kv-events-config: endpoint {endpoint}: expected a port, from which ranks count on")
    return f"{base}:{int(port) + rank}"
