"""A mocker as users start it: found, called, and removed without a trace."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.ports import free_port

from dynamo.core.errors import DynamoException, InvalidArgument, WorkerUnavailable
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, StopConditions
from dynamo.protocols.kv_events import WorkerKvEvent
from dynamo.protocols.worker_control import WORKER_CONTROL
from dynamo.runtime.client import Client
from dynamo.runtime.component import Endpoint
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event

pytestmark = pytest.mark.integration

TIMEOUT_S = 60


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 4096, "eos_token_id": 2}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(1000)}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("DYN_SYSTEM_PORT", str(free_port()))


@dataclass
class ReceivedOutput:
    """Complete response of a request."""

    tokens: list[int]
    last: EngineOutput


@dataclass
class Mockers:
    """A process with mockers, and a client that calls them."""

    process: subprocess.Popen[bytes]
    runtime: DistributedRuntime
    endpoint: Endpoint
    client: Client
    log: Path

    async def send_request(self, *token_ids: int, max_tokens: int | None = 5) -> ReceivedOutput:
        stop = StopConditions(max_tokens=max_tokens)
        request = PreprocessedRequest(model="tiny-model", token_ids=list(token_ids), stop_conditions=stop)
        tokens: list[int] = []
        last: EngineOutput | None = None
        async with asyncio.timeout(TIMEOUT_S):
            async for item in await self.client.generate(request, annotated=False):
                last = msgspec.convert(item, EngineOutput)
                tokens += last.token_ids
        assert last is not None
        return ReceivedOutput(tokens, last)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, TIMEOUT_S)

    async def records(self, bucket: str) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in (await self.runtime.discovery.snapshot(bucket)).items()}


@contextlib.asynccontextmanager
async def started(model_dir: Path, tmp_path: Path, *flags: str, instances: int = 1) -> AsyncIterator[Mockers]:
    log = tmp_path / "mocker.log"
    command = [sys.executable, "-m", "dynamo.mocker", f"--model-path={model_dir}", "--discovery-backend=file", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: ASYNC220
    runtime = DistributedRuntime()
    try:
        endpoint = runtime.endpoint("dynamo.backend.generate")
        client = await endpoint.client()
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: len(client.instance_ids()) == instances or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            async for change in runtime.discovery.watch(MODEL_CARDS):
                if getattr(change, "key", None) and len(await runtime.discovery.snapshot(MODEL_CARDS)) == instances:
                    break
        yield Mockers(process, runtime, endpoint, client, log)
    finally:
        process.kill()
        process.wait()
        await runtime.shutdown()


async def test_mocker_registers_serves_and_removes_its_records(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, "--speedup-ratio=20") as mockers:
        async with asyncio.timeout(TIMEOUT_S):
            while len(records := await mockers.records(INSTANCES)) < 3:  # noqa: ASYNC110  The last one follows the card.
                await asyncio.sleep(0.02)
        found = sorted(records.values(), key=lambda record: record["endpoint"])
        assert [one["endpoint"][:23] for one in found] == ["generate", WORKER_CONTROL, "worker_kv_query_source_"]
        instance = found[0]
        (card,) = (await mockers.records(MODEL_CARDS)).values()
        assert instance["instance_id"] == card["instance_id"]
        assert card["card_json"]["display_name"] == "tiny-model"
        assert card["card_json"]["kv_cache_block_size"] == 64

        received = await mockers.send_request(5, 6, 7, max_tokens=40)
        assert len(received.tokens) == 40
        assert received.last.finish_reason == "length"
        assert received.last.completion_usage is not None
        assert received.last.completion_usage.total_tokens == 43

        assert await mockers.end() == 0
        assert await mockers.records(INSTANCES) == {}
        left = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        assert left == []
        assert "worker ready: model tiny-model" in mockers.log.read_text()


async def test_invalid_requests_are_refused_and_the_mocker_keeps_serving(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, "--speedup-ratio=0") as mockers:
        with pytest.raises(InvalidArgument, match="must be from 0 to"):
            await mockers.send_request(1, -1)
        with pytest.raises(InvalidArgument, match="is required by the mocker worker"):
            await mockers.send_request(1, max_tokens=None)
        assert len((await mockers.send_request(1)).tokens) == 5


async def test_system_port_serves_health_and_metrics(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, "--speedup-ratio=0") as mockers:
        await mockers.send_request(5, 6, 7)
        url = f"http://127.0.0.1:{os.environ['DYN_SYSTEM_PORT']}"
        health = json.loads(await asyncio.to_thread(read, f"{url}/health"))
        assert (health["status"], health["endpoints"]) == ("ready", {"generate": "ready"})
        text = await asyncio.to_thread(metrics)
        assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny-model"} 1' in text
        assert "dynamo_component_requests_total{" in text
        assert "dynamo_component_total_blocks{" in text


async def test_running_response_survives_the_drain_of_its_worker(model_dir: Path, tmp_path: Path) -> None:
    # 60 tokens take seven seconds: the worker is stopped within them on a busy machine too.
    async with started(model_dir, tmp_path, "--speedup-ratio=0.05") as mockers:
        requested = asyncio.create_task(mockers.send_request(5, 6, 7, max_tokens=60))
        await until(running)
        status = asyncio.create_task(mockers.end(signal.SIGINT))
        assert len((await requested).tokens) == 60
        assert await status == 0


async def test_loading_worker_stops_on_sigterm(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo.mocker", f"--model-path={model_dir}", "--startup-time=60"]
    log = tmp_path / "mocker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)  # noqa: ASYNC220
    try:
        await until(lambda: "loading" in log.read_text())
        process.terminate()
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
        assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []
    finally:
        process.kill()
        process.wait()


async def test_second_signal_ends_the_worker_at_once(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path) as mockers:
        requested = asyncio.create_task(mockers.send_request(5, 6, 7, max_tokens=4000))
        await until(running)
        mockers.process.send_signal(signal.SIGTERM)
        await until(lambda: "SIGTERM: stopping" in mockers.log.read_text())
        assert await mockers.end() == 70
        with pytest.raises(DynamoException):
            await requested


async def test_several_workers_in_one_process_have_their_own_identities(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, "--num-workers=3", "--speedup-ratio=0", instances=3) as mockers:
        await asyncio.gather(*(mockers.send_request(index + 1, max_tokens=3) for index in range(6)))
        text = await asyncio.to_thread(metrics)
        for engine in range(3):
            assert f'vllm:e2e_request_latency_seconds_count{{engine="{engine}",model_name="tiny-model"}} 2' in text
        assert await mockers.end() == 0
        assert await mockers.records(INSTANCES) == {}


async def test_worker_publishes_kv_events(model_dir: Path, tmp_path: Path) -> None:
    async with started(model_dir, tmp_path, "--speedup-ratio=0", "--block-size=4") as mockers:
        subscriber = await mockers.runtime.event_plane.subscriber(mockers.endpoint.id, "kv-events")
        async with asyncio.timeout(TIMEOUT_S):
            prompt = 0
            reported: list[WorkerKvEvent] = []
            listening = asyncio.create_task(anext(aiter(subscriber)))
            while not listening.done():  # A subscription over ZMQ takes effect after a moment.
                prompt += 1
                await mockers.send_request(*[prompt] * 9)
            event = await listening
        assert isinstance(event, Event)
        reported = msgspec.msgpack.decode(event.payload, type=list[WorkerKvEvent])
        assert {one.worker_id for one in reported} == set(mockers.client.instance_ids())
        await subscriber.close()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--model-path=/nowhere/at/all", "error: model /nowhere/at/all: no such directory"),
        ("--speedup-rati=3", "error: unknown argument --speedup-rati; did you mean --speedup-ratio?"),
        ("--block-size=0", "error: --block-size 0: expected 1 or more"),
    ],
)
def test_invalid_option_is_one_line_and_status_two(flag: str, sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.mocker", flag], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def metrics() -> str:
    return read(f"http://127.0.0.1:{os.environ['DYN_SYSTEM_PORT']}/metrics")


def running() -> bool:
    return 'vllm:num_requests_running{engine="0",model_name="tiny-model"} 1' in metrics()


async def until(is_true: Callable[[], bool]) -> None:
    """Poll another process until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await asyncio.to_thread(is_true):  # noqa: ASYNC110  Another process sets no event of ours.
            await asyncio.sleep(0.02)


