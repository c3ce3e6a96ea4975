"""A released frontend and our router on the same workers: sessions, keyed hashes, and a cache that all workers share."""

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import struct
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer

from dynamo.backend.engine import EngineConfig
from dynamo.backend.worker import EngineWorker
from dynamo.core.config import load
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.hicache import RUNTIME_KEY, page_names
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.engine import MockerEngine
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.conformance

ENDPOINT = EndpointId.parse("dynamo.backend.generate")
BLOCK = 16
TIMEOUT_S = 30.0
SELECTED = re.compile(r"Selected worker.*?worker_id=(\d+).*?logit=([0-9.]+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


class StoringEngine(MockerEngine):
    """Simulated engine that publishes the address of the shared cache of all engines."""

    layout: dict[str, Any] | None = None

    async def start(self, *given: Any) -> EngineConfig:
        config = await super().start(*given)
        if self.layout is None:
            return config
        return dataclasses.replace(config, runtime_data={**config.runtime_data, RUNTIME_KEY: self.layout})


class RouterPair:
    """Released frontend, our router, and two workers of ours."""

    def __init__(self, stack: Stack, router: KvPushRouter, workers: list[int], store: Any) -> None:
        self.stack = stack
        self.router = router
        self.workers = workers
        self.store = store
        self.rng = random.Random(1)
        self._names = iter(range(10_000))

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(10, 900) for _ in range(tokens)]

    def request(self, prompt: list[int], session: str | None = None) -> PreprocessedRequest:
        context = None if session is None else {"session_id": session}
        return PreprocessedRequest(model=MODEL_NAME, token_ids=prompt, agent_context=context)

    async def place(self, prompt: list[int], worker: int | None = None, session: str | None = None) -> tuple[str, int]:
        """Assign a request to a worker by our router; the released one receives the request's name and the worker."""
        name = f"ours-{next(self._names)}"
        route_request = self.router.to_route_request(self.request(prompt, session), name)
        route_request.worker_id = None if worker is None else self.workers[worker]
        decision = await self.router.place(route_request, Progress())
        return name, decision.worker_id

    async def complete(self, prompt: list[int], session: str | None = None) -> int:
        """Return the worker that the released router chooses."""
        body = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id"]},
        }  # fmt: skip
        headers = {"content-type": "application/json"} | ({} if session is None else {"x-dynamo-session-id": session})
        request = urllib.request.Request(
            f"http://{HOST}:{self.stack.port}/v1/completions", json.dumps(body).encode(), headers, method="POST"
        )
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=TIMEOUT_S).read())
        return int(json.loads(answer)["nvext"]["worker_id"]["decode_worker_id"])

    async def chosen(self, prompt: list[int]) -> tuple[int, float]:
        """Return the worker that the released router chooses, and the cost that it logs."""
        before = len(self.selected())
        await self.complete(prompt)
        await until(lambda: len(self.selected()) > before, "they wrote no line")
        worker, cost = self.selected()[-1]
        return worker, round(cost, 3)

    def selected(self) -> list[tuple[int, float]]:
        """Return worker and cost of the released router's decisions, from its log."""
        text = COLOURS.sub("", (Path(self.stack.home) / "process-0.log").read_text())
        return [(int(worker), float(cost)) for worker, cost in SELECTED.findall(text)]

    async def agree(self, make: Callable[[], list[int]], what: str) -> None:
        """Wait until both routers choose the same worker at the same cost."""
        seen: Any = None
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(20):
                prompt = make()
                mine = self.router.look(self.router.to_route_request(self.request(prompt), "look"))
                seen = (mine.worker_id, round(mine.cost, 3)), await self.chosen(prompt)
                if seen[0] == seen[1]:
                    return
                await asyncio.sleep(0.3)
        raise AssertionError(f"{what}: ours {seen[0]}, theirs {seen[1]}")


