"""A request in frames: the released frontend's `/v1/realtime` and a worker of ours that reads it as a stream."""

import asyncio
import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


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


async def line(of: asyncio.subprocess.Process, start: str) -> str:
    assert of.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        while output := (await of.stdout.readline()).decode():
            if output.startswith(start):
                return output.strip()
    raise AssertionError(f"a process ended before it said {start!r}")


def is_listed(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=TIMEOUT_S) as response:
            return b'"realtime"' in response.read()
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.parametrize("worker_of", ["ours", "theirs"])
async def test_released_frontend_streams_frames_to_our_worker(peer: str, tmp_path: Path, worker_of: str) -> None:
    port = free_port()
    variables = {
        **os.environ,
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "HOME": str(tmp_path),
    }
    python = sys.executable if worker_of == "ours" else peer
    async with (
        process(variables, python, str(HERE / "realtime_worker.py"), "dynamo.backend.generate") as worker,
        process(variables, peer, "-m", "dynamo.frontend", "--http-port", str(port), "--http-host", "127.0.0.1"),
    ):
        await line(worker, "serving")
        async with asyncio.timeout(TIMEOUT_S):
            while not await asyncio.to_thread(is_listed, port):  # noqa: ASYNC110 - another process sets no event of ours
                await asyncio.sleep(0.1)
        async with process(variables, peer, str(HERE / "peer_websocket.py"), str(port)) as client:
            received = [await line(client, "heard") for _ in range(3)]
        assert received == [
            "heard session.created",
            "heard 1 session.update",
            "heard 2 input_audio_buffer.append",
        ]
        assert await line(worker, "ended") == "ended after 2 frames"