BREAKS_ON_REQUEST = """
import sys
from dynamo.backend.config import WorkerOptions
from dynamo.backend.sample import EchoEngine
from dynamo.backend.process import run_worker
from dynamo.core.config import load

class Breaking(EchoEngine):
    async def start(self, host):
        self.host = host
        if {breaks_at_start}:
            raise RuntimeError("out of memory")
        return await super().start(host)

    def submit(self, request, reply):
        super().submit(request, reply)
        self.host.fail(RuntimeError("out of memory"))

sys.exit(run_worker(load(WorkerOptions, []), lambda: Breaking({model_dir!r})))
"""


@pytest.mark.parametrize("breaks_at_start", [False, True])
async def test_failed_engine_ends_its_process_and_requests_migrate(
    model_dir: Path, tmp_path: Path, breaks_at_start: bool
) -> None:
    program = BREAKS_ON_REQUEST.format(model_dir=str(model_dir), breaks_at_start=breaks_at_start)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    runtime = DistributedRuntime()
    try:
        if not breaks_at_start:
            client = await runtime.endpoint("dynamo.backend.generate").client()
            await client.wait_for_instances(TIMEOUT_S)
            stream = await client.generate(PreprocessedRequest(model="echo", token_ids=[1, 2, 3]))
            with pytest.raises(WorkerUnavailable):
                async for _ in stream:
                    pass
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert process.returncode == 1
        assert b"RuntimeError: out of memory" in errors
        assert [path for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []
    finally:
        if process.returncode is None:
            process.kill()
        await runtime.shutdown()
