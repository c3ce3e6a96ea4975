"""Events: conversion of the KV cache events that TensorRT-LLM returns on request.

TensorRT-LLM reports a partially filled block as stored and as removed; routers use full blocks only. A model with
several attention window lengths reports each block once per window; only the longest window is used.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.core.clock import Clock, SystemClock
from dynamo.kv_events.publisher import unsigned
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock
from dynamo.text.multimodal.routing_hashes import hashes_of

logger = logging.getLogger(__name__)

WAIT_S = 5.0  # Maximum wait of one poll for new events.
PAUSE_FIRST_S, PAUSE_MAX_S = (
    0.01,
    0.1,
)  # Between two polls without events: an idle engine is polled less often.
TIERS = {0: "device", 1: "host_pinned"}
PARTIAL_MAX = 100_000
"""Maximum number of partial blocks that are tracked; the oldest are dropped first."""


class TrtllmCacheEvents:
    """Converter of one engine's consecutive events. Pure."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._partial: dict[int, dict[int, None]] = {}
        """By rank: the partial blocks that were reported as stored, in order."""
        self._window: int | None = None
        self._next: dict[int, int] = {}

    def read(self, message: Mapping[str, Any]) -> list[tuple[KvEvent, int, str]]:
        """Return the events in one message, each with its rank and its tier."""
        data, rank = message["data"], int(message.get("attention_dp_rank") or 0)
        number = message.get("event_id")
        if number is not None:
            expected = self._next.get(rank)
            if expected is not None and number > expected:
                logger.warning("lost %d KV events of rank %d before event %d", number - expected, rank, number)
            self._next[rank] = number + 1
        kind, window = data.get("type"), message.get("window_size")
        if kind == "created":
            self._window = max(self._window or 0, window or 0) or None
            return []
        if window is not None and self._window is not None and window != self._window:
            return []
        if kind == "stored":
            return self._stored(data, rank)
        if kind == "removed":
            return self._removed(data, rank)
        return []

    def _stored(self, data: Mapping[str, Any], rank: int) -> list[tuple[KvEvent, int, str]]:
        """Convert full blocks up to the first partial one, which no block can follow."""
        partial = self._partial.setdefault(rank, {})
        keys: list[int] = []
        tokens: list[int] = []
        tier = "device"
        for block in data["blocks"]:
            key, ids = unsigned(block["block_hash"]), [one["token_id"] for one in block["tokens"]]
            if len(ids) < self._block_tokens:
                partial[key] = None
                while len(partial) > PARTIAL_MAX:
                    del partial[next(iter(partial))]
                break
            if len(ids) > self._block_tokens:
                logger.warning("ignoring a KV block of %d tokens, expected %d", len(ids), self._block_tokens)
                break
            partial.pop(key, None)
            if not keys:
                tier = TIERS.get(block.get("cache_level") or 0, "external")
            keys.append(key)
            tokens += ids
        if not keys:
            return []
        parent = data.get("parent_hash")
        hashes = hashes_of(tokens, self._block_tokens)
        blocks = [StoredBlock(key, one) for key, one in zip(keys, hashes, strict=True)]
        return [(Stored(None if parent is None else unsigned(parent), None, blocks), rank, tier)]

    def _removed(self, data: Mapping[str, Any], rank: int) -> list[tuple[KvEvent, int, str]]:
        partial = self._partial.get(rank, {})
        keys = [unsigned(one) for one in data["block_hashes"]]
        known = [key for key in keys if key not in partial]
        for key in keys:
            partial.pop(key, None)
        return [(Removed(known), rank, "device")] if known else []


async def follow(
    look: Callable[[float], AsyncIterator[Mapping[str, Any]]],
    publish: Callable[[Mapping[str, Any]], None],
    *,
    clock: Clock | None = None,
) -> None:
    """Poll for new messages until cancelled. A malformed message is logged and dropped."""
    clock = clock or SystemClock()
    pause_s = PAUSE_FIRST_S
    while True:
        found = False
        async for message in look(WAIT_S):
            found = True
            try:
                publish(message)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                logger.warning("cannot decode an event of TensorRT-LLM: %s: %s", error, str(message)[:80])
        pause_s = PAUSE_FIRST_S if found else min(PAUSE_MAX_S, pause_s * 2)
        await clock.sleep(pause_s)


def publisher_of(events: TrtllmCacheEvents, host: EngineHost) -> Callable[[Mapping[str, Any]], None]:
    """Return a callback that publishes the converted events to the host."""

    def publish(message: Mapping[str, Any]) -> None:
        for event, rank, tier in events.read(message):
            host.publish_kv_event(event, rank, tier)

    return publish
