"""Indexes of subscribed engines: one for each model and group."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.kv_events.test_engine_subscriber import TOKENS, message, stored

from dynamo.core.errors import HttpError
from dynamo.kv_router.runs import pack
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.text.multimodal.routing_hashes import hashes_of

PLACE = ("m", "default")
PROMPT = pack(hashes_of(TOKENS, 4))


@pytest.fixture
async def models() -> AsyncIterator[IndexedModels]:
    made = IndexedModels()
    yield made
    await made.close()


def receive_event(models: IndexedModels, number: int, *frames: list[bytes]) -> None:
    """Deliver a message to the listener with that number."""
    for one in frames:
        models.listeners()[number].events.process(one)


def full(models: IndexedModels) -> None:
    """Return an index in which instance 1 holds two blocks, its rank 1 one; instance 2 one, and two more in host
    memory.
    """
    models.follow(1, 0, "tcp://localhost:1", PLACE, 4)
    models.follow(1, 1, "tcp://localhost:2", PLACE, 4)
    models.follow(2, 0, "tcp://localhost:3", PLACE, 4)
    receive_event(models, 0, message(0, stored([1, 2], None, TOKENS[:8])))
    receive_event(models, 1, message(0, stored([1], None, TOKENS[:4])))
    receive_event(
        models, 2, message(0, stored([1], None, TOKENS[:4])), message(1, stored([2, 3], 1, TOKENS[4:], medium="CPU"))
    )


async def test_indexed_models_count_tokens_and_slower_tiers_include_faster_ones(models: IndexedModels) -> None:
    full(models)
    found = models.find(PLACE, PROMPT)
    assert found.scores == {"1": {"0": 8, "1": 4}, "2": {"0": 4}}
    one, two = found.instances["1"], found.instances["2"]
    assert (one.longest_matched, one.gpu, one.cpu, one.disk, one.dp) == (8, 8, 8, 8, {"0": 8, "1": 4})
    assert (two.longest_matched, two.gpu, two.cpu, two.disk) == (12, 4, 12, 12)


async def test_indexed_models_keep_models_and_groups_apart(models: IndexedModels) -> None:
    full(models)
    models.follow(3, 0, "tcp://localhost:4", ("m", "other"), 8)
    assert models.find(("m", "other"), PROMPT).scores == {}
    with pytest.raises(HttpError, match="no indexer for model=n routing_group=default"):
        models.find(("n", "default"), PROMPT)
    assert [one.instance_id for one in models.workers(routing_group="other")] == [3]
    assert [one.instance_id for one in models.workers("m")] == [1, 2, 3]


async def test_indexed_models_refuse_contradictory_registrations(models: IndexedModels) -> None:
    full(models)
    for status, given in (
        (409, (1, 0, "tcp://localhost:1", PLACE, 4)),
        (409, (9, 0, "tcp://localhost:1", PLACE, 8)),
        (409, (1, 5, "tcp://localhost:1", ("n", "default"), 4)),
        (400, (9, 0, "bogus", PLACE, 4)),
        (400, (9, 0, "tcp://localhost:1", ("n", "default"), 0)),
    ):
        with pytest.raises(HttpError) as caught:
            models.follow(*given)
        assert caught.value.code == status
    assert ("n", "default") not in models.models


async def test_indexed_models_drop_blocks_of_a_removed_worker(models: IndexedModels) -> None:
    full(models)
    models.leave(1, PLACE, 0)
    assert models.find(PLACE, PROMPT).scores == {"1": {"1": 4}, "2": {"0": 4}}
    models.leave(1, PLACE)
    assert models.find(PLACE, PROMPT).scores == {"2": {"0": 4}}
    for given in ((1, PLACE), (2, ("n", "default")), (2, PLACE, 7)):
        with pytest.raises(HttpError) as caught:
            models.leave(*given)
        assert caught.value.code == 404


async def test_indexed_models_dump_restores_an_equal_index(models: IndexedModels) -> None:
    full(models)
    again = IndexedModels()
    assert await again.load(models.dump()) == sum(len(one.events) for one in models.dump().values())
    assert again.find(PLACE, PROMPT) == models.find(PLACE, PROMPT)
    again.follow(3, 0, "tcp://localhost:9", ("big", "default"), 8)
    dumped = models.dump()
    dumped["big:default"] = dumped.pop("m:default")
    assert await again.load(dumped) == 0  # Blocks of another size are ignored.
    await again.close()


async def test_indexed_models_describe_listeners(models: IndexedModels) -> None:
    full(models)
    shown = models.workers()[0]
    assert (shown.instance_id, shown.source, shown.status, shown.block_size) == (1, "zmq", "pending", 4)
    assert shown.endpoints == {"0": "tcp://localhost:1", "1": "tcp://localhost:2"}
    assert shown.listeners["1"].status == "pending"
