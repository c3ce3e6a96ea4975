"""A worker that does one part of each request says so on its card, and waits for who fetches from it."""

import asyncio
import json
from typing import Any

import pytest

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.drain import State, joint
from dynamo.backend.engine import EngineConfig
from dynamo.backend.sample import EchoEngine
from dynamo.backend.worker import Worker, canary_payload, make_card
from dynamo.core.clock import ManualClock
from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.engine import BYPASS_REMOTE_PREFILL
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane


def options(*argv: str) -> DisaggregatedOptions:
    return load(DisaggregatedOptions, argv, {})


def config(model_dir: str, **more: Any) -> EngineConfig:
    return EngineConfig(
        model_path=model_dir,
        served_model_name="m",
        context_length=64,
        kv_cache_block_size=16,
        total_kv_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        **more,
    )


def test_a_prefill_worker_s_card_is_as_upstream_writes_it(model_dir: str) -> None:
    made = make_card(options("--disaggregation-mode=prefill"), config(model_dir, bootstrap_host="h", bootstrap_port=7))
    assert (made.worker_type, made.needs, made.model_type) == ("prefill", [["decode"]], "")
    endpoint = made.runtime_config.disaggregated_endpoint
    assert endpoint
    assert (endpoint.bootstrap_host, endpoint.bootstrap_port) == ("h", 7)
    assert made.runtime_config.enable_local_indexer


def test_a_decode_worker_s_card_is_as_upstream_writes_it(model_dir: str) -> None:
    made = make_card(options("--is-decode-worker"), config(model_dir))
    assert (made.worker_type, made.needs, made.model_type) == ("decode", [["prefill"]], "Chat | Completions")
    assert not made.runtime_config.enable_local_indexer
    assert made.runtime_config.kv_event_publishing_enabled is False
    assert not made.runtime_config.disaggregated_endpoint


@pytest.mark.parametrize(
    ("argv", "endpoint"),
    [
        ((), "dynamo.backend.generate"),
        (("--disaggregation-mode=prefill", "--namespace=n"), "n.prefill.generate"),
        (("--is-decode-worker",), "dynamo.backend.generate"),
        (("--disaggregation-mode=encode",), "dynamo.encode.generate"),
        (("--disaggregation-mode=prefill", "--endpoint=dyn://a.b.c"), "a.b.c"),
    ],
)
def test_each_role_has_a_component_of_its_own(argv: tuple[str, ...], endpoint: str) -> None:
    assert str(options(*argv).endpoint_id()).endswith(endpoint)


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-mode"):
        options("--disaggregation-mode=agg", "--is-prefill-worker")
    with pytest.raises(ConfigError, match="agg"):
        options("--disaggregation-mode=both")


def test_the_canary_of_a_decode_worker_asks_for_the_prompt_too(model_dir: str) -> None:
    role = options("--is-decode-worker").role
    assert canary_payload(config(model_dir), role)["annotations"] == [BYPASS_REMOTE_PREFILL]
    assert canary_payload(config(model_dir))["annotations"] == []


class Lender(EchoEngine):
    """Lends its blocks until it is told that they were fetched."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.polls = 0
        self.lent: bool | None = True
        self.stopped = False

    def is_quiescent(self) -> bool | None:
        self.polls += 1
        return None if self.lent is None else not self.lent

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()


async def stopping(engine: Lender, *argv: str) -> tuple[asyncio.Task[None], ManualClock]:
    clock = ManualClock()
    runtime = DistributedRuntime(
        None,
        MemoryDiscovery(MemoryStore()),
        lambda dispatcher, _: MemoryPlane(dispatcher, MemoryHub()),
        event_plane=lambda _: MemoryEventPlane(MemoryBus()),
    )
    worker = Worker(options(*argv), engine, runtime, clock=clock)
    await worker.start()
    records = await runtime.discovery.snapshot(MODEL_CARDS)
    assert [json.loads(value)["card_json"]["worker_type"] for value in records.values()] == [
        worker.options.role.worker_type
    ]
    return asyncio.get_running_loop().create_task(worker.stop()), clock


async def until(engine: Lender, clock: ManualClock, polls: int) -> None:
    while engine.polls < polls:
        clock.advance(0.1)
        await asyncio.sleep(0)


async def test_a_prefill_worker_keeps_its_blocks_until_they_were_fetched(model_dir: str) -> None:
    engine = Lender(model_dir)
    ending, clock = await stopping(engine, "--disaggregation-mode=prefill")
    await until(engine, clock, 3)
    assert not engine.stopped
    engine.lent = False
    await until(engine, clock, 4)
    await ending
    assert engine.stopped


@pytest.mark.parametrize("lent", [True, None])
async def test_it_does_not_wait_for_ever(model_dir: str, monkeypatch: pytest.MonkeyPatch, lent: bool | None) -> None:
    monkeypatch.setenv("DYN_PREFILL_DRAIN_TIMEOUT_S", "0.3")
    engine = Lender(model_dir)
    engine.lent = lent
    ending, clock = await stopping(engine, "--disaggregation-mode=prefill")
    while not ending.done():
        clock.advance(0.1)
        await asyncio.sleep(0)
    assert engine.stopped


async def test_other_workers_do_not_wait_for_it(model_dir: str) -> None:
    engine = Lender(model_dir)
    ending, _ = await stopping(engine, "--is-decode-worker")
    await ending
    assert engine.polls == 0


@pytest.mark.parametrize(
    ("role", "lent", "said", "is_safe"),
    [
        ("prefill", True, "pending", False),
        ("prefill", False, "complete", True),
        ("prefill", None, "unknown", True),
        ("decode", True, "not_applicable", True),
    ],
)
async def test_its_status_says_whether_its_blocks_are_still_fetched(
    model_dir: str, role: str, lent: bool | None, said: str, is_safe: bool
) -> None:
    engine, clock = Lender(model_dir), ManualClock()
    engine.lent = lent
    runtime = DistributedRuntime(
        None,
        MemoryDiscovery(MemoryStore()),
        lambda dispatcher, _: MemoryPlane(dispatcher, MemoryHub()),
        event_plane=lambda _: MemoryEventPlane(MemoryBus()),
    )
    worker = Worker(options(f"--disaggregation-mode={role}"), engine, runtime, clock=clock)
    await worker.start()
    await worker.service.drain()
    while worker.service.state is not State.DRAINED:
        clock.advance(1.0)
        await asyncio.sleep(0)
    status = worker.service.status()
    assert (status.kv_transfers, status.safe_to_delete) == (said, is_safe)
    assert joint([status]).kv_transfers == said
    engine.lent = False
    await worker.stop()
