"""A scheduler in another process asks as if it were in this one; when nobody answers, nothing is found."""

import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import Identity, Tier
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import Outgoing
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.remote import ManagerServer, RemoteManager

PATIENCE_S = 20.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[BlockManager]:
    config = KvbmConfig(
        cpu_blocks=4, disk_blocks=16, disk_dir=str(tmp_path), disk_filter=False, onboard_timeout_s=PATIENCE_S
    )
    manager = BlockManager(config, BlockLayout((4,), "int64", "model"))
    manager.start()
    yield manager
    manager.close()
    assert manager.book.host.held() == 0


def block(key: int) -> Identity:
    return Identity(key, key + 1000, key - 1 if key > 1 else None)


def offload(manager: BlockManager, *keys: int) -> None:
    manager.offload([Outgoing(block(key), partial(np.copyto, src=key)) for key in keys])
    deadline = time.monotonic() + PATIENCE_S
    while any(key not in manager.book.lower[Tier.DISK] for key in keys) or manager.book.host.held():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_scheduler_elsewhere_finds_what_is_here(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    away = RemoteManager(engine_id)
    for first in (1, 3, 5):
        offload(manager, first, first + 1)
    assert away.find([1]) == []
    ticket = away.begin([block(1), block(2)])
    assert ticket is not None
    deadline = time.monotonic() + PATIENCE_S
    while not away.is_over(ticket):
        assert time.monotonic() < deadline
    slots = away.find([1, 2])
    assert [int(manager.array(slot)[0]) for slot in slots] == [1, 2]
    away.release(slots)
    away.end(ticket)
    away.end(ticket)
    assert away.begin([block(99)]) is None
    away.clear()
    assert away.find([1]) == []
    away.close()
    server.close()


def test_who_answers_no_more_has_nothing(manager: BlockManager) -> None:
    engine_id = secrets.token_hex(8)
    server = ManagerServer(manager, engine_id)
    away = RemoteManager(engine_id)
    assert away.find([1]) == []
    server.close()
    assert away.find([1]) == []
    assert away.begin([block(1)]) is None
    assert away.is_over(1)
    away.close()


def test_before_the_worker_is_there_nobody_listens() -> None:
    with pytest.raises(OSError, match="refused"):
        RemoteManager(secrets.token_hex(8))
