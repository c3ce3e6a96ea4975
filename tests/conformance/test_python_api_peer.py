"""The same programs under the released package and under ours, in one deployment.

The side environment is created by `python -m benchmarks.peer` (in `DYNAMO_PEER_HOME`).
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.ports import free_port
from tests.cluster.peers import require_peer
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.scripts import Scripts, running

from dynamo.core.codec import msgpack_decode
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.zmq import ZmqSubscriber

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
MIXED = [("ours", "theirs"), ("theirs", "ours")]
TOGETHER = [*MIXED, ("theirs", "theirs")]


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    require_peer()
    return {"ours": sys.executable, "theirs": peer_python()}


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    with running(tmp_path) as made:
        yield made


@pytest.mark.parametrize(("worker", "client"), TOGETHER)
def test_hello_world(scripts: Scripts, pythons: dict[str, str], worker: str, client: str) -> None:
    scripts.start("hello_world/worker.py", python=pythons[worker])
    collected = scripts.run("hello_world/client.py", "Ada, Bob", python=pythons[client])
    assert collected == ["Hello Ada!", "Hello Bob!"]


@pytest.mark.parametrize(("first", "second"), TOGETHER)
def test_metadata_and_cancellation_pass_through_two_stages(
    scripts: Scripts, pythons: dict[str, str], first: str, second: str
) -> None:
    upper = scripts.start("two_stages/upper.py", python=pythons[second])
    scripts.start("two_stages/entrance.py", python=pythons[first])
    words = " ".join(str(number) for number in range(40))
    assert scripts.run("two_stages/client.py", "one two", python=pythons[second]) == ["1. ONE", "2. TWO"]
    assert scripts.line(upper) == "asked by examples"
    collected = scripts.run("two_stages/client.py", words, "2", python=pythons[second])
    assert collected[:2] == ["1. 0", "2. 1"]
    assert len(collected) < 40
    assert [scripts.line(upper), scripts.line(upper)] == ["asked by examples", "stopped"]


@pytest.mark.parametrize(("first", "second"), TOGETHER)
def test_a_cancelled_handler_that_raises_ends_the_response_without_an_error(
    scripts: Scripts, pythons: dict[str, str], first: str, second: str
) -> None:
    server = scripts.start("cancellation/server.py", python=pythons[second])
    middle = scripts.start("cancellation/middle.py", python=pythons[first])
    for flags in ([], ["--middle"]):
        received = scripts.run("cancellation/client.py", *flags, python=pythons[second])
        assert received == ["received 0", "received 1", "received 2", "cancelled"]
        assert scripts.line(server).startswith("cancelled before ")
    assert scripts.line(middle) == "response of the server ended"


# Behind a frontend -----------------------------------------------------------------------------------------------

BEHIND = [("ours", "theirs"), ("theirs", "ours"), ("theirs", "theirs")]
"""Frontend and worker; our own two are in the integration tests."""


class Frontend:
    """A frontend of either implementation."""

    def __init__(self, folder: Path, python: str, variables: dict[str, str]) -> None:
        port = free_port()
        command = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        with open(folder / "frontend.log", "wb") as log:
            self.process = subprocess.Popen(
                [python, *command, "--discovery-backend", "file"], stdout=log, stderr=log, env=variables
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)

    def models(self) -> list[str]:
        try:
            return [one["id"] for one in self.http.get("/v1/models").json()["data"]]
        except httpx.TransportError:
            return []

    def until_served(self, model: str) -> None:
        wait_until(lambda: self.models() == [model], f"{model} never appeared")

    def post(self, body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body)

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def frontend(
    request: pytest.FixtureRequest, scripts: Scripts, pythons: dict[str, str], tmp_path: Path
) -> Iterator[Frontend]:
    scripts.variables["DYN_RUNTIME_INHIBITED_DURATION_SECS"] = "0"  # A request that raised is repeated at once.
    made = Frontend(tmp_path, pythons[request.param], scripts.variables)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize(("frontend", "worker"), BEHIND, indirect=["frontend"])
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_registered_model_serves_requests(
    scripts: Scripts, pythons: dict[str, str], frontend: Frontend, worker: str, kind: str
) -> None:
    scripts.start("echo_model/worker.py", *([] if kind == "text" else [bench_model()]), python=pythons[worker])
    frontend.until_served("echo")
    body = {"model": "echo", "messages": [{"role": "user", "content": "Good morning to you"}], "max_tokens": 64}
    whole = frontend.post(body).json()["choices"][0]
    assert "Good morning to you" in whole["message"]["content"]
    assert whole["finish_reason"] in {"stop", "length"}
    events = [
        line.removeprefix("data: ") for line in frontend.post({**body, "stream": True}).text.split("\n\n") if line
    ]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == [whole["finish_reason"]]


STATUSES = {
    "ValueError": 400, "TypeError": 400, "InvalidArgument": 400, "HttpError 400": 400, "HttpError 429": 429, "HttpError 503": 503,
    "CannotConnect": 503, "Disconnected": 503, "EngineShutdown": 503, "StreamIncomplete": 503,
    "WorkerUnavailable": 503, "ConnectionError": 503, "ConnectionResetError": 503,
    "ConnectionTimeout": 504, "TimeoutError": 504, "Cancelled": 499, "CancelledError": 499,
    "Unknown": 500, "DynamoException": 500, "RuntimeError": 500, "KeyError": 500, "NotImplementedError": 500,
    "MemoryError": 500, "OSError": 500,
}  # fmt: skip
"""HTTP status of each error that a handler of the released package raises."""


def send_request(frontend: Frontend, words: str, **more: Any) -> httpx.Response:
    return frontend.post({"model": "errors", "messages": [{"role": "user", "content": words}], **more})


@pytest.fixture
def errors(scripts: Scripts, pythons: dict[str, str], frontend: Frontend, worker: str) -> None:
    """The worker that raises, behind the frontend."""
    scripts.start(str(HERE / "peer_errors.py"), python=pythons[worker])
    frontend.until_served("errors")


ANY = [("ours", "ours"), *BEHIND]


@pytest.mark.usefixtures("errors")
@pytest.mark.parametrize(("frontend", "worker"), ANY, indirect=["frontend"])
def test_exception_of_a_worker_determines_the_http_status(frontend: Frontend) -> None:
    answers = {words: send_request(frontend, words) for words in STATUSES}
    assert {words: answer.status_code for words, answer in answers.items()} == STATUSES
    reported = {words: answer.json()["message"] for words, answer in answers.items()}
    assert reported["InvalidArgument"] == "secret"
    assert [words for words, message in reported.items() if "secret" in message] == ["InvalidArgument"]
    assert reported["ValueError"] == "Invalid request"


@pytest.mark.usefixtures("errors")
@pytest.mark.parametrize(("frontend", "worker"), ANY, indirect=["frontend"])
def test_an_error_after_the_first_chunk_ends_the_stream_with_its_event(frontend: Frontend) -> None:
    for words, kind in (
        ("late InvalidArgument", "invalid_request_error"),
        ("late HttpError 429", "rate_limit_error"),
        ("late Disconnected", "service_unavailable"),
        ("late RuntimeError", "internal_server_error"),
    ):
        answer = send_request(frontend, words, stream=True)
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == "so far "
        assert json.loads(events[1])["error"]["type"] == kind
        assert events[2:] == ["[DONE]"]


# KV events -------------------------------------------------------------------------------------------------------


def facts(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the events' data of each block, independent of their grouping."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        data, about = event["event"]["data"], (event["storage_tier"], event["event"]["dp_rank"])
        if data == "cleared":
            found.append((*about, "cleared"))
        elif "removed" in data:
            found += [(*about, "removed", one) for one in data["removed"]["block_hashes"]]
        else:
            parent = data["stored"]["parent_hash"]
            for block in data["stored"]["blocks"]:
                output = json.dumps(block["mm_extra_info"], sort_keys=True)
                found.append((*about, "stored", parent, block["block_hash"], block["tokens_hash"], output))
                parent = block["block_hash"]
    return found


async def collected(scripts: Scripts, python: str, mode: str, last: Any) -> list[dict[str, Any]]:
    """Return all messages of the publisher, up to its last one."""
    runtime = DistributedRuntime(None, "file", "tcp")
    subscriber = await runtime.event_plane.subscriber(runtime.endpoint("ns.comp.ep").id, "kv-events")
    assert isinstance(subscriber, ZmqSubscriber)
    monitor = subscriber._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    address = f"tcp://127.0.0.1:{free_port()}"
    process = await asyncio.to_thread(scripts.start, str(HERE / "peer_kv_publisher.py"), mode, address, python=python)
    assert await asyncio.to_thread(monitor.poll, DEADLINE_S * 1000), "the subscriber does not connect to the publisher"
    subscriber._socket.disable_monitor()
    await asyncio.sleep(0.5)  # The subscription follows the handshake, without confirmation.
    scripts.send_line(process)
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in subscriber:
            if isinstance(event, Event):
                events += msgpack_decode(event.payload)
            if facts(events)[-1:] == [last] and facts(events).count(last) == (2 if mode == "relayed" else 1):
                break
    await runtime.shutdown()
    return events


@pytest.mark.parametrize(
    ("mode", "last"), [("pushed", ("device", 2, "removed", 21)), ("relayed", ("device", 3, "cleared"))]
)
async def test_both_packages_publish_the_same_cache_events(
    scripts: Scripts, pythons: dict[str, str], monkeypatch: pytest.MonkeyPatch, mode: str, last: Any
) -> None:
    for name in ("DYN_FILE_KV", "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST"):
        monkeypatch.setenv(name, scripts.variables[name])
    reported = []
    for implementation in ("ours", "theirs"):
        reported.append(facts(await collected(scripts, pythons[implementation], mode, last)))
        scripts.stop()
    assert reported[0] == reported[1]
    assert {fact[2] for fact in reported[0]} == ({"stored", "removed"} | ({"cleared"} if mode == "relayed" else set()))
