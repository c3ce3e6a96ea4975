"""Threads and data: offloaded blocks are loaded unchanged, and a failing tier loses only its blocks."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.settle import until_blocking

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.manager import PAUSE_S, BlockManager
from dynamo.kvbm.metrics import show
from dynamo.kvbm.orders import LoadTicket, Outgoing
from dynamo.kvbm.physical import disk as disk_module
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.physical.objects import ObjectFailure

LAYOUT = BlockLayout((2, 300), "float32", "model")
PATIENCE_S = 20.0
Make = Callable[..., BlockManager]


class Store:
    """An object store in memory that fails or hangs on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_failing = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _check(self) -> None:
        self.may_answer.wait(PATIENCE_S)
        if self.is_failing:
            raise ObjectFailure("the store is away")

    def put(self, name: str, parts: tuple[bytes, memoryview], timeout_s: float) -> None:
        self._check()
        self.objects[name] = b"".join(parts)

    def get(self, name: str, size: int, timeout_s: float) -> bytes | None:
        self._check()
        return self.objects.get(name)

    def has(self, name: str, timeout_s: float) -> bool:
        return name in self.objects

    def close(self) -> None: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[BlockManager] = []

    def begin(
        *, store: Store | None = None, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> BlockManager:
        given = {"disk_dir": str(tmp_path), "disk_filter": False, "onboard_timeout_s": PATIENCE_S}
        manager = BlockManager(KvbmConfig(**(given | options)), LAYOUT, store=store, clock=clock)
        made.append(manager)
        manager.start()
        return manager

    yield begin
    for manager in made:
        manager.close()
        manager.validate()
        assert manager.book.host.held() == 0, "a host block is held without a live holder"


def block(key: int) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None)


def offload(manager: BlockManager, *keys: int) -> int:
    return manager.offload([Outgoing(block(key), partial(np.copyto, src=np.float32(key))) for key in keys])


def over(manager: BlockManager, ticket: LoadTicket | None) -> None:
    assert ticket is not None
    until_blocking(lambda: manager.is_over(ticket))


def check(manager: BlockManager, *keys: int) -> None:
    """The host has these, as they were."""
    slots = manager.find(keys)
    assert len(slots) == len(keys)
    for slot, key in zip(slots, keys, strict=True):
        np.testing.assert_array_equal(manager.array(slot), np.full(LAYOUT.shape, key, np.float32))
    manager.release(slots)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.OBJECT])
def test_block_manager_returns_offloaded_blocks_unchanged(make: Make, tier: Tier) -> None:
    options: dict[str, Any] = {"disk_blocks": 16} if tier is Tier.DISK else {"object_enabled": True, "store": Store()}
    manager = make(cpu_blocks=8, **options)
    for first in (1, 5, 9):
        assert offload(manager, *range(first, first + 4)) == 4
        until_blocking(lambda last=first + 3: last in manager.book.lower[tier])
    assert manager.find([1]) == []
    ticket = manager.begin([block(key) for key in range(1, 5)])
    over(manager, ticket)
    check(manager, 1, 2, 3, 4)
    assert ticket is not None
    manager.end(ticket)
    manager.end(ticket)
    assert manager.book.counts.onboarded[tier] == 4


def test_block_manager_starts_no_onboarding_without_matching_blocks(make: Make) -> None:
    manager = make(cpu_blocks=8, disk_blocks=8)
    offload(manager, 1)
    until_blocking(lambda: 1 in manager.book.lower[Tier.DISK])
    assert manager.begin([block(1)]) is None
    assert manager.begin([block(7)]) is None
    assert not manager.reaches([7])


def test_block_manager_finds_blocks_of_another_process_in_the_store(make: Make) -> None:
    store = Store()
    first = make(cpu_blocks=8, object_enabled=True, store=store)
    offload(first, 1, 2)
    until_blocking(lambda: len(store.objects) == 2)
    second = make(cpu_blocks=8, object_enabled=True, store=store)
    ticket = second.begin([block(1), block(2), block(3)])
    over(second, ticket)
    assert ticket is not None
    check(second, 1, 2)
    second.end(ticket)


