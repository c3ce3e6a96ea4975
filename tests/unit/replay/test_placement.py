"""Placement: ranks, and removal of workers."""

import pytest

from dynamo.core.errors import NotReady
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.runs import pack
from dynamo.protocols.kv_events import Stored, StoredBlock
from dynamo.replay.modes import MODES, placement
from dynamo.replay.placement import KvPlacement, PlacementRequest
from dynamo.replay.plan import Role


def placement_request(name: str, *blocks: int, is_remote: bool = False) -> PlacementRequest:
    return PlacementRequest(name, len(blocks) * 64, pack(blocks), is_remote=is_remote)


def stored(*blocks: int) -> Stored:
    return Stored(None, None, [StoredBlock(block, block) for block in blocks])


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_a_worker_rotate(mode: str) -> None:
    router = placement(mode, {}, 64, 1)
    router.join(7, 2, 1000, 8192)
    seats = {router.place(placement_request(f"r{number}", number * 2 + 1, number * 2 + 2), 0.0) for number in range(6)}
    assert seats == {(7, 0), (7, 1)}


@pytest.mark.parametrize("mode", MODES)
def test_departed_worker_has_no_load_or_cached_blocks(mode: str) -> None:
    router = placement(mode, {}, 64, 1)
    router.join(7, 1, 1000, 8192)
    assert router.place(placement_request("r", 1, 2), 0.0) == (7, 0)
    router.leave(7)
    router.validate({})
    with pytest.raises(NotReady):
        router.place(placement_request("r", 1, 2), 0.0)


def test_remote_prefilled_prompt_goes_to_the_least_loaded_worker() -> None:
    router = KvPlacement(RoutingConfig(block_size=64), 1)
    for worker in (1, 2):
        router.join(worker, 1, 1000, 8192)
    router.apply((1, 0), stored(1, 2, 3))
    assert router.deepest(pack((1, 2, 9)), 0.0) == 2
    assert router.place(placement_request("a", 1, 2, 3), 0.0) == (1, 0)
    assert router.place(placement_request("b", 1, 2, 3, is_remote=True), 0.0) == (2, 0)


def test_prefill_worker_prompts_occupy_no_blocks_in_the_router() -> None:
    router = placement("kv_router", {}, 64, 1, Role.PREFILL)
    assert isinstance(router, KvPlacement)
    router.join(1, 1, 1000, 8192)
    router.place(placement_request("a", 1, 2, 3), 0.0)
    assert router.router.loads()[1, 0][:2] == (192.0, 0.0)
