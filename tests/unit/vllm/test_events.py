"""Events: blocks, steps and health of vLLM's ranks."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.settle import turns
from tests.unit.vllm import scripted
from tests.unit.vllm.conftest import Host

from dynamo.backend.health import watch
from dynamo.backend.listeners import PassListener, reachable
from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.protocols.load import ForwardPass, ScheduledRequests
from dynamo.vllm.events import kv_listeners, publishes
from dynamo.vllm.steps import queued_requests, scheduled_requests


def source(**changes: Any) -> Any:
    given = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    return SimpleNamespace(**given | changes)


def frames(number: int, *events: dict[str, Any]) -> list[bytes]:
    return [b"", struct.pack(">q", number), msgspec.msgpack.encode([0.0, list(events), 0])]


STORED = {
    "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4,
    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 0,
}  # fmt: skip


def test_blocks_are_told_to_the_host_with_rank_and_tier() -> None:
    host = Host()
    (listener,) = kv_listeners({1: source()}, 4, 2, host)
    assert (listener.endpoint, listener.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 0}
    listener.events.process(frames(0, STORED))
    listener.events.process(frames(1, removed, {"type": "AllBlocksCleared"}))
    kinds = [(type(event), rank, tier) for event, rank, tier in host.events]
    assert kinds == [(Stored, 3, "device"), (Removed, 3, "host_pinned"), (Cleared, 3, "device")]


def test_only_zmq_publishers_can_be_heard() -> None:
    with pytest.raises(ConfigError, match="publisher"):
        kv_listeners({0: source(publisher="null")}, 4, 0, Host())


@pytest.mark.parametrize(
    ("asked", "caching", "found"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_who_publishes(asked: bool, caching: bool, found: bool) -> None:
    settings = scripted.settings(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=asked),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    assert publishes(settings) is found


def test_an_address_to_bind_is_one_to_connect_to() -> None:
    assert reachable("tcp://0.0.0.0:1") == reachable("tcp://*:1") == "tcp://127.0.0.1:1"
    assert reachable("tcp://10.0.0.3:1") == "tcp://10.0.0.3:1"


def test_steps_are_passed_on_and_what_is_none_is_left_out() -> None:
    host = Host()
    listener = PassListener("tcp://127.0.0.1:1", 1, host)
    step = ForwardPass(0.5, ScheduledRequests(num_decode_requests=2))
    listener.on_message([b"", struct.pack(">Q", 1), msgspec.msgpack.encode(step)])
    listener.on_message([b"", struct.pack(">Q", 3), b"\xc1"])
    listener.on_message([b"x"])
    assert host.passes == [(step, 1)]


def asked(prompt: int, computed: int, **more: Any) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed, **more)


def test_a_step_is_counted_from_the_schedulers_books() -> None:
    requests = {"a": asked(100, 64), "b": asked(10, 21), "c": asked(50, 50)}
    found = scheduled_requests({"a": 32, "b": 1, "c": 50, "gone": 3}, requests)
    assert (found.num_prefill_requests, found.sum_prefill_tokens, found.sum_prefill_kv_tokens) == (2, 82, 32)
    assert (found.num_decode_requests, found.sum_decode_kv_tokens) == (1, 21)
    assert found.var_prefill_length == 625.0
    waiting = [asked(10, 0, num_preemptions=0, num_tokens=10), asked(10, 0, num_preemptions=1, num_tokens=30)]
    queued = queued_requests(waiting)
    assert (queued.num_prefill_requests, queued.sum_prefill_tokens, queued.sum_decode_kv_tokens) == (1, 10, 30)


async def test_a_dead_engine_is_noticed_at_the_next_look() -> None:
    llm, clock, told = scripted.AsyncLLM(None), ManualClock(), []
    watching = asyncio.ensure_future(watch(llm.check_health, told.append, clock))
    for _ in range(3):
        await turns()
        clock.advance(2.0)
    await turns()
    assert told == []
    llm.is_dead = True
    while not watching.done():
        clock.advance(2.0)
        await turns()
    assert [type(one) for one in told] == [scripted.EngineDeadError]