def test_block_manager_onboarding_times_out(make: Make) -> None:
    store, now = Store(), [0.0]
    manager = make(cpu_blocks=8, object_enabled=True, store=store, clock=lambda: now[0])
    store.may_answer.clear()
    ticket = manager.begin([block(1)])
    assert ticket is not None
    assert not manager.is_over(ticket)
    now[0] = PATIENCE_S + 1
    assert manager.is_over(ticket)
    manager.end(ticket)
    assert manager.traffic.tickets_late == 1
    store.may_answer.set()
    until_blocking(lambda: ticket.is_done)
    until_blocking(lambda: manager.book.host.held() == 0)


def test_block_manager_backs_off_from_an_unreachable_store(make: Make) -> None:
    store, now = Store(), [0.0]
    manager = make(cpu_blocks=8, object_enabled=True, store=store, clock=lambda: now[0])
    store.is_failing = True
    offload(manager, 1)
    until_blocking(lambda: manager.traffic.object_write_failures == 1)
    until_blocking(lambda: manager.book.host.held() == 0)
    offload(manager, 2)
    assert manager.book.waiting(Tier.OBJECT) == 0
    assert manager.status()["tiers"]["object"]["paused"]
    store.is_failing = False
    now[0] += PAUSE_S
    offload(manager, 3)
    until_blocking(lambda: len(store.objects) == 1)


def test_block_manager_full_disk_loses_only_its_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    manager = make(cpu_blocks=8, disk_blocks=8, clock=lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "pwritev", lambda *_: 100)
        offload(manager, 1)
        until_blocking(lambda: manager.traffic.disk_write_failures == 1)
        until_blocking(lambda: manager.book.host.held() == 0)
    assert "writes paused" in caplog.text
    check(manager, 1)
    now[0] += PAUSE_S
    offload(manager, 2)
    until_blocking(lambda: 2 in manager.book.lower[Tier.DISK])


def test_block_manager_disk_tier_works_without_host_tier(make: Make) -> None:
    manager = make(disk_blocks=8)
    offload(manager, 1, 2)
    until_blocking(lambda: 2 in manager.book.lower[Tier.DISK] and manager.book.host.held() == 0)
    assert manager.find([1]) == []
    ticket = manager.begin([block(1), block(2)])
    over(manager, ticket)
    check(manager, 1, 2)
    assert ticket is not None
    manager.end(ticket)
    assert {tier for tier, _ in manager.take_changes()} == {Tier.DISK}


def test_block_manager_flushes_its_queue_at_close(make: Make) -> None:
    manager = make(cpu_blocks=16, disk_blocks=16)
    offload(manager, *range(1, 9))
    manager.close()
    manager.close()
    assert len(manager.book.lower[Tier.DISK]) == 8
    again = make(cpu_blocks=16, disk_blocks=16)
    ticket = again.begin([block(key) for key in range(1, 9)])
    over(again, ticket)
    check(again, *range(1, 9))
    assert ticket is not None
    again.end(ticket)


def test_block_manager_metrics_have_the_names_of_released_dynamo(make: Make) -> None:
    manager = make(cpu_blocks=8, disk_blocks=8)
    registry = MetricsRegistry()
    show(registry, manager, block_tokens=16)
    offload(manager, 1, 2)
    check(manager, 1, 2)
    until_blocking(lambda: 2 in manager.book.lower[Tier.DISK])
    lines = registry.render().splitlines()
    for line in (
        "kvbm_matched_tokens 32",
        "kvbm_offload_blocks_d2h 2",
        "kvbm_offload_blocks_h2d 2",
        "kvbm_offload_blocks_d2d 0",
        "kvbm_onboard_blocks_h2d 2",
        "kvbm_host_cache_hit_rate 1",
        "kvbm_object_write_failures 0",
        'kvbm_registrations_total{pool="host"} 2',
        'kvbm_inactive_pool_size{pool="host"} 2',
    ):
        assert line in lines


