"""Files and batches over their routes, with a worker in the same process."""

import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.scripted_engine.stack import NAME, ScriptedStack, open_stack
from tests.settle import repeat

from dynamo.api.batches import store
from dynamo.api.batches.lines import read_line
from dynamo.api.batches.store import StorageLimits
from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.frontend.config import FrontendConfig
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.batches import LineRunner
from dynamo.http.routes.groups import GROUPS
from dynamo.http.routes.table import RouteContext, RouteTable, routes_of
from dynamo.http.server.gate import Account, KeyMetrics, Keys

KEYS = """
[[keys]]
name = "ann"
key = "ann-secret"
models = ["m"]
tokens_per_minute = 1000000
[[keys]]
name = "ben"
key = "ben-secret"
models = ["other"]
"""


class Served:
    """A pipeline with the routes, called without a socket."""

    def __init__(self, stack: ScriptedStack, options: ApiOptions, keys: Keys | None) -> None:
        self.stack = stack
        self.registry = MetricsRegistry()
        context = self.context = RouteContext(
            stack.pipeline, stack.models, self.registry, lambda: True, options, "x", keys=keys
        )
        self.table: RouteTable = routes_of(context, GROUPS)
        self.keys = keys
        self.as_key: str | None = None
        app = Starlette(routes=self.table.starlette_routes())

        async def with_account(scope: Any, receive: Any, send: Any) -> None:
            if self.keys is not None and self.as_key is not None:
                owner = self.keys.ring.owner_of(self.as_key)
                caller = self.keys.ring.of_owner(owner or "")
                assert caller is not None
                account = Account(caller, KeyMetrics(self.registry, "x"), lambda: 0.0)
                scope["state"] = {"account": account}
            await app(scope, receive, send)

        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(with_account), base_url="http://x")

    async def upload(self, data: bytes | str, **fields: Any) -> httpx.Response:
        content = data.encode() if isinstance(data, str) else data
        form = {"purpose": "batch", **fields}
        return await self.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data=form)

    async def begin(self, lines: list[Any], endpoint: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        uploaded = await self.upload("\n".join(map(json.dumps, lines)))
        body = {"input_file_id": uploaded.json()["id"], "endpoint": endpoint, "completion_window": "24h", **more}
        return await self.http.post("/v1/batches", json=body)

    async def ended(self, batch_id: str) -> Any:
        batch: dict[str, Any] = {"status": ""}

        async def read() -> None:
            batch.update((await self.http.get(f"/v1/batches/{batch_id}")).json())

        await repeat(read, lambda: batch["status"] in ("completed", "failed", "cancelled", "expired"))
        return batch

    async def lines(self, file_id: str) -> dict[str, Any]:
        text = (await self.http.get(f"/v1/files/{file_id}/content")).text
        return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


@asynccontextmanager
async def served(folder: Path | None, keys: Keys | None = None, **options: Any) -> AsyncIterator[Served]:
    async with open_stack() as stack:
        one = Served(stack, ApiOptions(batch_dir=None if folder is None else str(folder), **options), keys)
        for begin in one.table.on_start:
            begin()
        yield one
        await one.http.aclose()
        for close in one.table.on_stop:
            await close()


def chat(custom_id: str, text: str = "hi", model: str = NAME, **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return request(custom_id, "/v1/chat/completions", model=model, messages=[message], **body)


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


async def test_batch_is_processed_line_by_line(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        begun = await one.begin(
            [chat("a"), chat("b", temperature=9), chat("c", model="no-such-model")], metadata={"k": "v"}
        )
        assert (begun.status_code, begun.json()["status"]) == (200, "validating")
        batch = await one.ended(begun.json()["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        assert (batch["metadata"], batch["model"], batch["errors"]) == ({"k": "v"}, NAME, None)
        [answer] = (await one.lines(batch["output_file_id"])).values()
        assert answer["custom_id"] == "a" and answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello there."
        failed = await one.lines(batch["error_file_id"])
        assert failed["b"]["response"]["status_code"] == 400
        assert failed["b"]["response"]["body"]["error"]["param"] == "temperature"
        assert failed["c"]["response"]["status_code"] == 404
        kept = (await one.http.get("/v1/files")).json()["data"]
        assert sorted(file["purpose"] for file in kept) == ["batch", "batch_output", "batch_output"]
        assert 'x_batch_lines_total{status="200"} 1' in one.registry.render()


@pytest.mark.parametrize(
    ("endpoint", "body", "expected_message"),
    [
        ("/v1/completions", {"prompt": "hi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
async def test_batch_supports_other_endpoints(tmp_path: Path, endpoint: str, body: Any, expected_message: Any) -> None:
    async with served(tmp_path) as one:
        begun = await one.begin([request("a", endpoint, model=NAME, **body)], endpoint)
        batch = await one.ended(begun.json()["id"])
        [answer] = (await one.lines(batch["output_file_id"])).values()
        assert expected_message(answer["response"]["body"]) == "Hello there."


async def test_invalid_batch_input_fails_the_batch_with_line_numbers(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        begun = await one.begin([chat("a"), chat("a"), chat("b", stream=True)])
        batch = await one.ended(begun.json()["id"])
        assert batch["status"] == "failed"
        found = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
        assert found == [(2, "duplicate_custom_id"), (3, "stream_not_supported")]
        assert not one.stack.engine.requests


async def test_batch_can_be_cancelled(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        begun = await one.begin([chat(str(place)) for place in range(50)])
        batch_id = begun.json()["id"]
        cancelled = await one.http.post(f"/v1/batches/{batch_id}/cancel")
        assert cancelled.json()["status"] in ("cancelling", "completed", "cancelled")
        batch = await one.ended(batch_id)
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == 50
        again = await one.http.post(f"/v1/batches/{batch_id}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_has_ended")


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        ids = [(await one.upload(str(place))).json()["id"] for place in range(3)]
        listed = (await one.http.get("/v1/files")).json()
        assert {file["id"] for file in listed["data"]} == set(ids) and listed["has_more"] is False
        page = (await one.http.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
        rest = (await one.http.get("/v1/files", params={"after": page["last_id"], "order": "asc"})).json()
        assert {file["id"] for file in page["data"] + rest["data"]} == set(ids)
        assert (page["has_more"], rest["has_more"]) == (True, False)
        assert (await one.http.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        shown = (await one.http.get(f"/v1/files/{ids[1]}")).json()
        assert (shown["bytes"], shown["filename"], shown["purpose"]) == (1, "in.jsonl", "batch")
        assert (await one.http.get(f"/v1/files/{ids[1]}/content")).content == b"1"
        assert (await one.http.delete(f"/v1/files/{ids[1]}")).json() == {
            "id": ids[1], "object": "file", "deleted": True
        }  # fmt: skip
        for path in (ids[1], f"{ids[1]}/content", "file-x", "..%2F..%2Fetc"):
            assert (await one.http.get(f"/v1/files/{path}")).status_code == 404


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("/v1/files", {"limit": "0"}, "limit"),
        ("/v1/files", {"limit": "x"}, "limit"),
        ("/v1/files", {"order": "up"}, "order"),
        ("/v1/files", {"after": "file-0"}, "after"),
        ("/v1/batches", {"limit": "101"}, "limit"),
        ("/v1/batches", {"after": "batch_0"}, "after"),
    ],
)
async def test_invalid_page_parameter_is_refused_by_name(tmp_path: Path, path: str, params: Any, param: str) -> None:
    async with served(tmp_path) as one:
        refused = await one.http.get(path, params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint", 400),
        ({"completion_window": "1h"}, "completion_window", 400),
        ({"input_file_id": "file-" + "0" * 24}, "id", 404),
        ({"input_file_id": None}, "input_file_id", 400),
        ({"metadata": {"k": "v" * 513}}, "metadata", 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after", 400),
        ({"more": 1}, "more", 400),
    ],
)
async def test_invalid_batch_is_refused_by_field(tmp_path: Path, change: Any, param: str, status: int) -> None:
    async with served(tmp_path) as one:
        file_id = (await one.upload("x")).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **change}
        refused = await one.http.post("/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_invalid_upload_is_refused_by_field(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        for answer, param in (
            (await one.upload("x", purpose="assistants"), "purpose"),
            (await one.upload("x", **{"expires_after[anchor]": "created_at"}), "expires_after"),
            (
                await one.upload("x", **{"expires_after[anchor]": "x", "expires_after[seconds]": "3600"}),
                "expires_after",
            ),
            (await one.http.post("/v1/files", data={"purpose": "batch", "file": "x"}), None),
            (await one.http.post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"}), "file"),
            (await one.http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), None),
        ):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        kept = await one.upload("x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        assert kept.json()["expires_at"] == kept.json()["created_at"] + 3600


async def test_upload_or_batch_over_a_limit_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, batch_limits=StorageLimits(bytes_max=3000, files_max=2, open_batches_max=0)) as one:
        assert (await one.upload("x" * 4000)).status_code == 413
        file_id = (await one.upload("x")).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await one.http.post("/v1/batches", json=body)).status_code == 429
        assert (await one.upload("x")).status_code == 200
        refused = await one.upload("x")
        assert (refused.status_code, "--batch-files" in refused.json()["error"]["message"]) == (413, True)


async def test_key_can_access_only_its_batches_and_files(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with served(tmp_path / "batches", Keys([], str(tmp_path / "keys.toml"))) as one:
        ids = {}
        for key in ("ann", "ben"):
            one.as_key = key
            ids[key] = (await one.begin([chat("a")])).json()["id"]
            batch = await one.ended(ids[key])
            assert batch["request_counts"]["failed"] == (key == "ben")
            assert len((await one.http.get("/v1/batches")).json()["data"]) == 1
        [refused] = (await one.lines(batch["error_file_id"])).values()
        assert refused["response"]["status_code"] == 403
        for path in (f"/v1/batches/{ids['ann']}", f"/v1/batches/{ids['ann']}/cancel"):
            answer = await (one.http.post(path) if "cancel" in path else one.http.get(path))
            assert answer.status_code == 404
        assert 'x_api_key_tokens_total{key="ann"}' in one.registry.render()


async def test_line_runner_applies_the_limits_of_the_owner_key(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS + '[[keys]]\nname = "eve"\nkey = "eve-secret"\nrequests_per_minute = 1\n')
    async with served(tmp_path / "batches", Keys([], str(tmp_path / "keys.toml"))) as one:
        line_runner = LineRunner(one.table.request_handlers, one.context)
        line = read_line(json.dumps(chat("a")).encode())
        assert one.keys is not None
        eve = one.keys.ring.owner_of("eve")
        assert (await line_runner.run(line, eve)).status == 200
        later = await line_runner.run(line, eve)
        assert later.status == 429 and later.retry_after_s
        gone = await line_runner.run(line, "key:of-another-key")
        assert (gone.status, gone.retry_after_s) == (401, None)


async def test_line_runner_reports_a_draining_frontend_as_retryable(tmp_path: Path) -> None:
    async with served(tmp_path) as one:
        line_runner = LineRunner(one.table.request_handlers, one.context)
        await one.stack.pipeline.drain(0.0)
        answer = await line_runner.run(read_line(json.dumps(chat("a")).encode()), None)
        assert (answer.status, answer.retry_after_s, line_runner.running) == (503, 0.0, 0)


async def test_missing_batch_directory_names_its_flag() -> None:
    async with served(None) as one:
        for answer in (await one.upload("x"), await one.http.get("/v1/batches"), await one.http.get("/v1/files/x")):
            assert answer.status_code == 404
            assert "--batch-dir" in answer.json()["error"]["message"]


def test_batch_flags_are_validated(tmp_path: Path) -> None:
    config = load(FrontendConfig, ["--batch-dir", str(tmp_path), "--batch-concurrency", "2"], {})
    assert (config.apis.batch_dir, config.apis.batch_concurrency) == (str(tmp_path), 2)
    with pytest.raises(ConfigError, match="--batch-files"):
        load(FrontendConfig, ["--batch-files", "0"], {})


async def test_files_and_batches_on_a_full_disk_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as one:
        file_id = (await one.upload("x")).json()["id"]

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store, "write_whole", full)
            body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            for answer in (await one.upload("x"), await one.http.post("/v1/batches", json=body)):
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (507, "insufficient_storage")
                assert "No space left on device" in error["message"] and str(tmp_path) not in error["message"]
        assert "Traceback" not in caplog.text
        assert [one["id"] for one in (await one.http.get("/v1/files")).json()["data"]] == [file_id]
        assert (await one.http.get("/v1/batches")).json()["data"] == []

        def broken(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(store, "write_whole", broken)
        answer = await one.upload("x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        assert answer.headers["retry-after"] == "5"
