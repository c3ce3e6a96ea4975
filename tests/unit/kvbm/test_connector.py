"""Connector of an engine with its own blocks: evicted blocks are found again, computed ones are saved once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.settle import until_blocking

from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.connector import Step, Tracker
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import Outgoing
from dynamo.kvbm.physical.layout import BlockLayout

SIZE = 4
LAYOUT = BlockLayout((8,), "int64", "model")
PATIENCE_S = 20.0


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int] = field(default_factory=list)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., BlockManager]]:
    made: list[BlockManager] = []

    def begin(**options: Any) -> BlockManager:
        given = {"cpu_blocks": 32, "disk_dir": str(tmp_path), "disk_filter": False, "onboard_timeout_s": PATIENCE_S}
        manager = BlockManager(KvbmConfig(**(given | options)), LAYOUT)
        made.append(manager)
        manager.start()
        return manager

    yield begin
    for manager in made:
        manager.close()
        manager.validate()
        assert manager.book.host.held() == 0, "a block is held without a live holder"


class Engine:
    """The device: a block's content is the tokens of its prefix."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.tracker = Tracker(SIZE)
        self.device: dict[int, Any] = {}

    def match(self, request: Request, computed: int = 0) -> int:
        found: list[int | None] = []

        def is_found() -> bool:
            found.append(self.tracker.match(self.manager, request, computed))
            return found[-1] is not None

        until_blocking(is_found, "the match never came")
        return found[-1] or 0

    def copy(self, step: Step) -> None:
        for slot, block in step.loads:
            self.device[block] = self.manager.array(slot).copy()
        self.manager.release([slot for slot, _ in step.loads])
        for saves in step.saves:
            outgoing = [
                Outgoing(save.identity, partial(np.copyto, src=save.identity.tokens_hash % 1000)) for save in saves
            ]
            self.manager.offload(outgoing)

    def compute(self, request: Request, blocks: list[int]) -> int:
        """Compute the whole prompt in one step; return the number of loaded tokens."""
        found = self.match(request)
        self.tracker.allocated(self.manager, request, blocks, found)
        name = request.request_id
        self.copy(self.tracker.plan({name: len(request.all_token_ids) - found}, {name: found}, {}))
        return found


def test_connector_loads_computed_blocks_for_the_next_request(make: Callable[..., BlockManager]) -> None:
    engine = Engine(make())
    assert engine.compute(Request("a", list(range(10))), [5, 6, 7]) == 0
    assert engine.compute(Request("b", list(range(10))), [1, 2, 3]) == 8
    assert set(engine.device) == {1, 2}
    assert len(engine.manager.book.host) == 2
    for name in "ab":
        engine.tracker.finished(engine.manager, name)
    assert len(engine.tracker) == 0


def test_connector_leaves_one_token_to_compute(make: Callable[..., BlockManager]) -> None:
    engine = Engine(make())
    engine.compute(Request("a", list(range(8))), [0, 1])
    assert engine.match(Request("b", list(range(8)))) == 4
    engine.tracker.finished(engine.manager, "b")


def test_connector_does_not_load_blocks_cached_by_the_engine(make: Callable[..., BlockManager]) -> None:
    engine = Engine(make())
    engine.compute(Request("a", list(range(13))), [0, 1, 2, 3])
    request = Request("b", list(range(13)))
    assert engine.match(request, computed=4) == 8
    engine.tracker.allocated(engine.manager, request, [9, 8, 7, 6], 8)
    step = engine.tracker.plan({"b": 1}, {"b": 12}, {})
    assert [block for _, block in step.loads] == [8, 7]
    assert step.saves == []
    engine.copy(step)
    engine.tracker.finished(engine.manager, "b")


def test_connector_loads_blocks_from_disk(make: Callable[..., BlockManager]) -> None:
    engine = Engine(make(cpu_blocks=4, disk_blocks=32))
    for at in range(4):
        engine.compute(Request(str(at), [at] * 9), [0, 1, 2])
        until_blocking(lambda: not engine.manager.book.host.held(), "the blocks were not written to disk")
    assert engine.compute(Request("again", [0] * 9), [3, 4, 5]) == 8
    engine.tracker.finished(engine.manager, "again")


def test_connector_saves_blocks_completed_by_output_tokens(
    make: Callable[..., BlockManager],
) -> None:
    engine, request = Engine(make()), Request("a", list(range(6)))
    engine.compute(request, [0, 1])
    assert len(engine.manager.book.host) == 1
    engine.copy(engine.tracker.plan({"a": 2}, {"a": 6}, {}))
    assert len(engine.manager.book.host) == 1
    request.all_token_ids += [7, 8, 9]
    engine.copy(engine.tracker.plan({"a": 1}, {"a": 8}, {"a": [2]}))
    assert len(engine.manager.book.host) == 2
    engine.tracker.finished(engine.manager, "a")


def test_connector_releases_blocks_of_a_request_that_never_started(make: Callable[..., BlockManager]) -> None:
    engine = Engine(make())
    engine.compute(Request("a", list(range(10))), [0, 1, 2])
    request = Request("b", list(range(10)))
    for _ in range(3):
        assert engine.match(request) == 8
    engine.tracker.allocated(engine.manager, request, [0, 1, 2], 0)
    assert engine.manager.book.host.held() == 0
    engine.match(request)
    engine.tracker.finished(engine.manager, "b")
    engine.tracker.finished(engine.manager, "unknown")


def test_connector_handles_new_blocks_of_a_preempted_request(make: Callable[..., BlockManager]) -> None:
    engine, request = Engine(make()), Request("a", list(range(9)))
    engine.compute(request, [0, 1, 2])
    request.all_token_ids += [1, 2, 3]
    assert engine.match(request) == 8
    engine.tracker.allocated(engine.manager, request, [7, 8, 9], 8)
    step = engine.tracker.plan({"a": 4}, {"a": 8}, {"a": [7, 8, 9]}, frozenset({"a"}))
    assert [block for _, block in step.loads] == [7, 8]
    assert [save.block for saves in step.saves for save in saves] == [9]
    engine.copy(step)
    engine.tracker.finished(engine.manager, "a")
