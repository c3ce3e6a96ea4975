"""Events of TensorRT-LLM: full blocks alone, of the longest window, each rank for itself."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns
from tests.unit.vllm.conftest import Host

from dynamo.core.clock import ManualClock
from dynamo.protocols.kv_events import Removed, Stored
from dynamo.text.multimodal.routing_hashes import hashes_of
from dynamo.trtllm.events import TrtllmCacheEvents, follow, publisher_of

SIZE = 2


def block(key: int, *tokens: int, level: int = 0) -> dict[str, Any]:
    return {"block_hash": key, "tokens": [{"token_id": one} for one in tokens], "cache_level": level}


def stored(*blocks: dict[str, Any], parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {"data": {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **more}


def removed(*keys: int, **more: Any) -> dict[str, Any]:
    return {"data": {"type": "removed", "block_hashes": list(keys)}, **more}


def test_full_blocks_are_reported_with_parent_and_tokens() -> None:
    ((event, rank, tier),) = TrtllmCacheEvents(SIZE).read(
        stored(block(5, 1, 2), block(-6, 3, 4), parent=-1, attention_dp_rank=3)
    )
    assert isinstance(event, Stored)
    assert (event.parent_hash, rank, tier) == ((1 << 64) - 1, 3, "device")
    assert [one.block_hash for one in event.blocks] == [5, (1 << 64) - 6]
    assert [one.tokens_hash for one in event.blocks] == list(hashes_of([1, 2, 3, 4], SIZE))


def test_partial_block_is_neither_stored_nor_removed() -> None:
    events = TrtllmCacheEvents(SIZE)
    ((event, _, _),) = events.read(stored(block(5, 1, 2), block(6, 3)))
    assert [one.block_hash for one in event.blocks] == [5]
    assert events.read(stored(block(7, 3))) == []
    ((event, _, _),) = events.read(removed(5, 6))
    assert event == Removed([5])
    assert events.read(removed(7)) == []
    ((event, _, _),) = events.read(removed(6))
    assert event == Removed([6])  # It may have been stored again meanwhile.


def test_completed_block_is_removed() -> None:
    events = TrtllmCacheEvents(SIZE)
    events.read(stored(block(6, 3)))
    events.read(stored(block(6, 3, 4)))
    ((event, _, _),) = events.read(removed(6))
    assert event == Removed([6])


def test_only_events_of_the_longest_window_are_used() -> None:
    events = TrtllmCacheEvents(SIZE)
    for window in (8, 64):
        assert (
            events.read({"data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}, "window_size": window})
            == []
        )
    assert events.read(stored(block(5, 1, 2), window_size=8)) == []
    assert len(events.read(stored(block(5, 1, 2), window_size=64))) == 1
    assert events.read(removed(5, window_size=8)) == []
    assert events.read({"data": {"type": "updated", "block_hash": 5}, "window_size": 64}) == []


def test_block_in_host_memory_has_the_host_tier() -> None:
    ((_, _, tier),) = TrtllmCacheEvents(SIZE).read(stored(block(5, 1, 2, level=1)))
    assert tier == "host_pinned"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, SIZE)), max_size=60))
def test_removals_of_only_partial_blocks_are_not_reported(steps: list[tuple[int, bool, int]]) -> None:
    events = TrtllmCacheEvents(SIZE)
    full: set[int] = set()
    partial: set[int] = set()
    for key, is_stored, count in steps:
        if is_stored:
            reported = events.read(stored(block(key, *range(count))))
            assert bool(reported) is (count == SIZE)
            (full if count == SIZE else partial).add(key)
            (partial if count == SIZE else full).discard(key)
        else:
            reported = events.read(removed(key))
            assert bool(reported) is (key not in partial)
            partial.discard(key)
            full.discard(key)


async def test_event_polling_continues_after_malformed_events() -> None:
    host, clock = Host(), ManualClock()
    answers = [[stored(block(5, 1, 2)), {"data": {"type": "stored"}}], [], [stored(block(6, 1, 2))]]

    async def look(wait_s: float) -> AsyncIterator[Any]:
        for one in answers.pop(0) if answers else []:
            yield one

    following = asyncio.ensure_future(follow(look, publisher_of(TrtllmCacheEvents(SIZE), host), clock=clock))
    for _ in range(30):
        await turns()
        clock.advance(0.1)
    following.cancel()
    assert [event.blocks[0].block_hash for event, _, _ in host.events] == [5, 6]
