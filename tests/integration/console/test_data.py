"""Data of the console, over HTTP: live samples, requests with their stages, decisions, keys, actions, and its cost."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import DEADLINE_S

pytestmark = pytest.mark.integration

ADMIN, USER = {"authorization": "Bearer admin-key-1"}, {"authorization": "Bearer user-key-1"}
KEYS = ("--admin-api-key", "admin-key-1", "--api-key", "user-key-1")
MOCKER = ("--num-gpu-blocks-override", "400", "--block-size", "16", "--speedup-ratio", "4")
IDLE_S = 4.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("console"), "--router-mode", "kv", "--migration-limit", "3", *KEYS) as found:
        found.wait_until(found.is_live, "the frontend did not start")
        for _ in range(2):
            found.mocker(*MOCKER)
        found.wait_until(lambda: is_complete(found, 2), "a worker is not complete")
        yield found


def is_complete(cluster: Cluster, workers: int) -> bool:
    """Return whether all workers have registered their last endpoint, which follows their model."""
    rows = api(cluster, "overview")["workers"]
    return len(rows) == workers and all(one["is_controllable"] and one["engine"] for one in rows)


def api(cluster: Cluster, path: str, **options: Any) -> Any:
    response = cluster.http.get(f"/console/api/{path}", headers=ADMIN, **options)
    assert response.status_code == 200, response.text
    return response.json()


def chat(cluster: Cluster, text: str, **more: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "ignore_eos": True,
        **more,
    }
    return cluster.http.post("/v1/chat/completions", json=body, headers=USER)


def request_of(cluster: Cluster, response: httpx.Response) -> dict[str, Any]:
    (found,) = api(cluster, f"requests?id={response.json()['id']}")["requests"]
    return dict(found)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, json.loads(line.removeprefix("data:"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_browser_is_redirected_and_other_clients_are_not(cluster: Cluster) -> None:
    browser = cluster.http.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    assert (browser.status_code, browser.headers["location"]) == (307, "/console/")
    other = cluster.http.get("/", headers={"accept": "application/json"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "route_not_found")


def test_pages_need_no_key_and_forbid_foreign_content(cluster: Cluster) -> None:
    page = cluster.http.get("/console/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    script = cluster.http.get("/console/views/overview.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = cluster.http.get("/console/views/overview.js", headers={"if-none-match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["overview", "live", "requests", "routing", "planners", "reports"])
def test_data_needs_an_admin_key(cluster: Cluster, path: str) -> None:
    assert cluster.http.get(f"/console/api/{path}").status_code == 401
    assert cluster.http.get(f"/console/api/{path}", headers=USER).status_code == 403


def test_session_shows_the_rights_of_a_key(cluster: Cluster) -> None:
    def rights(headers: dict[str, str]) -> Any:
        return cluster.http.get("/console/api/session", headers=headers).json()

    assert rights(ADMIN) == {"may_read": True, "may_act": True}
    assert rights(USER) == {"may_read": False, "may_act": False}
    assert cluster.http.get("/console/api/meta").json()["needs_key"] is True


def test_request_has_stages_tokens_and_its_worker(cluster: Cluster) -> None:
    response = chat(cluster, "stages " * 60, stream=False)
    found = request_of(cluster, response)
    assert (found["state"], found["model"], found["output_tokens"]) == ("succeeded", MODEL, 8)
    assert found["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    names = [stage["name"] for stage in found["stages"]]
    assert [name for name in names if name != "finish"] == ["preprocess", "route", "dispatch", "first_token", "decode"]
    assert found["workers"][0] in {one["id"] for one in api(cluster, "overview")["workers"]}
    (decision,) = api(cluster, f"routing?id={found['id']}")["decisions"]
    assert f"{decision['decision']['worker_id']:x}" == found["workers"][0]
    assert len(decision["decision"]["candidates"]) == 2


def test_failed_request_is_listed_with_its_cause(cluster: Cluster) -> None:
    cluster.http.post(
        "/v1/chat/completions", json={"model": "absent", "messages": [{"role": "user", "content": "x"}]}, headers=USER
    )
    chat(cluster, "long " * 9000)
    failed = api(cluster, "requests?state=failed")["requests"]
    assert {one["state"] for one in failed} == {"failed"}
    assert any("absent" in one["error"] for one in failed)
    assert any("context length" in one["explanation"] for one in failed)


def test_stream_starts_with_the_state_and_continues_with_samples(cluster: Cluster) -> None:
    with cluster.http.stream("GET", "/console/api/live", headers=ADMIN, timeout=DEADLINE_S) as response:
        stream = events(response)
        name, overview = next(stream)
        assert name == "overview"
        assert [one["name"] for one in overview["models"]] == [MODEL]
        assert {(one["engine"], one["role"], one["is_controllable"]) for one in overview["workers"]} == {
            ("mocker", "aggregated", True)
        }
        for number in range(6):
            chat(cluster, f"sample {number}")
        rates = (
            sample["models"][MODEL]["requests"]
            for name, sample in stream
            if name == "sample" and MODEL in sample["models"]
        )
        assert next(rate for rate in rates if rate > 0) <= 12  # The first interval may be shorter than a second.


def test_only_an_admin_drains_and_resumes_a_worker(cluster: Cluster) -> None:
    worker = api(cluster, "overview")["workers"][0]
    path = f"/console/api/workers/{worker['namespace']}/{worker['component']}/{worker['id']}"
    assert cluster.http.post(f"{path}/drain", headers=USER).status_code == 403
    assert cluster.http.post(f"{path}/restart", headers=ADMIN).status_code == 404
    assert cluster.http.post(f"{path}/drain", headers=ADMIN).json()["state"] in ("draining", "drained")

    def row() -> dict[str, Any]:
        (found,) = [one for one in api(cluster, "overview")["workers"] if one["id"] == worker["id"]]
        return dict(found)

    cluster.wait_until(lambda: cluster.workers() == 1, "the drained worker is still listed")
    assert request_of(cluster, chat(cluster, "elsewhere"))["workers"] != [worker["id"]]
    assert row()["state"] in ("draining", "drained")
    assert row()["role"] == "aggregated"
    assert cluster.http.post(f"{path}/resume", headers=ADMIN).json()["state"] == "serving"
    cluster.wait_until(lambda: cluster.workers() == 2, "the worker did not come back")


def test_open_console_uses_less_than_half_a_percent_of_a_core(cluster: Cluster) -> None:
    pid = cluster.frontend.pid

    def spent() -> float:
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(IDLE_S)
        return (cpu_s(pid) - before) / (time.monotonic() - began)

    idle = spent()
    with cluster.http.stream("GET", "/console/api/live", headers=ADMIN, timeout=DEADLINE_S) as response:
        next(events(response))
        watched = spent()
    assert watched - idle < 0.02  # Ticks of 10 ms over four seconds; `benchmarks.console_cost` measures it for longer.


def test_requests_of_a_killed_worker_show_migration_and_error(cluster: Cluster) -> None:
    before = {one["id"] for one in api(cluster, "overview")["workers"]}
    victim = cluster.mocker(*MOCKER[:-1], "0.02")  # A response takes eleven seconds: it is killed within them.
    cluster.wait_until(lambda: len(api(cluster, "overview")["workers"]) == 3, "the worker did not appear")
    (its_id,) = {one["id"] for one in api(cluster, "overview")["workers"]} - before
    session = f"move {time.time()} " * 40
    with ThreadPoolExecutor(64) as clients:
        sent: list[Future[httpx.Response]] = []

        def reaches_the_victim() -> bool:
            """Send another request, until one runs on the victim: workers without load are chosen at random."""
            if not any(its_id in one["workers"] for one in api(cluster, "requests?state=running")["requests"]):
                sent.append(clients.submit(chat, cluster, f"{len(sent)} {session}", max_tokens=40))
                return False
            return True

        cluster.wait_until(reaches_the_victim, "no request is in flight on the victim")
        victim.kill()
        victim.wait()
        assert {one.result(DEADLINE_S).status_code for one in sent} == {200}
    moved = [one for one in api(cluster, "requests?limit=200")["requests"] if one["moves"]]
    assert moved
    assert all(move["worker"] not in one["workers"] for one in moved for move in one["moves"])


def test_processes_that_share_a_port_are_shown_together(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--http-workers", "2", *KEYS) as shared:
        shared.wait_until(shared.is_live, "the frontend did not start")
        shared.mocker(*MOCKER)
        requested: set[str] = set()

        def send_request() -> None:
            with httpx.Client(
                base_url=shared.http.base_url, timeout=DEADLINE_S
            ) as fresh:  # The kernel may choose the other process.
                body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
                answer = fresh.post("/v1/chat/completions", json=body, headers=USER)
            if answer.status_code == 200:  # A process that has not found the worker yet refuses.
                requested.add(answer.json()["id"][-36:])

        shared.wait_until(lambda: send_request() or len(requested) >= 12, "requests failed")
        for _ in range(6):
            with httpx.Client(base_url=shared.http.base_url, timeout=DEADLINE_S, headers=ADMIN) as fresh:
                found = fresh.get("/console/api/requests?limit=200").json()["requests"]
            assert requested <= {one["id"] for one in found}


def test_two_hundred_workers_are_shown_in_answers_of_bounded_size(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--router-mode", "kv", *KEYS) as large:
        large.http.timeout = httpx.Timeout(3 * DEADLINE_S)  # Two hundred workers start on a busy machine.
        large.wait_until(large.is_live, "the frontend did not start")
        large.run("mocker", "--model-name", MODEL, "--num-workers", "200", *MOCKER)
        large.wait_until(lambda: is_complete(large, 200), "the workers are not listed", 3 * DEADLINE_S)
        for number in range(30):
            chat(large, f"request {number}", max_tokens=1)
        answer = large.http.get("/console/api/routing?limit=60", headers=ADMIN)
        decisions = answer.json()["decisions"]
        assert {one["candidates"] for one in decisions} == {200}
        assert max(len(one["decision"]["candidates"]) for one in decisions) <= 25
        for one in (found["decision"] for found in decisions):
            assert one["worker_id"] in {candidate["worker_id"] for candidate in one["candidates"]}
        assert len(answer.content) < 300_000
        with large.http.stream("GET", "/console/api/live", headers=ADMIN, timeout=DEADLINE_S) as response:
            stream = events(response)
            _, overview = next(stream)
            assert len(overview["workers"]) == 200
            assert len(json.dumps(overview)) < 300_000
            # Earlier samples are of the time when the workers were registering.
            assert any(name == "sample" and sample["workers"] == 200 for name, sample in stream)
