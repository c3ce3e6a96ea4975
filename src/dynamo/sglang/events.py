"""Events: sockets on which SGLang's ranks publish KV cache events and steps, the subscribers, and the layout of the shared store."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.backend.engine import EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError
from dynamo.kv_events.engine_subscriber import EngineListener
from dynamo.kv_router.hicache import HicacheLayout

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


def layout_of(args: Any, *, is_mla: bool, is_eagle: bool, events_endpoint: str | None) -> dict[str, Any] | None:
    """Return the page names of the shared store for the card (`kv_router.hicache` reads them); None without a Mooncake store. Raise `ConfigError`.

    `args` are SGLang's `ServerArgs`.
    """
    if args.hicache_storage_backend != "mooncake":
        return None
    extra = _extra(args.hicache_storage_backend_extra_config)
    lcm = extra.get("tp_lcm_size")
    lcm = lcm if isinstance(lcm, int) and not isinstance(lcm, bool) else None
    tag = extra.get("extra_backend_tag")
    name = args.served_model_name
    parts = [*([] if tag is None else [str(tag)]), *([name.replace("/", "-")] if name else [])]
    layout = HicacheLayout(
        page_size=args.page_size or 1,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        is_mla_model=is_mla,
        is_eagle=is_eagle,
        tp_lcm_size=lcm,
        should_split_heads=bool(
            not is_mla
            and args.hicache_mem_layout == "page_head"
            and lcm is not None
            and lcm > args.tp_size
            and lcm % args.tp_size == 0
        ),
        extra_backend_tag=tag if isinstance(tag, str) and tag else None,
        key_prefix="_".join(parts) or None,
        kv_events_endpoint=events_endpoint,
    )
    found: dict[str, Any] = msgspec.to_builtins(layout)
    return found


def _extra(text: str | None) -> dict[str, Any]:
    """Return the store's own settings. A file name is ignored; the engine reads the file."""
    if not text or text.startswith("@"):
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--hicache-storage-backend-extra-config: not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