def test_block_manager_never_finds_blocks_of_other_weights(make: Make, tmp_path: Path) -> None:
    store = Store()
    manager = make(store=store, cpu_blocks=8, disk_blocks=16, object_enabled=True)
    offload(manager, 1, 2, 3)
    until_blocking(lambda: 3 in manager.book.lower[Tier.DISK] and 3 in manager.book.lower[Tier.OBJECT])
    files = set(tmp_path.iterdir())
    manager.reidentify("other weights")
    assert not files & set(tmp_path.iterdir())
    assert manager.find([1]) == []
    ticket = manager.begin([block(key) for key in (1, 2, 3)])
    over(manager, ticket)
    assert manager.find([1]) == []
    assert ticket is not None
    manager.end(ticket)
    assert manager.offload([Outgoing(block(1), partial(np.copyto, src=np.float32(9)))]) == 1
    until_blocking(lambda: 1 in manager.book.lower[Tier.DISK] and len(store.objects) == 4)
    (slot,) = manager.find([1])
    np.testing.assert_array_equal(manager.array(slot), np.full(LAYOUT.shape, 9, np.float32))
    manager.release([slot])
    manager.reidentify(LAYOUT.model)  # Objects of the first weights are still there.
    ticket = manager.begin([block(key) for key in (1, 2, 3)])
    over(manager, ticket)
    check(manager, 1, 2, 3)
    assert ticket is not None
    manager.end(ticket)


def test_block_manager_keeps_blocks_of_equal_weights(make: Make) -> None:
    manager = make(cpu_blocks=8)
    offload(manager, 1, 2)
    manager.reidentify(LAYOUT.model)
    check(manager, 1, 2)


def test_block_manager_weight_change_waits_for_running_copies(make: Make) -> None:
    store = Store()
    store.may_answer.clear()
    manager = make(store=store, cpu_blocks=8, object_enabled=True)
    offload(manager, 1)
    until_blocking(lambda: manager._working > 0)
    exchange = threading.Thread(target=manager.reidentify, args=("other weights",))
    exchange.start()
    until_blocking(lambda: manager._is_exchanging)
    assert manager.begin([block(1)]) is None
    store.may_answer.set()
    exchange.join(PATIENCE_S)
    assert not exchange.is_alive()
    (name,) = store.objects
    assert name.startswith(f"{LAYOUT.fingerprint:016x}/")
    assert 1 not in manager.book.lower[Tier.OBJECT]
    manager.offload([Outgoing(block(1), partial(np.copyto, src=np.float32(9)))])
    until_blocking(lambda: len(store.objects) == 2)


def test_block_manager_weight_change_ends_waiting_onboarding(make: Make) -> None:
    store = Store()
    store.may_answer.clear()
    manager = make(store=store, cpu_blocks=8, object_enabled=True)
    tickets = [manager.begin([block(key) for key in (first, first + 1)]) for first in (1, 3, 5)]
    until_blocking(lambda: manager._working == 2)
    exchange = threading.Thread(target=manager.reidentify, args=("other weights",))
    exchange.start()
    for ticket in tickets:
        over(manager, ticket)
    store.may_answer.set()
    exchange.join(PATIENCE_S)
    for ticket in tickets:
        assert ticket is not None
        manager.end(ticket)
    until_blocking(lambda: manager.book.host.held() == 0)


def test_block_manager_drops_a_tier_with_unending_copies(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.may_answer.clear()
    manager = make(store=store, cpu_blocks=8, object_enabled=True)
    offload(manager, 1)
    until_blocking(lambda: manager._working > 0)
    monkeypatch.setattr("dynamo.kvbm.manager.QUIET_S", 0.01)
    with pytest.raises(ConfigError, match="the former model"):
        manager.reidentify("other weights")
    assert manager.begin([block(1)]) is None
    assert manager.find([1]) == []
    store.may_answer.set()


def test_block_manager_republishes_readable_blocks_after_their_parents(make: Make) -> None:
    manager = make(cpu_blocks=2, disk_blocks=16)
    for key in range(1, 7):
        offload(manager, key)
        until_blocking(lambda key=key: key in manager.book.lower[Tier.DISK] and not manager.book.host.held())  # type: ignore[misc]
    manager.take_changes()
    reported: set[int] = set()
    pairs: list[tuple[Tier, int]] = []
    for tier, changes in manager.take_all():
        for change in changes:
            assert change.is_stored
            assert change.identity.parent_hash in (None, *reported)
            reported.add(change.identity.sequence_hash)
            pairs.append((tier, change.identity.sequence_hash))
    assert reported == set(range(1, 7))
    assert len(pairs) == len(set(pairs)) == len(manager.book.host) + 6
    assert manager.take_changes() == []
