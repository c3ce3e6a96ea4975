"""Preble: the rule, and its expiry."""

from dynamo.kv_router.runs import pack
from dynamo.protocols.kv_events import Stored, StoredBlock
from dynamo.replay.placement import PlacementRequest
from dynamo.replay.preble import PreblePlacement


def placement_request(name: str, *blocks: int) -> PlacementRequest:
    return PlacementRequest(name, len(blocks) * 6400, pack(blocks))


def stored(*blocks: int) -> Stored:
    return Stored(None, None, [StoredBlock(block, block) for block in blocks])


def preble(workers: int = 2) -> PreblePlacement:
    placement = PreblePlacement(1)
    for worker in range(workers):
        placement.join(worker, 1, 1000, 8192)
    return placement


def test_preble_places_a_prompt_on_the_worker_with_most_of_its_blocks() -> None:
    placement = preble()
    placement.apply((1, 0), stored(1, 2, 3))
    assert [placement.place(placement_request(f"r{n}", 1, 2, 3, 4), 0.0) for n in range(3)] == [(1, 0)] * 3


def test_preble_picks_the_least_loaded_worker_below_half_overlap() -> None:
    placement = preble()
    placement.apply((1, 0), stored(1))
    chosen = {placement.place(placement_request(f"r{n}", 1, 10 * n + 2, 10 * n + 3, 10 * n + 4), 0.0) for n in range(2)}
    assert chosen == {(0, 0), (1, 0)}


def test_preble_shifts_requests_from_an_overloaded_worker() -> None:
    placement = preble()
    placement.apply((1, 0), stored(1, 2, 3))
    assert (0, 0) in [placement.place(placement_request(f"r{n}", 1, 2, 3, 4), 0.0) for n in range(20)]


def test_preble_drops_loads_after_three_minutes() -> None:
    placement = preble()
    placement.apply((1, 0), stored(1, 2, 3))
    first = [placement.place(placement_request(f"a{n}", 1, 2, 3, 4), 0.0) for n in range(20)]
    again = [placement.place(placement_request(f"b{n}", 1, 2, 3, 4), 181.0) for n in range(20)]
    assert first == again
