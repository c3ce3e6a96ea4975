"""Routing services of both implementations: the same requests get the same responses.

Statuses are equal for all requests, bodies for all successful ones; error messages differ.
"""

import asyncio
import contextlib
import itertools
import json
import os
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from benchmarks.ports import free_port
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

TIMEOUT_S = 60.0
PROMPT = list(range(1, 14))


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


class Service:
    """One running service."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def send_request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._request, method, path, body)

    def _request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        data = body.encode() if isinstance(body, str) else None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text.decode()


@contextlib.asynccontextmanager
async def running(python: str, module: str, home: Path, *more: str) -> AsyncIterator[Service]:
    service = Service(free_port())
    variables = {**os.environ, "HOME": str(home), "DYN_LOG": "error"}
    command = [python, "-m", module, "--port", str(service.port), *more]
    process = await asyncio.create_subprocess_exec(*command, env=variables)
    try:
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                await service.send_request("GET", "/health")
                break
            except OSError:
                assert process.returncode is None and time.monotonic() < until, f"{command} does not answer"
                await asyncio.sleep(0.1)
        yield service
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def both(peer: str, module: str, home: Path, *more: str) -> AsyncIterator[tuple[Service, Service]]:
    async with running(peer, module, home, *more) as theirs, running(sys.executable, module, home, *more) as ours:
        yield theirs, ours


async def same(theirs: Service, ours: Service, method: str, path: str, body: Any = None) -> Any:
    """Return the response of both implementations to a request, which must be equal."""
    (their_status, their_body), (our_status, our_body) = (
        await theirs.send_request(method, path, body),
        await ours.send_request(method, path, body),
    )
    where = f"{method} {path} {body}: {their_body} {our_body}"
    assert our_status == their_status, where
    if their_status < 400:
        assert in_order(our_body) == in_order(their_body), where
    else:
        assert type(our_body) is type(their_body), where
    return their_body


def in_order(body: Any) -> Any:
    """Sort a list whose order the released service does not define."""
    return sorted(body, key=json.dumps) if isinstance(body, list) else body


M = {"model_name": "m"}


async def test_slot_trackers_return_equal_responses(peer: str, tmp_path: Path) -> None:
    worker = {"worker_id": 1, "block_size": 4, "dp_start": 0, "dp_size": 2, **M}
    add = {"request_id": "a", "worker_id": 1, "dp_rank": 0, "sequence_hashes": [1, 2, -3], "new_isl_tokens": 12, **M}
    async with both(peer, "dynamo.slot_tracker", tmp_path) as (theirs, ours):
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/workers", None),
            ("GET", "/loads", None),
            ("GET", "/nothing", None),
            ("GET", "/add", None),
            ("POST", "/register", worker),
            ("POST", "/register", worker),
            ("POST", "/register", {**worker, "worker_id": 2, "block_size": 8}),
            ("POST", "/register", {**worker, "worker_id": 2, "dp_size": 0}),
            ("POST", "/register", {**worker, "worker_id": 2, "model_name": "n", "block_size": 0}),
            ("POST", "/register", {"worker_id": 2}),
            ("POST", "/register", "x"),
            ("POST", "/register", {**worker, "worker_id": 2, "routing_group": "g", "dp_start": 2}),
            ("GET", "/workers", None),
            ("GET", "/workers?routing_group=g", None),
            ("POST", "/add", add),
            ("POST", "/add", add),
            ("POST", "/add", {**add, "request_id": "b", "worker_id": 9}),
            ("POST", "/add", {**add, "request_id": "b", "dp_rank": 7}),
            ("POST", "/add", {**add, "request_id": "b", "model_name": "n"}),
            ("POST", "/add", {**add, "request_id": "b", "sequence_hashes": [1, 2, 4], "new_isl_tokens": 4}),
            ("GET", "/loads", None),
            ("GET", "/loads?model_name=m&routing_group=g", None),
            ("POST", "/potential_loads", {"sequence_hashes": [1, 2, 5], "new_isl_tokens": 12, **M}),
            ("POST", "/potential_loads", {"sequence_hashes": [7], **M}),
            ("POST", "/potential_loads", {"sequence_hashes": [7], "model_name": "n"}),
            ("POST", "/prefill_complete", {"request_id": "a", **M}),
            ("POST", "/prefill_complete", {"request_id": "zz", **M}),
            ("GET", "/loads", None),
            ("POST", "/free", {"request_id": "a", **M}),
            ("POST", "/free", {"request_id": "a", **M}),
            ("POST", "/free", {"request_id": "a", "model_name": "n"}),
            ("POST", "/free", {}),
            ("GET", "/loads", None),
            ("GET", "/replica_sync/peers", None),
            ("POST", "/replica_sync/register_peer", {"endpoint": "tcp://127.0.0.1:1"}),
            ("POST", "/unregister", {"worker_id": 9, **M}),
            ("POST", "/unregister", {"worker_id": 1, **M}),
            ("GET", "/loads", None),
        ):
            await same(theirs, ours, method, path, body)


class Engine:
    """Messages of an engine on its two sockets, sent twice: a message may be lost and requested again."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)  # It receives the subscriptions, which subscribers do not confirm.
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.replay = self.context.socket(zmq.ROUTER)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.replay.bind_to_random_port("tcp://127.0.0.1")
        self.log: list[bytes] = []
        self.received_requests = 0
        self.answering = asyncio.get_running_loop().create_task(self.answer())

    async def until_subscribed(self, count: int) -> None:
        """Wait for that many subscriptions: later events reach the subscribers."""
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(count):
                assert (await self.pub.recv()).startswith(b"\x01")

    async def publish_event(self, *events: Any, is_lost: bool = False) -> None:
        number, payload = len(self.log), msgspec.msgpack.encode([time.time(), list(events), 0])
        self.log.append(payload)
        if not is_lost:
            await self.pub.send_multipart([b"kv", struct.pack(">Q", number), payload])

    async def answer(self) -> None:
        while True:
            frames = await self.replay.recv_multipart()
            self.received_requests += 1
            (start,) = struct.unpack(">Q", frames[-1])
            for number in range(start, len(self.log)):
                await self.replay.send_multipart([frames[0], b"", struct.pack(">Q", number), self.log[number]])
            await self.replay.send_multipart([frames[0], b"", struct.pack(">q", -1), b""])

    async def close(self) -> None:
        self.answering.cancel()
        await asyncio.wait([self.answering])
        self.pub.close(linger=0)
        self.replay.close(linger=0)
        self.context.term()


