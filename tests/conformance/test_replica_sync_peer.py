"""Routers of both implementations on the same workers: each counts the other's requests, and both compute the same
costs.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer

from dynamo.backend.worker import EngineWorker
from dynamo.core.config import load
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.kv_router.router import RouteRequest, WorkerFacts
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.engine import MockerEngine
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.tokens.hashing import packed_block_hashes

pytestmark = pytest.mark.conformance

ENDPOINT = EndpointId.parse("dynamo.backend.generate")
BLOCK = 16
TIMEOUT_S = 30.0
SELECTED = re.compile(r"Selected worker.*?worker_id=(\d+).*?logit=([0-9.]+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FLAGS: dict[str, tuple[tuple[str, ...], CostWeights]] = {
    "defaults": ((), CostWeights()),
    "other weights": (
        (
            *("--router-prefill-load-scale", "2.5"),
            *("--router-decode-active-request-weight", "1.5"),
            *("--router-kv-overlap-score-credit", "0.75"),
        ),
        CostWeights(prefill_load_scale=2.5, decode_active_request_weight=1.5, overlap_score_credit=0.75),
    ),
}


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


class RouterPair:
    """Released frontend, our router, and two workers of ours."""

    def __init__(self, stack: Stack, router: KvPushRouter, workers: list[int]) -> None:
        self.stack = stack
        self.router = router
        self.workers = workers
        self.rng = random.Random(1)
        self._names = iter(range(10_000))

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(10, 900) for _ in range(tokens)]

    def request_for(self, prompt: list[int], worker_id: int | None = None) -> RouteRequest:
        name = f"ours-{next(self._names)}"
        return RouteRequest(name, packed_block_hashes(prompt, BLOCK), len(prompt), worker_id=worker_id)

    async def book(self, worker: int, prompt: list[int], *, prefilled: bool = False) -> str:
        """Assign a request to a worker by our router; the released one only receives the notification."""
        route_request = self.request_for(prompt, self.workers[worker])
        await self.router.place(route_request, Progress())
        if prefilled:
            self.router.prefilled(route_request.request_id)
        return route_request.request_id

    async def complete(self, prompt: list[int], tokens: int = 1) -> dict[str, Any]:
        body = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
        }  # fmt: skip
        status, answer = await asyncio.to_thread(self.stack.send_request, "POST", "/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    def selected(self) -> list[tuple[int, float]]:
        """Return worker and cost of the released router's decisions, from its log."""
        text = COLOURS.sub("", (Path(self.stack.home) / "process-0.log").read_text())
        return [(int(worker), float(cost)) for worker, cost in SELECTED.findall(text)]

    async def both_choose(self, prompt: list[int]) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the decisions of both routers."""
        mine = self.router.look(self.request_for(prompt))
        before = len(self.selected())
        await self.complete(prompt)
        await until(lambda: len(self.selected()) > before, "they wrote no line")
        worker, cost = self.selected()[-1]
        return (mine.worker_id, round(mine.cost, 3)), (worker, round(cost, 3))

    async def agree(self, make: Callable[[], list[int]], what: str) -> None:
        """Wait until both routers choose the same worker at the same cost."""
        seen: Any = None
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(20):
                seen = await self.both_choose(make())
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


@pytest.fixture(params=FLAGS)
async def meeting(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RouterPair]:
    require_peer()
    variables = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    flags, weights = FLAGS[request.param]
    runtimes = [DistributedRuntime(), DistributedRuntime()]
    workers = []
    for runtime in runtimes:
        argv = ["--model-path", bench_model(), "--model-name", MODEL_NAME, "--speedup-ratio", "20"]
        config = load(MockerConfig, [*argv, "--block-size", str(BLOCK)], {})
        workers.append(EngineWorker(config, MockerEngine(config), runtime))
        await workers[-1].start()
    recipe = Recipe(
        name="router", frontend=theirs(peer_python()), engine=ours(), workers=0,
        frontend_flags=("--router-mode", "kv", "--router-replica-sync", *flags),
        variables={**variables, "DYN_LOG": "info"},
    )  # fmt: skip
    listening = DistributedRuntime()
    router = KvPushRouter(listening, ENDPOINT, RoutingConfig(block_size=BLOCK, weights=weights, replica_sync=True))
    router.set_facts([WorkerFacts(runtime.instance_id) for runtime in runtimes])
    await router.start()
    stack = Stack(recipe, bench_model())
    try:
        await asyncio.to_thread(stack.__enter__)
        yield RouterPair(stack, router, [runtime.instance_id for runtime in runtimes])
    finally:
        with contextlib.suppress(Exception):
            await router.close()
        await asyncio.to_thread(stack.close)
        for worker in workers:
            await worker.stop(drain_s=0.0)
        await listening.shutdown()


async def test_replicas_of_both_implementations_share_requests_and_compute_equal_costs(meeting: RouterPair) -> None:
    active = meeting.router.machine.active
    await until(lambda: sum(active.requests) == 0, "their first request never ended for us")
    await meeting.agree(lambda: meeting.prompt(100), "workers are still busy")

    table = [
        ("one prompt is computed", [(0, 333, False)]),
        ("one is decoded", [(1, 160, True)]),
        ("both have some", [(0, 90, False), (1, 700, False), (1, 64, True)]),
        ("much on one", [(0, 1000, True), (0, 1000, True), (0, 15, False)]),
    ]
    for what, bookings in table:
        names = [
            await meeting.book(worker, meeting.prompt(tokens), prefilled=done) for worker, tokens, done in bookings
        ]
        await meeting.agree(lambda: meeting.prompt(203), what)
        for name in names:
            meeting.router.release(name)
    await meeting.agree(lambda: meeting.prompt(50), "all of it was given back")

    common = meeting.prompt(160)
    names = [await meeting.book(worker, common, prefilled=True) for worker in (0, 1)]
    await meeting.agree(lambda: [*common, *meeting.prompt(40)], "prompts that begin alike share their blocks")
    for name in names:
        meeting.router.release(name)

    held = meeting.prompt(170)
    await meeting.complete(held)
    mine = meeting.router
    await until(lambda: mine.look(meeting.request_for(held)).device_blocks == 10, "we never heard of the blocks")
    await meeting.agree(lambda: [*held, *meeting.prompt(30)], "the holder of the prefix")

    going = asyncio.ensure_future(meeting.complete(meeting.prompt(160), 1500))
    await until(lambda: sum(active.requests) == 1 and sum(active.prefill_tokens) == 0, "we never heard of theirs")
    assert sum(active.blocks) == 10
    await going
    await until(lambda: sum(active.requests) == 0, "we never heard of its end")
    meeting.router.machine.validate()
