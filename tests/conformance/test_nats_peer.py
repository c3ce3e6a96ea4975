"""Our processes and the released ones with one real NATS server: the same subjects, the same messages, in both
directions.

First two runtimes, as in `test_runtime_peer` over TCP and ZMQ; then whole stacks.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import MODEL_NAME, Recipe, Stack, StackFailed, ours, theirs
from tests.cluster.etcd import EtcdCluster
from tests.cluster.nats import NatsServer
from tests.conformance.test_runtime_peer import (  # noqa: F401 - collected here too, with the fixtures below
    ENDPOINT,
    Peer,
    client,
    events,
    peer,
    test_our_client_maps_errors_of_a_released_worker,
    test_our_client_receives_tokens_and_items_of_a_released_worker,
    test_our_subscriber_receives_released_events,
    test_released_client_calls_our_worker_and_sees_its_deregistration,
    test_released_subscriber_receives_our_events,
    test_released_worker_obeys_stop_and_kill,
    test_released_worker_serves_concurrent_requests,
    test_streams_of_a_killed_released_worker_end_at_once,
    their_client,
    worker,
)

from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import ServeOptions

pytestmark = pytest.mark.conformance

TIMEOUT_S = 60.0
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: NatsServer) -> dict[str, str]:
    """One directory, one server and loopback for both implementations."""
    both = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_REQUEST_PLANE": "nats",
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": server.url,
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **both, "HOME": str(tmp_path)}


@pytest.fixture
async def runtime(variables: dict[str, str]) -> AsyncIterator[DistributedRuntime]:
    made = DistributedRuntime(None, "file", "nats", event_plane="nats")
    yield made
    await made.shutdown()


async def test_released_client_gets_an_overload_error_from_a_full_worker_at_once(
    runtime: DistributedRuntime,
    their_client: Peer,  # noqa: F811
) -> None:
    arrived: list[str] = []

    def hold(request: Request, reply: Reply) -> None:
        arrived.append(request.id)
        reply.finish()

    await runtime.endpoint(ENDPOINT).serve(hold, ServeOptions(inflight_max=0))
    began = time.monotonic()
    while not await their_client.do(do="ids"):
        assert time.monotonic() - began < TIMEOUT_S
    began = time.monotonic()
    answer = await their_client.do(do="ask", request={"count": 1})
    assert "worker at capacity" in answer["message"]
    assert time.monotonic() - began < 5
    assert arrived == []


# Whole stacks ----------------------------------------------------------------------------------------------------


def recipe(pair: str, server: NatsServer, **more: Any) -> Recipe:
    implementations = {"ours": ours(), "theirs": theirs(peer_python())}
    frontend, engine = (implementations[name] for name in pair.split("-"))
    planes = {"DYN_REQUEST_PLANE": "nats", "DYN_EVENT_PLANE": "nats", "NATS_SERVER": server.url}
    return Recipe(name=pair, frontend=frontend, engine=engine, variables=planes, **more)


def instances(stack: Stack) -> list[dict[str, Any]]:
    folder = Path(stack.home) / "discovery" / "v1" / "instances"
    return [json.loads(path.read_text()) for path in folder.iterdir() if "generate" in path.name]


@pytest.mark.parametrize("pair", ["theirs-theirs", "theirs-ours", "ours-theirs", "ours-ours"])
def test_each_implementation_serves_the_other_through_nats(pair: str, server: NatsServer) -> None:
    try:
        with Stack(recipe(pair, server), bench_model()) as stack:
            for _ in range(5):
                status, answer = stack.send_request("POST", "/v1/chat/completions", CHAT)
                assert (status, answer["usage"]["completion_tokens"]) == (200, 8), answer
            [instance] = instances(stack)
            assert instance["transport"] == {
                "nats_tcp": f"dynamo_backend.generate-{instance['instance_id']:x}",
            }
    except StackFailed as error:
        pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize("pair", ["theirs-ours", "ours-theirs"])
def test_each_implementation_serves_the_other_through_etcd_and_nats(
    pair: str, server: NatsServer, tmp_path: Path
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        registry = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": etcd.wait().endpoints, "ETCD_LEASE_TTL": "5"}
        over_files = recipe(pair, server)
        try:
            with Stack(replace(over_files, variables={**over_files.variables, **registry}), bench_model()) as stack:
                status, answer = stack.send_request("POST", "/v1/chat/completions", CHAT)
                assert (status, answer["usage"]["completion_tokens"]) == (200, 8), answer
                [channel] = [key for key in etcd.names() if key.startswith("v1/event_channels/") and "kv-events" in key]
                record = json.loads(etcd.control("get", "--print-value-only", channel))
                assert record["transport"] == {
                    "kind": "Nats",
                    "config": {"subject_prefix": "namespace.dynamo.component.backend.endpoint.generate"},
                }
        except StackFailed as error:
            pytest.fail(str(error), pytrace=False)
