"""Sessions keep their workers without a KV router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.relays import RelayCluster, open_relays

from dynamo.core.errors import CannotConnect
from dynamo.http.routes import native as routes_native
from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.model_card.types import ModelType, WorkerType
from dynamo.routing.settings import KvRouterOptions
from dynamo.runtime.distributed import DistributedRuntime

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FIRST, SECOND = {"x-dynamo-session-id": "one"}, {"x-dynamo-session-id": "two"}


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SGLANG_ENABLE_GENERATE", "1")


def routes(table: RouteTable, context: RouteContext) -> None:
    for group in (routes_native, routes_openai):
        group.add(table, context)


class Workers:
    """A frontend without a KV router, and the workers of its requests."""

    def __init__(self, relays: RelayCluster) -> None:
        self.relays = relays
        self.runtimes: list[DistributedRuntime] = []
        self.received_requests: list[tuple[str, int]] = []

    async def serve(self, directory: Path, role: WorkerType = WorkerType.Aggregated) -> int:
        worker = self.relays.runtime()
        self.runtimes.append(worker)
        is_prefill = role == WorkerType.Prefill

        async def handler(_: Any) -> AsyncIterator[Any]:
            self.received_requests.append(("prefill" if is_prefill else "answer", worker.instance_id))
            where = {"disaggregated_params": {"at": 1}} if is_prefill else {}
            yield {"token_ids": [5], "index": 0, "finish_reason": "length", **where}

        kind = ModelType.Prefill if is_prefill else ModelType.Chat
        data = {"sglang_generate": "true"}
        await self.relays.serve("m", kind, handler, directory=str(directory), data=data, worker=worker, role=role)
        return worker.instance_id

    async def turn(self, headers: dict[str, str], path: str = "/v1/chat/completions", body: Any = CHAT) -> list[int]:
        """The workers of a request, the prefill worker first."""
        self.received_requests.clear()
        answer = await self.relays.send_request(path, body, headers)
        assert answer.status == 200, answer.body
        return [worker for _, worker in self.received_requests]


@asynccontextmanager
async def workers(mode: str, **options: Any) -> AsyncIterator[Workers]:
    sticky = KvRouterOptions(use_kv_events=False, session_affinity_ttl_secs=60, **options)
    async with open_relays(routes, mode, kv_options=sticky) as relays:
        stack = Workers(relays)
        yield stack
        for one in stack.runtimes:
            await one.shutdown(drain_timeout_s=0.0)


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "power-of-two"])
async def test_session_affinity_sends_the_turns_of_a_session_to_one_worker(model_dir: Path, mode: str) -> None:
    async with workers(mode) as stack:
        for _ in range(3):
            await stack.serve(model_dir)
        bound = await stack.turn(FIRST)
        native = ("/generate", {"input_ids": [1, 2], "stream": True})
        for _ in range(4):
            await stack.turn({})
            assert await stack.turn(FIRST) == bound
            assert await stack.turn(FIRST, *native) == bound
        if mode == "round-robin":
            assert len({(await stack.turn({}))[0] for _ in range(3)}) == 3, "others go on in turn"


async def test_session_affinity_sends_requests_with_one_prompt_cache_key_to_one_worker(model_dir: Path) -> None:
    async with workers("round-robin") as stack:
        for _ in range(3):
            await stack.serve(model_dir)
        keyed = {**CHAT, "prompt_cache_key": "one"}
        bound = await stack.turn({}, body=keyed)
        other = await stack.turn({}, body={**CHAT, "prompt_cache_key": "two"})
        assert other != bound, "sessions are spread over the workers"
        for _ in range(4):
            await stack.turn({})
            assert await stack.turn({}, body=keyed) == bound
        session = await stack.turn({"x-dynamo-session-id": "one"}, body=keyed)
        assert session == await stack.turn({"x-dynamo-session-id": "one"}), (
            "a header names the session before the key does"
        )


async def test_session_affinity_rebinds_when_the_worker_left(model_dir: Path) -> None:
    async with workers("round-robin") as stack:
        await stack.serve(model_dir)
        await stack.serve(model_dir)
        (bound,) = await stack.turn(FIRST)
        gone = next(one for one in stack.runtimes if one.instance_id == bound)
        await gone.shutdown(drain_timeout_s=0.0)
        (other,) = await stack.turn(FIRST)
        assert other != bound
        assert await stack.turn(FIRST) == [other]


async def test_session_affinity_rebinds_when_the_worker_is_unreachable(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers("round-robin") as stack:
        await stack.serve(model_dir)
        await stack.serve(model_dir)
        (bound,) = await stack.turn(FIRST)
        (served,) = stack.relays.models.all_sets()
        send = served.client.send

        async def refused(*args: Any, instance_id: int | None = None, **named: Any) -> Any:
            if instance_id == bound:
                raise CannotConnect("no way")
            named["exclude"] = {*named.get("exclude", ()), bound}
            return await send(*args, instance_id=instance_id, **named)

        monkeypatch.setattr(served.client, "send", refused)
        (other,) = await stack.turn(FIRST)
        assert other != bound
        assert await stack.turn(FIRST) == [other]
        assert await stack.turn(FIRST, "/generate", {"input_ids": [1, 2], "stream": True}) == [other]


async def test_session_affinity_ends_with_the_clients_final_turn(model_dir: Path) -> None:
    async with workers("round-robin") as stack:
        await stack.serve(model_dir)
        await stack.serve(model_dir)
        bound = await stack.turn(FIRST)
        assert await stack.turn(FIRST | {"x-dynamo-session-final": "true"}) == bound
        assert await stack.turn(FIRST) != bound, "it begins anew, in turn"


async def test_session_affinity_binds_both_phases(model_dir: Path) -> None:
    async with workers("round-robin") as stack:
        for role in (WorkerType.Prefill, WorkerType.Decode) * 2:
            await stack.serve(model_dir, role)
        one, two = await stack.turn(FIRST), await stack.turn(SECOND)
        assert len({*one, *two}) == 4
        for _ in range(3):
            assert await stack.turn(FIRST) == one
            assert await stack.turn(SECOND) == two


async def test_session_affinity_waits_for_the_first_workers_of_a_model(model_dir: Path) -> None:
    async with open_relays(routes, workers_min=2) as relays:
        stack = Workers(relays)
        await stack.serve(model_dir)
        answer = await relays.send_request("/v1/chat/completions", CHAT)
        assert (answer.status, relays.models.served()) == (503, {})
        assert b"1 of the 2 workers" in answer.body
        await stack.serve(model_dir)
        await stack.turn({})
        await stack.runtimes[0].shutdown(drain_timeout_s=0.0)
        assert await stack.turn({}) == [stack.runtimes[1].instance_id], "it goes on with fewer"
        await stack.runtimes[1].shutdown(drain_timeout_s=0.0)
