"""Standalone router: relays requests to the worker that it chooses, and serves queries about the caches."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import until

from dynamo.core.config import load
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import RoutingConfig
from dynamo.llm import KvEventPublisher
from dynamo.router.main import RouterOptions, RouterService
from dynamo.routing.endpoint_router import EndpointRouter
from dynamo.runtime.context import Context

BLOCK = 4
PROMPT = list(range(1, 23))
PATH = "dynamo.backend.generate"
TIMEOUT_S = 10.0


class RouterServiceHarness(MemoryCluster):
    """Two workers, a router in front of them, and a caller."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[int] = []
        self.publishers: list[KvEventPublisher] = []
        self.seen: list[int] = []
        self.cancelled = asyncio.Event()
        self.is_slow = False

    async def worker(self) -> None:
        runtime = self.runtime()
        endpoint = runtime.endpoint(PATH)
        worker_id = endpoint.connection_id()

        async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
            self.seen.append(worker_id)
            yield {"token_ids": [5], "index": 0}
            if self.is_slow:
                await context.async_killed_or_stopped()
                self.cancelled.set()
                return
            yield {"token_ids": [6], "index": 0, "finish_reason": "length"}

        self.workers.append(worker_id)
        runtime.tasks.start(endpoint.serve_endpoint(generate), "serve")
        self.publishers.append(KvEventPublisher(endpoint, kv_block_size=BLOCK, enable_local_indexer=True))

    async def start(self) -> None:
        await self.worker()
        await self.worker()
        runtime = self.runtime()
        self.router = EndpointRouter(runtime.endpoint(PATH), RoutingConfig(block_size=BLOCK))
        self.service = RouterService(runtime, self.router)
        await self.service.start()
        await until(lambda: len(self.router.client.instance_ids()) == 2)
        self.caller = self.runtime()

    async def send_request(self, name: str, request: Any) -> list[Any]:
        client = await self.caller.endpoint(f"dynamo.router.{name}").client()
        stream = await client.generate(request, annotated=False)
        return [answer async for answer in stream]

    async def close(self) -> None:
        await self.service.close(0.0)
        await self.shutdown()


@pytest.fixture
async def harness() -> AsyncIterator[RouterServiceHarness]:
    made = RouterServiceHarness()
    await made.start()
    yield made
    await made.close()


async def test_request_is_relayed_to_the_worker_that_caches_its_prefix(harness: RouterServiceHarness) -> None:
    harness.publishers[1].publish_stored(PROMPT, [BLOCK] * 5, list(range(100, 105)))
    index = harness.router.kv.machine.index
    await until(lambda: index.held(harness.workers[1]) == 5)
    outputs = await harness.send_request("generate", {"model": "m", "token_ids": PROMPT})
    assert [output["token_ids"] for output in outputs] == [[5], [6]]
    assert outputs[0]["routing_data"]["worker_id"]["decode_worker_id"] == harness.workers[1]
    assert harness.seen == [harness.workers[1]]
    assert [load[2] for load in harness.router.kv.machine.loads().values()] == [0, 0]


async def test_best_worker_and_overlap_queries_report_the_caching_worker(harness: RouterServiceHarness) -> None:
    harness.publishers[0].publish_stored(PROMPT, [BLOCK] * 5, list(range(100, 105)))
    index = harness.router.kv.machine.index
    await until(lambda: index.held(harness.workers[0]) == 5)
    assert await harness.send_request("best_worker_id", PROMPT) == [harness.workers[0]]
    assert await harness.send_request("best_worker_id", {"token_ids": PROMPT}) == [harness.workers[0]]
    (table,) = await harness.send_request("get_overlap_scores", {"token_ids": PROMPT})
    assert (table["block_size"], table["num_blocks"]) == (4, 5)
    assert {row["worker_id"]: row["device_blocks"] for row in table["workers"]} == {
        harness.workers[0]: 5,
        harness.workers[1]: 0,
    }
    assert table["shared_cache"] == {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}


async def test_client_disconnect_from_the_router_stops_the_worker(harness: RouterServiceHarness) -> None:
    harness.is_slow = True
    client = await harness.caller.endpoint("dynamo.router.generate").client()
    stream = await client.generate({"model": "m", "token_ids": PROMPT}, annotated=False)
    assert (await anext(stream))["token_ids"] == [5]
    await stream.aclose()
    async with asyncio.timeout(TIMEOUT_S):
        await harness.cancelled.wait()
    await until(lambda: all(load[2] == 0 for load in harness.router.kv.machine.loads().values()))


async def test_malformed_request_is_refused(harness: RouterServiceHarness) -> None:
    for name, request in (
        ("generate", [1, 2]),
        ("generate", {"token_ids": "x"}),
        ("best_worker_id", {"x": 1}),
        ("get_overlap_scores", {"token_ids": [-1]}),
    ):
        with pytest.raises(InvalidArgument):
            await harness.send_request(name, request)


# Options -----------------------------------------------------------------------------------------------------------


def test_router_flags_equal_those_of_the_frontend() -> None:
    options = load(
        RouterOptions,
        ["--endpoint", "dyn://dynamo.prefill.generate", "--block-size", "64", "--no-router-kv-events"],
        {},
    )
    config, profile = options.meaning()
    assert str(options.target()) == "dynamo.prefill.generate"
    assert (config.block_size, config.use_kv_events, profile) == (64, False, None)


def test_router_options_are_read_from_variables() -> None:
    options = load(RouterOptions, [], {"DYN_ROUTER_ENDPOINT": "a.b.c", "DYN_ROUTER_BLOCK_SIZE": "32"})
    assert (str(options.target()), options.block_size) == ("a.b.c", 32)
    assert load(RouterOptions, [], {"DYN_ROUTER_ENDPOINT": "a.b.c"}).block_size == 128


def test_policy_file_takes_precedence_over_flags(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("router: {use_kv_events: false}\n")
    options = load(RouterOptions, ["--endpoint", "a.b.c", "--router-policy-config", str(path)], {})
    assert not options.meaning()[0].use_kv_events


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--endpoint"),
        (["--endpoint", "a.b"], "--endpoint a.b"),
        (["--endpoint", "a.b.c", "--router-block-size", "0"], "--router-block-size"),
        (["--endpoint", "a.b.c", "--router-temperature", "-1"], "--router-temperature"),
        (["--endpoint", "a.b.c", "--router-policy-config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_invalid_router_option_is_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(RouterOptions, argv, {})
