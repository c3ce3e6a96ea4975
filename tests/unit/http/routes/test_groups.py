"""Access of API keys to admin routes, models and stored objects, over every group of routes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.scripted_engine.stack import NAME, ScriptedStack, open_stack

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.groups import GROUPS, metrics_group
from dynamo.http.routes.table import Access, RouteContext, RouteTable, routes_of
from dynamo.http.server.gate import Account, KeyMetrics, Keys
from dynamo.serving.local_requests import LocalRequest, LocalResponse

KEYS = """
[[keys]]
name = "ann"
key = "ann-secret"
[[keys]]
name = "eve"
key = "eve-secret"
[[keys]]
name = "limited"
key = "limited-secret"
models = ["other*"]
[[keys]]
name = "root"
key = "root-secret"
admin = true
"""

ADMIN_ROUTES = {
    ("GET", "/v1/planner"),
    ("GET", "/busy_threshold"),
    ("POST", "/busy_threshold"),
    ("GET", "/routing/decisions"),
    ("GET", "/routing/state"),
    ("GET", "/routing/sessions"),
}
OPEN_ROUTES = {"/health", "/live", "/metrics", "/openapi.json", "/docs"}
USER = [{"role": "user", "content": "hi"}]


class Served:
    """A frontend with keys, called without a socket."""

    def __init__(self, stack: ScriptedStack, keys: Keys | None, options: ApiOptions) -> None:
        self.keys = keys
        self.metrics = KeyMetrics(MetricsRegistry(), "x")
        context = RouteContext(stack.pipeline, stack.models, MetricsRegistry(), lambda: True, options, keys=keys)
        self.table: RouteTable = routes_of(context, GROUPS)
        self.app = Starlette(routes=self.table.starlette_routes())

    def account(self, name: str) -> Account | None:
        if self.keys is None:
            return None
        caller = self.keys.ring.of_owner(self.keys.ring.owner_of(name) or "")
        assert caller is not None
        assert caller.admit(0.0) is None
        return Account(caller, self.metrics, lambda: 0.0)

    async def plain(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        async def with_account(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {"account": self.account(name)} if self.keys is not None else {}
            await self.app(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_account), base_url="http://x") as http:
            return await http.request(method, path, **more)

    async def hot(self, name: str, path: str, body: Any) -> LocalResponse:
        handler = self.table.request_handlers[path]
        return await LocalRequest(handler, json.dumps(body).encode(), [], self.account(name)).whole()


@asynccontextmanager
async def served(folder: Path, *, has_keys: bool = True) -> AsyncIterator[Served]:
    (folder / "keys.toml").write_text(KEYS)
    keys = Keys([], str(folder / "keys.toml")) if has_keys else None
    async with open_stack() as stack:
        yield Served(stack, keys, ApiOptions(batch_dir=str(folder / "batches"), enable_anthropic=True))


async def test_admin_and_open_routes_equal_the_expected_lists(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        of = {access: {(e.method, e.path) for e in one.table.entries if e.access is access} for access in Access}
        assert of[Access.ADMIN] == ADMIN_ROUTES
        assert {path for _, path in of[Access.OPEN]} == OPEN_ROUTES


@pytest.mark.parametrize(("method", "path"), sorted(ADMIN_ROUTES))
async def test_admin_routes_refuse_ordinary_keys(tmp_path: Path, method: str, path: str) -> None:
    async with served(tmp_path) as one:
        for spelled in (path, path.replace("_", "%5F").replace("/r", "/%72")):
            answer = await one.plain("ann", method, spelled, json={"model": NAME})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
        assert (await one.plain("root", method, path, json={"model": NAME})).status_code in (200, 404)
    async with served(tmp_path, has_keys=False) as one:
        assert (await one.plain("", method, path, json={"model": NAME})).status_code in (200, 404)


async def test_model_pages_hide_models_that_the_key_may_not_use(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        for path in (f"/v1/models/{NAME}", f"/v1/models/{NAME}/ready"):
            assert (await one.plain("ann", "GET", path)).status_code == 200
            assert (await one.plain("limited", "GET", path)).status_code == 404
        assert (await one.plain("limited", "GET", "/v1/models")).json()["data"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": "hi", "truncation": "auto"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/images/generations", {"prompt": "hi"}),
    ],
)
async def test_routes_with_a_model_name_refuse_keys_without_permission(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with served(tmp_path) as one:
        assert (await one.hot("limited", path, {"model": NAME, **body})).status == 403
        unknown = await one.hot("limited", path, {"model": "other-model", **body})
        assert unknown.status == 404 and b"served: " + NAME.encode() not in unknown.body
        assert (await one.hot("ann", path, {"model": NAME, **body})).status != 403


async def test_input_tokens_without_a_model_counts_no_model_of_another_key(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        assert (await one.hot("ann", "/v1/responses/input_tokens", {"input": "hi"})).status == 200
        assert (await one.hot("limited", "/v1/responses/input_tokens", {"input": "hi"})).status in (400, 403, 404)


async def test_stored_responses_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        made = json.loads((await one.hot("ann", "/v1/responses", {"model": NAME, "input": "hi"})).body)
        path, item = f"/v1/responses/{made['id']}", made["output"][0]["id"]
        more = {"model": NAME, "input": "more", "previous_response_id": made["id"]}
        refers = {"model": NAME, "input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "x"}]}
        for key in ("eve", "root"):
            assert (await one.plain(key, "GET", path)).status_code == 404
            assert (await one.plain(key, "GET", f"{path}/input_items")).status_code == 404
            assert (await one.plain(key, "DELETE", path)).status_code == 404
            for body in (more, refers):
                assert (await one.hot(key, "/v1/responses", body)).status == 404
                assert (await one.hot(key, "/v1/responses/input_tokens", body)).status == 404
        assert (await one.plain("ann", "GET", path)).status_code == 200
        assert (await one.plain("ann", "GET", f"{path}/input_items")).status_code == 200
        for body in (more, refers):
            assert (await one.hot("ann", "/v1/responses", body)).status == 200
        assert (await one.plain("ann", "DELETE", path)).status_code == 200


async def test_metrics_group_has_only_get_routes() -> None:
    async with open_stack() as stack:
        context = RouteContext(stack.pipeline, stack.models, MetricsRegistry(), lambda: True)
        table = routes_of(context, (metrics_group,))
        assert {one.method for one in table.entries} == {"GET"}
        assert {"/metrics", "/health", "/live", "/v1/models"} <= {one.path for one in table.entries}
        assert table.hot_handlers() == {}
