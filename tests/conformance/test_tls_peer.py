"""Our runtime and the released one over TLS, both presenting and verifying certificates: each calls the other's
workers.

First two runtimes as in `test_runtime_peer`, then whole stacks.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import MODEL_NAME, Recipe, Stack, StackFailed, ours, theirs
from tests.certificates import Certificates
from tests.conformance.test_runtime_peer import (  # noqa: F401 - collected here too, with the fixtures below
    ENDPOINT,
    START_TIMEOUT_S,
    TIMEOUT_S,
    Peer,
    client,
    peer,
    receive_event,
    runtime,
    test_our_client_maps_errors_of_a_released_worker,
    test_our_client_receives_tokens_and_items_of_a_released_worker,
    test_released_client_calls_our_worker_and_sees_its_deregistration,
    test_released_worker_obeys_stop_and_kill,
    test_released_worker_serves_concurrent_requests,
    test_streams_of_a_killed_released_worker_end_at_once,
    their_client,
    until_ids,
    worker,
)

from dynamo.core.errors import WorkerUnavailable
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

pytestmark = pytest.mark.conformance


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


def plain(folder: Path) -> dict[str, str]:
    return {
        "DYN_FILE_KV": str(folder / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificates: Certificates) -> dict[str, str]:
    """One directory, one authority and loopback for both implementations."""
    both = {**plain(tmp_path), **certificates.variables()}
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **both, "HOME": str(tmp_path)}


async def one(request: dict[str, Any], context: Any) -> Any:
    yield {"token_ids": [1], "index": 0}


def without_tls(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith("DYN_TCP_TLS_")}


async def test_our_plaintext_client_fails_at_once_against_a_released_tls_worker(
    worker: Peer,  # noqa: F811
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in set(variables) - set(without_tls(variables)):
        monkeypatch.delenv(name)
    ours = DistributedRuntime()
    asking = await ours.endpoint(ENDPOINT).client()
    await asking.wait_for_instances(START_TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerUnavailable, match="DYN_TCP_TLS"):
            await receive_event(asking, {"count": 1})
    await ours.shutdown()


async def test_our_tls_client_cannot_connect_to_a_released_plaintext_worker(
    peer: str,  # noqa: F811
    variables: dict[str, str],
    runtime: DistributedRuntime,  # noqa: F811
) -> None:
    theirs = await Peer.start(peer, without_tls(variables), "peer_worker.py")
    try:
        await theirs.line("serving")
        asking = await runtime.endpoint(ENDPOINT).client()
        await asking.wait_for_instances(START_TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(WorkerUnavailable):
                await receive_event(asking, {"count": 1})
    finally:
        await theirs.stop()


async def test_released_plaintext_client_does_not_hang_on_our_tls_worker(
    peer: str,  # noqa: F811
    variables: dict[str, str],
    runtime: DistributedRuntime,  # noqa: F811
) -> None:
    theirs = await Peer.start(peer, without_tls(variables), "peer_client.py")
    try:
        await runtime.endpoint(ENDPOINT).serve(GeneratorHandler(one, runtime.tasks))
        await until_ids(theirs, [runtime.instance_id])
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await theirs.do(do="ask", request={"count": 1})
        assert answer["heard"] == [] and answer["error"] is not None
    finally:
        await theirs.stop()


async def test_both_implementations_refuse_clients_without_certificate(
    peer: str,  # noqa: F811
    variables: dict[str, str],
    runtime: DistributedRuntime,  # noqa: F811
) -> None:
    names = {"DYN_TCP_TLS_CLIENT_CERT_PATH", "DYN_TCP_TLS_CLIENT_KEY_PATH"}
    theirs = await Peer.start(
        peer, {name: value for name, value in variables.items() if name not in names}, "peer_client.py"
    )
    try:
        await runtime.endpoint(ENDPOINT).serve(GeneratorHandler(one, runtime.tasks))
        await until_ids(theirs, [runtime.instance_id])
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await theirs.do(do="ask", request={"count": 1})
        assert answer["heard"] == [] and answer["error"] is not None
    finally:
        await theirs.stop()


# Whole stacks ----------------------------------------------------------------------------------------------------


CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 8}


@pytest.mark.parametrize("pair", ["theirs-ours", "ours-theirs", "ours-ours"])
def test_each_implementation_serves_the_other_over_tls(pair: str, certificates: Certificates) -> None:
    implementations = {"ours": ours(), "theirs": theirs(peer_python())}
    frontend, engine = (implementations[name] for name in pair.split("-"))
    recipe = Recipe(name=pair, frontend=frontend, engine=engine, variables=certificates.variables())
    try:
        with Stack(recipe, bench_model()) as stack:
            for _ in range(3):
                status, answer = stack.send_request("POST", "/v1/chat/completions", CHAT)
                assert (status, answer["usage"]["completion_tokens"]) == (200, 8), answer
            [record] = [
                path
                for path in (Path(stack.home) / "discovery" / "v1" / "instances").iterdir()
                if "generate" in path.name
            ]
            host, _, port = record.read_text().partition('"tcp":"')[2].partition("/")[0].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
                plain.sendall(b"\x00\x01p\x00\x00\x00\x00\x00\x00")
                received = plain.recv(100)
            assert received == b"" or received.startswith(b"\x15\x03"), "the worker talks to whoever does not speak TLS"
    except StackFailed as error:
        pytest.fail(str(error), pytrace=False)