def stored(hashes: list[int], parent: int | None, tokens: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "lora_id": None, "medium": medium, "lora_name": None, "group_idx": 0,
    }  # fmt: skip


async def agreed(theirs: Service, ours: Service, body: dict[str, Any], wanted: Any) -> None:
    """Wait until both return the wanted value."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            answers = await theirs.send_request("POST", "/query", body), await ours.send_request("POST", "/query", body)
            if answers[0] == answers[1] == (200, wanted):
                return
            await asyncio.sleep(0.1)


async def test_indexers_return_equal_responses_for_a_plain_engine(peer: str, tmp_path: Path) -> None:
    engine, silent = Engine(), free_port()
    register = {
        "instance_id": 7,
        "endpoint": f"tcp://127.0.0.1:{engine.port}",
        "replay_endpoint": f"tcp://127.0.0.1:{engine.replay_port}",
        "block_size": 4,
        **M,
    }
    other = {"instance_id": 8, "endpoint": f"tcp://127.0.0.1:{silent}", "block_size": 4, **M}
    try:
        async with both(peer, "dynamo.indexer", tmp_path) as (theirs, ours):
            for method, path, body in (
                ("GET", "/health", None),
                ("GET", "/workers", None),
                ("GET", "/dump", None),
                ("GET", "/peers", None),
                ("GET", "/nothing", None),
                ("GET", "/query", None),
                ("POST", "/register", register),
                ("POST", "/register", register),
                ("POST", "/register", {**other, "block_size": 8}),
                ("POST", "/register", {**other, "endpoint": "bogus"}),
                ("POST", "/register", {"instance_id": 8}),
                ("POST", "/register", "x"),
                ("POST", "/register", {**other, "dp_rank": 1}),
                ("POST", "/register", {**other, "instance_id": 9, "routing_group": "g"}),
                ("GET", "/dump", None),
                ("POST", "/query", {"token_ids": PROMPT, **M}),
                ("POST", "/query", {"token_ids": PROMPT, "model_name": "n"}),
                ("POST", "/query", {"model_name": "n"}),
                ("POST", "/query_by_hash", {"block_hashes": [1, -2], **M}),
                ("POST", "/query_by_hash", {"block_hashes": [1], "cache_salt": "s", **M}),
                ("POST", "/register_peer", {"url": "http://127.0.0.1:1"}),
                ("GET", "/peers", None),
                ("POST", "/deregister_peer", {"url": "http://127.0.0.1:1"}),
                ("POST", "/deregister_peer", {"url": "http://127.0.0.1:1"}),
                ("POST", "/reopen_logs", None),
            ):
                await same(theirs, ours, method, path, body)
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    workers = (
                        (await theirs.send_request("GET", "/workers"))[1],
                        (await ours.send_request("GET", "/workers"))[1],
                    )
                    if in_order(workers[0]) == in_order(workers[1]) and all(
                        one["status"] == "active" for one in workers[0]
                    ):
                        break
                    await asyncio.sleep(0.1)
            await engine.until_subscribed(2)
            await engine.publish_event(stored([101, 102], None, PROMPT[:8]))
            await engine.publish_event(stored([103], 102, PROMPT[8:12], "CPU"), is_lost=True)
            await engine.publish_event(stored([201], None, [21, 22, 23, 24]))
            held = {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12}
            wanted = {"scores": {"7": {"0": 8}}, "frequencies": [], "instances": {"7": held}}
            await agreed(theirs, ours, {"token_ids": PROMPT, **M}, wanted)
            assert engine.received_requests >= 2
            await same(theirs, ours, "POST", "/query", {"token_ids": [21, 22, 23, 24], **M})
            await same(theirs, ours, "POST", "/query", {"token_ids": PROMPT, "lora_name": "l", **M})
            await self_reload(peer, tmp_path, theirs, ours)
            await engine.publish_event({"type": "BlockRemoved", "block_hashes": [102], "medium": "GPU"})
            await engine.publish_event({"type": "AllBlocksCleared"})
            await agreed(
                theirs, ours, {"token_ids": [21, 22, 23, 24], **M}, {"scores": {}, "frequencies": [], "instances": {}}
            )
            for method, path, body in (
                ("POST", "/unregister", {"instance_id": 99, **M}),
                ("POST", "/unregister", {"instance_id": 7, "model_name": "n"}),
                ("POST", "/unregister", {"instance_id": 7, **M}),
                ("POST", "/unregister", {"instance_id": 9, "routing_group": "g", **M}),
            ):
                await same(theirs, ours, method, path, body)
    finally:
        await engine.close()


async def self_reload(peer: str, home: Path, theirs: Service, ours: Service) -> None:
    """A new indexer of ours loads the state of either implementation, and a released one loads ours."""
    body = {"token_ids": PROMPT, **M}
    for python, source in ((sys.executable, theirs), (sys.executable, ours), (peer, ours)):
        async with running(python, "dynamo.indexer", home, "--peers", f"http://127.0.0.1:{source.port}") as fresh:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    status, answer = await fresh.send_request("POST", "/query", body)
                    if status == 200 and answer["scores"] == {"7": {"0": 8}}:
                        break
                    await asyncio.sleep(0.1)
            assert answer["instances"]["7"]["longest_matched"] == 12


async def test_selection_services_return_equal_responses(peer: str, tmp_path: Path) -> None:
    engine = Engine()
    worker = {
        "worker_id": 11,
        "block_size": 4,
        "endpoint": "http://127.0.0.1:8000",
        "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{engine.port}"},
        "replay_endpoint": f"tcp://127.0.0.1:{engine.replay_port}",
        **M,
    }
    requested = {"token_ids": PROMPT, **M}
    try:
        async with both(peer, "dynamo.select_service", tmp_path) as (theirs, ours):
            for method, path, body in (
                ("GET", "/health", None),
                ("GET", "/ready", None),
                ("GET", "/workers", None),
                ("GET", "/loads", None),
                ("GET", "/dump", None),
                ("GET", "/nothing", None),
                ("PUT", "/workers", {}),
                ("POST", "/workers", {}),
                ("POST", "/workers", {"worker_id": 1}),
                ("POST", "/workers", {**worker, "worker_id": 1, "data_parallel_size": 2}),
                ("GET", "/ready", None),
                ("POST", "/select", requested),
                ("POST", "/workers", worker),
                ("POST", "/workers", {**worker, "worker_id": 12, "block_size": 8}),
                ("GET", "/workers", None),
                ("GET", "/loads", None),
                ("GET", "/dump", None),
                ("PATCH", "/workers/12", {"taints": ["gold"]}),
                ("PATCH", "/workers/99", {}),
                ("DELETE", "/workers/12", None),
                ("DELETE", "/workers/12", None),
            ):
                await same(theirs, ours, method, path, body)
            await engine.until_subscribed(2)
            await engine.publish_event(stored([101, 102], None, PROMPT[:8]))
            await engine.publish_event(stored([103], 102, PROMPT[8:12], "CPU"), is_lost=True)
            await engine.publish_event(stored([201], None, [21, 22, 23, 24]))
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    answers = [await one.send_request("POST", "/select", requested) for one in (theirs, ours)]
                    if all(answer["overlap"]["longest_matched"] == 12 for _, answer in answers):
                        break
                    await asyncio.sleep(0.1)
            for method, path, body in (
                ("POST", "/select", requested),
                ("POST", "/select", {**requested, "selection_id": "s1"}),
                ("POST", "/select", {**requested, "allowed_worker_ids": [99]}),
                ("POST", "/select", {**requested, "routing_constraints": {"required_taints": ["iron"]}}),
                ("POST", "/select", {**requested, "token_ids": []}),
                ("POST", "/select", M),
                ("POST", "/reservations", {"selection_id": "s1", **M}),
                ("POST", "/reservations", {"selection_id": "s1", **M}),
                ("POST", "/reservations", M),
                ("GET", "/loads", None),
                ("POST", "/select_and_reserve", {**requested, "selection_id": "s2"}),
                ("POST", "/select_and_reserve", {**requested, "selection_id": "s2"}),
                ("GET", "/loads", None),
                ("POST", "/reservations", {**requested, "selection_id": "s3", "worker_id": 11}),
                ("POST", "/reservations", {**requested, "selection_id": "s4", "worker_id": 99}),
                ("POST", "/reservations", {**requested, "selection_id": "s4", "worker_id": 11, "dp_rank": 7}),
                ("POST", "/reservations", {"selection_id": "s4", "worker_id": 11, **M}),
                ("GET", "/loads", None),
                ("POST", "/potential_loads", requested),
                ("POST", "/overlap_scores", requested),
                ("POST", "/overlap_scores", {**requested, "model_name": "n"}),
                ("POST", "/reservations/s1/prefill_complete", None),
                ("POST", "/reservations/zz/prefill_complete", None),
                ("POST", "/reservations/s1/output_block", {"decay_fraction": 0.5}),
                ("GET", "/loads", None),
                ("POST", "/reservations/s2/output_block", {"decay_fraction": 0.25}),
                ("POST", "/reservations/s1/output_block", {"decay_fraction": 2}),
                ("POST", "/reservations/zz/output_block", {}),
                ("GET", "/loads", None),
                ("DELETE", "/reservations/s1", None),
                ("DELETE", "/reservations/s1", None),
                ("DELETE", "/reservations/s2", None),
                ("DELETE", "/reservations/s3", None),
                ("GET", "/loads", None),
                ("DELETE", "/workers/11", None),
                ("GET", "/loads", None),
            ):
                await same(theirs, ours, method, path, body)
    finally:
        await engine.close()


async def test_selection_services_share_sessions_and_keyed_hashes(peer: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    ports = [free_port(), free_port()]
    flags = [
        *("--session-affinity-ttl-secs", "600", "--router-tracking-hash", "keyed-xxh3-v1"),
        *("--router-tracking-key-file", str(key), "--router-tracking-key-id", "2026-01"),
    ]

    def meshed(mine: int) -> list[str]:
        peers = f"tcp://127.0.0.1:{ports[1 - mine]}"
        return [*flags, "--replica-sync-port", str(ports[mine]), "--replica-sync-peers", peers]

    async with (
        running(peer, "dynamo.select_service", tmp_path, *meshed(0)) as theirs,
        running(sys.executable, "dynamo.select_service", tmp_path, *meshed(1)) as ours,
    ):
        for number in range(1, 9):
            worker = {
                "worker_id": number, "model_name": "m", "routing_group": "g", "block_size": 4,
                "endpoint": f"http://w{number}", "kv_events_endpoint": f"tcp://127.0.0.1:{free_port()}",
            }  # fmt: skip
            for implementation in (theirs, ours):
                assert (await implementation.send_request("POST", "/workers", worker))[0] == 201
        requested = {"model_name": "m", "routing_group": "g", "token_ids": PROMPT}

        async def placed(implementation: Service, **more: Any) -> dict[str, Any]:
            status, answer = await implementation.send_request("POST", "/select_and_reserve", {**requested, **more})
            assert status in (200, 201), answer
            return dict(answer)

        for salted in ({}, {"lora_name": "a", "cache_salt": "s"}):
            assert (await placed(theirs, **salted))["sequence_hashes"] == (await placed(ours, **salted))[
                "sequence_hashes"
            ]

        for teller, hearer in ((theirs, ours), (ours, theirs)):
            for number in range(3):
                async with asyncio.timeout(TIMEOUT_S):
                    for again in itertools.count():  # Messages sent before a peer subscribes are lost.
                        session = {"session_id": f"{teller.port}-{number}-{again}"}
                        first = await placed(teller, **session)
                        await asyncio.sleep(0.2)
                        found = [
                            (await hearer.send_request("POST", "/select", {**requested, **session}))[1]
                            for _ in range(8)
                        ]
                        if {one["worker_id"] for one in found} == {first["worker_id"]}:
                            break
