"""PendingSelections: limits of time, number and bytes."""

import pytest

from dynamo.kv_router.router import RouteRequest
from dynamo.routing.services.pending_selections import ENTRY_BYTES, PendingSelections, SelectionCacheConfig

PLACE = ("model", "group")
RANK = (7, 0)


def request(blocks: int = 1) -> RouteRequest:
    return RouteRequest("", bytes(8 * blocks), 16 * blocks)


def test_a_selection_is_found_under_its_id_and_model_until_it_is_removed() -> None:
    pending = PendingSelections()
    pending.add("a", PLACE, RANK, request(), 0.0)
    found = pending.find("a", PLACE, 1.0)
    assert found is not None and found.rank == RANK
    assert pending.find("a", ("model", "other"), 1.0) is None
    pending.remove("a", PLACE)
    assert pending.find("a", PLACE, 1.0) is None


def test_a_selection_expires_after_its_time() -> None:
    pending = PendingSelections(SelectionCacheConfig(ttl_secs=10.0))
    pending.add("a", PLACE, RANK, request(), 0.0)
    pending.add("b", PLACE, RANK, request(), 5.0)
    assert pending.find("a", PLACE, 9.9) is not None
    assert pending.find("a", PLACE, 10.0) is None
    assert pending.find("b", PLACE, 10.0) is not None


@pytest.mark.parametrize(
    "config",
    [SelectionCacheConfig(max_entries=2), SelectionCacheConfig(max_bytes=2 * (ENTRY_BYTES + 8))],
    ids=["entries", "bytes"],
)
def test_the_oldest_selection_is_removed_at_a_limit(config: SelectionCacheConfig) -> None:
    pending = PendingSelections(config)
    for name in "abc":
        pending.add(name, PLACE, RANK, request(), 0.0)
    assert [name for name in "abc" if pending.find(name, PLACE, 0.0)] == ["b", "c"]


def test_a_repeated_id_replaces_the_earlier_selection() -> None:
    pending = PendingSelections(SelectionCacheConfig(max_bytes=2 * ENTRY_BYTES))
    for _ in range(50):
        pending.add("a", PLACE, RANK, request(), 0.0)
    assert len(pending) == 1, "bytes of replaced selections were not released"
