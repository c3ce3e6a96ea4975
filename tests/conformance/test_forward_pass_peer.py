"""Forward-pass metrics across implementations: their consumer reads ours, and both mockers report the same for the same
load.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from tests.cluster.peers import require_peer

from dynamo.core.codec import decode
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
ENDPOINT = "dynamo.backend.generate"
TIMEOUT_S = 60.0
MOCKER = ("-m", "dynamo.mocker", "--model-name", "m", "--discovery-backend", "file", "--block-size", "16")
SMALL_STEPS = ("--max-num-batched-tokens", "128", "--max-num-seqs", "2")
REST = {"num_prefill_requests": 0, "num_decode_requests": 0}


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    ours = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **ours, "HOME": str(tmp_path)}


@contextlib.asynccontextmanager
async def process(variables: dict[str, str], *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process, and end it with the block."""
    made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=variables)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()


async def send_request(runtime: DistributedRuntime, start: int, prompt: int, answer: int) -> None:
    """Send a request with these numbers of tokens and wait for its end."""
    client = await runtime.endpoint(ENDPOINT).client()
    await client.wait_for_instances(TIMEOUT_S)
    request = {
        "model": "m",
        "token_ids": list(range(start, start + prompt)),
        "stop_conditions": {"max_tokens": answer, "ignore_eos": True},
        "sampling_options": {},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
    }
    async for _ in await client.generate(request, annotated=False):
        pass


async def steps_of(runtime: DistributedRuntime) -> list[dict[str, Any]]:
    """Return the metrics that the running mocker publishes for a certain load, of all steps that computed something."""
    received: list[ForwardPassMetrics] = []
    subscriber = await runtime.event_plane.subscriber(runtime.endpoint(ENDPOINT).id, FORWARD_PASS_TOPIC)
    events = aiter(subscriber)

    async def next_one() -> ForwardPassMetrics:
        event = await anext(events)
        assert isinstance(event, Event)
        metrics: ForwardPassMetrics = decode(event.payload, "msgpack", ForwardPassMetrics)
        received.append(metrics)
        return metrics

    async with asyncio.timeout(TIMEOUT_S):
        await next_one()  # A heartbeat shows that the subscription is active.
        await send_request(runtime, 50, 300, 6)
        await send_request(runtime, 50, 300, 3)
        await send_request(runtime, 700, 20, 40)
        while (await next_one()).wall_time or len(received) < 50:
            pass
    counters = [one.counter_id for one in received]
    assert counters == list(range(counters[0], counters[0] + len(counters)))
    assert {one.version for one in received} == {1}
    assert {int(one.worker_id) for one in received} == {
        one.instance_id for one in (await runtime.endpoint(ENDPOINT).client()).instances()
    }
    return [
        {name: getattr(one.scheduled_requests, name) for name in one.scheduled_requests.__struct_fields__}
        for one in received
        if one.wall_time
    ]


async def test_both_mockers_publish_the_same_metrics_for_the_same_load(
    peer: str, variables: dict[str, str], tmp_path: Path
) -> None:
    reported = []
    for name, python in (("ours", sys.executable), ("theirs", peer)):
        variables = {**variables, "DYN_FILE_KV": str(tmp_path / name)}
        os.environ["DYN_FILE_KV"] = variables["DYN_FILE_KV"]  # `variables` restores it.
        async with process(variables, python, *MOCKER, *SMALL_STEPS, "--model-path", bench_model()):
            runtime = DistributedRuntime()
            try:
                reported.append(await steps_of(runtime))
            finally:
                await runtime.shutdown()
    assert reported[0] == reported[1]


@pytest.mark.parametrize("engine", ["mocker", "cpu"])
async def test_released_consumer_reads_the_metrics_of_our_workers(
    peer: str, variables: dict[str, str], engine: str
) -> None:
    command = [sys.executable, "-m", f"dynamo.{engine}", "--model-name", "m", "--discovery-backend", "file"]
    async with (
        process(variables, *command) as _,
        process(variables, peer, str(HERE / "peer_forward_pass.py"), ENDPOINT) as consumer,
    ):
        runtime = DistributedRuntime()
        try:
            assert consumer.stdout is not None
            received: list[dict[str, Any]] = []
            async with asyncio.timeout(TIMEOUT_S):
                while not received:
                    line = await consumer.stdout.readline()
                    received += [json.loads(line[6:])] if line.startswith(b"heard ") else []
                await send_request(runtime, 1, 20, 5)
                while sum(one["wall_time"] > 0 for one in received) < 5:
                    line = await consumer.stdout.readline()
                    assert line, "their consumer ended"
                    received.append(json.loads(line.removeprefix(b"heard ")))
        finally:
            await runtime.shutdown()
    assert received[0]["wall_time"] == 0.0
    assert received[0]["scheduled_requests"] | REST == received[0]["scheduled_requests"]
    steps = [one["scheduled_requests"] for one in received if one["wall_time"] > 0]
    assert [(one["sum_prefill_tokens"], one["num_decode_requests"]) for one in steps] == [(20, 0)] + [(0, 1)] * 4
    assert [one["sum_decode_kv_tokens"] for one in steps] == [0, 21, 22, 23, 24]