async def until(is_true: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_true():  # noqa: ASYNC110 - another process does it
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


@contextlib.asynccontextmanager
async def met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, stores: bool = False, **config: Any
) -> AsyncIterator[RouterPair]:
    """Start frontend, router and workers with these flags and this configuration."""
    require_peer()
    variables = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    context = zmq.asyncio.Context()
    store = context.socket(zmq.PUB)
    port = store.bind_to_random_port(f"tcp://{HOST}")
    layout = {
        "backend": "mooncake", "page_size": BLOCK, "tp_size": 1, "pp_size": 1, "is_mla_model": False,
        "is_eagle": False, "tp_lcm_size": None, "should_split_heads": False, "extra_backend_tag": None,
        "key_prefix": None, "kv_events_endpoint": f"tcp://{HOST}:{port}",
    }  # fmt: skip
    runtimes = [DistributedRuntime(), DistributedRuntime()]
    workers = []
    for runtime in runtimes:
        argv = ["--model-path", bench_model(), "--model-name", MODEL_NAME, "--speedup-ratio", "20"]
        mocker = load(MockerConfig, [*argv, "--block-size", str(BLOCK)], {})
        engine = StoringEngine(mocker)
        engine.layout = layout if stores else None
        workers.append(EngineWorker(mocker, engine, runtime))
        await workers[-1].start()
    recipe = Recipe(
        name="router", frontend=theirs(peer_python()), engine=ours(), workers=0,
        frontend_flags=("--router-mode", "kv", *flags),
        variables={**variables, "DYN_LOG": "info"},
    )  # fmt: skip
    listening = DistributedRuntime()
    router = KvPushRouter(listening, ENDPOINT, RoutingConfig(block_size=BLOCK, **config))
    router.set_workers({one.runtime.instance_id: one._card for one in workers if one._card is not None})
    await router.start()
    stack = Stack(recipe, bench_model())
    try:
        await asyncio.to_thread(stack.__enter__)
        yield RouterPair(stack, router, [runtime.instance_id for runtime in runtimes], store)
    finally:
        with contextlib.suppress(Exception):
            await router.close()
        await asyncio.to_thread(stack.close)
        for worker in workers:
            await worker.stop(drain_s=0.0)
        await listening.shutdown()
        store.close(0)
        context.term()


async def test_session_stays_on_one_worker_in_both_implementations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--router-session-affinity-ttl-secs", "600")
    async with met(tmp_path, monkeypatch, *flags, affinity_ttl_s=600.0) as meeting:
        affinity = meeting.router.machine.affinity
        assert affinity is not None
        for number in range(4):
            theirs_first = await meeting.complete(meeting.prompt(40), f"theirs-{number}")
            await until(lambda: affinity.find(f"theirs-{number}", 0.0) is not None, "we never heard of their session")  # noqa: B023
            name, mine = await meeting.place(meeting.prompt(40), session=f"theirs-{number}")
            assert mine == theirs_first
            meeting.router.release(name)

        for worker in (0, 1, 1, 0):
            session = f"ours-{meeting.rng.random()}"
            busy, _ = await meeting.place(meeting.prompt(4000), worker, session)
            await asyncio.sleep(0.5)  # A binding that they have not received yet has no effect.
            assert await meeting.complete(meeting.prompt(40), session) == meeting.workers[worker]
            meeting.router.release(busy)


async def test_keyed_hashes_are_shared_by_both_implementations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    flags = (
        *("--router-replica-sync", "--router-tracking-hash", "keyed-xxh3-v1"),
        *("--router-tracking-key-file", str(key), "--router-tracking-key-id", "2026-01"),
    )
    keyed: dict[str, Any] = {
        "replica_sync": True, "tracking_hash": "keyed-xxh3-v1", "tracking_key_file": str(key),
        "tracking_key_id": "2026-01",
    }  # fmt: skip
    async with met(tmp_path, monkeypatch, *flags, **keyed) as meeting:
        await meeting.agree(lambda: meeting.prompt(100), "workers are still busy")
        common = meeting.prompt(160)
        names = []
        for worker in (0, 1):
            name, _ = await meeting.place(common, worker)
            meeting.router.prefilled(name)
            names.append(name)
        await meeting.agree(lambda: [*common, *meeting.prompt(40)], "prompts that begin alike share their blocks")
        for name in names:
            meeting.router.release(name)


async def test_shared_cache_has_the_same_weight_in_both_implementations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--router-replica-sync", "--shared-cache-type", "hicache", "--shared-cache-multiplier", "0.5")
    async with met(tmp_path, monkeypatch, *flags, stores=True, shared_cache="hicache", replica_sync=True) as meeting:
        shared = meeting.router.shared
        assert shared is not None
        await meeting.agree(lambda: meeting.prompt(100), "workers are still busy")
        prompts = [meeting.prompt(160) for _ in range(20)]
        keys = [f"{name.hex()}_0_{part}" for one in prompts for name in page_names(one, BLOCK)[:8] for part in "kv"]
        events = [{"event_type": "stored", "object_key": key, "tenant_id": "default"} for key in keys]
        for number in range(20):
            payload = msgspec.msgpack.encode((1_700_000_000_000, events, 0))
            await meeting.store.send_multipart([b"", struct.pack(">Q", number), payload])
            await asyncio.sleep(0.1)
        await until(lambda: all(shared.find(one) == ((0, 8),) for one in prompts), "we never heard of the store")
        mine = meeting.router.look(meeting.router.to_route_request(meeting.request(prompts[0]), "look"))
        assert mine.cost == pytest.approx(160 / BLOCK - 0.5 * 8 + 10)
        await meeting.agree(iter(prompts).__next__, "eight of ten blocks are in the cache of all")
