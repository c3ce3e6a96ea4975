"""Sessions of the KV router, shown over HTTP."""

import json
from types import SimpleNamespace
from typing import Any, cast

from starlette.requests import Request

from dynamo.http.routes.routing import RoutingPages
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import WorkerFacts
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane


class Progress:
    tokens = 0
    is_over = False


def router(**config: Any) -> KvPushRouter:
    hub = MemoryHub()
    runtime = DistributedRuntime(
        None, MemoryDiscovery(MemoryStore()), lambda dispatcher, _: MemoryPlane(dispatcher, hub)
    )
    made = KvPushRouter(
        runtime, EndpointId.parse("dynamo.backend.generate"), RoutingConfig(block_size=4, use_kv_events=False, **config)
    )
    made.set_facts([WorkerFacts(7, kv_blocks=100)])
    return made


def pages(*routers: KvPushRouter) -> RoutingPages:
    served = [SimpleNamespace(name=f"m{number}", kv=one, answers_clients=True) for number, one in enumerate(routers)]
    return RoutingPages(cast(Any, SimpleNamespace(every_set=lambda: served)))


async def turn(one: KvPushRouter, session: str, length: int) -> None:
    request = PreprocessedRequest(model="m", token_ids=list(range(length)), agent_context={"session_id": session})
    await one.choose(request, f"{session}{length}", Progress())


async def get_page(page: RoutingPages, query: str = "") -> tuple[int, dict[str, Any]]:
    answer = await page.sessions(Request({"type": "http", "query_string": query.encode(), "headers": []}))
    return answer.status_code, json.loads(bytes(answer.body))


async def test_session_page_lists_cached_blocks_by_worker() -> None:
    one = router(session_prefixes=True)
    await turn(one, "s", 8)
    await turn(one, "s", 17)

    status, answer = await get_page(pages(one))

    assert status == 200
    assert answer["models"] == [
        {
            "model": "m0",
            "sessions": 1,
            "blocks": 4,
            "shown": [
                {
                    "session_id": "s",
                    "prompts": [
                        {
                            "blocks": 4,
                            "held": [{"worker_id": 7, "dp_rank": 0, "device": 4, "host": 0, "disk": 0}],
                        }
                    ],
                }
            ],
        }
    ]


async def test_sessions_are_listed_most_recent_first_up_to_the_limit() -> None:
    one = router(session_prefixes=True)
    for name in "abc":
        await turn(one, name, 8)

    _, answer = await get_page(pages(one), "limit=2")

    assert [shown["session_id"] for shown in answer["models"][0]["shown"]] == ["c", "b"]


async def test_unknown_session_or_invalid_limit_is_refused() -> None:
    one = router(session_prefixes=True)
    await turn(one, "s", 8)

    assert (await get_page(pages(one), "session_id=t"))[0] == 404
    assert (await get_page(pages(one), "limit=0"))[0] == 400
    status, answer = await get_page(pages(router()))
    assert status == 404 and "--enable-session-prefix-index" in json.dumps(answer)
