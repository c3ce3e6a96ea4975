"""Events: the KV events of the server's ranks, forwarded to the host."""

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener


def kv_listeners(
    endpoint: str, replay_endpoint: str | None, ranks: int, block_tokens: int, host: EngineHost
) -> list[EngineListener]:
    """Return a listener for each rank; ranks use consecutive ports. Raises `ConfigError`."""
    listeners = []
    for rank in range(ranks):
        replay = None if replay_endpoint is None else at_rank(replay_endpoint, rank)
        listeners.append(kv_listener(at_rank(endpoint, rank), replay, rank, block_tokens, host))
    return listeners


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank. Raises `ConfigError` for an endpoint without a port."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise ConfigError(f"--kv-events-endpoint {endpoint}: expected tcp://host:port for a server of several ranks")
    return f"{address}:{int(port) + rank}"
