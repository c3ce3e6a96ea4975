"""Local deployment: a frontend and one worker on this machine, with a discovery folder of their own."""

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.replay.event_stream import EventStream

logger = logging.getLogger(__name__)

POLL_S = 0.2
STOP_S = 10.0
"""Seconds until a process that does not stop is killed."""
REQUEST_TIMEOUT_S = 1800.0
KV_METRICS = ("dynamo_frontend_model_total_kv_blocks", "dynamo_frontend_model_kv_cache_block_size")


class CannotDeploy(DynamoException):
    """The processes ended, or were not ready in time; the message has the last line of the log."""


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """A running deployment."""

    stream: EventStream
    model: str
    kv_blocks: int
    """Blocks of the worker's cache; 0 if it does not report them."""
    block_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the cache has room for; 0 if it is not known."""
        return self.kv_blocks * self.block_tokens

    def sequences(self, tokens: int) -> int | None:
        """Return how many sequences of `tokens` the cache has room for, in whole blocks; None if it is not known."""
        return self.kv_blocks // -(-(tokens + 1) // self.block_tokens) if self.kv_tokens else None


@contextlib.asynccontextmanager
async def deployed(command: str, directory: Path, timeout_s: float) -> AsyncIterator[LocalDeployment]:
    """Run a frontend and the worker of a command line, with logs in `directory`. Raise `CannotDeploy` if they do not serve."""
    port = _free_port()
    frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    words = shlex.split(command)
    if not words:
        raise ConfigError("--local-worker: must be a command line")
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-profiler-"))
        variables = {**environ(), "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": folder}
        processes = {}
        for name, line in (("frontend", frontend), ("worker", words)):
            processes[name] = await stack.enter_async_context(_process(line, directory / f"{name}.log", variables))
        stream = EventStream(f"http://127.0.0.1:{port}", REQUEST_TIMEOUT_S)
        stack.callback(stream.close)
        try:
            async with asyncio.timeout(timeout_s):
                model = await _served_model(stream, processes, directory)
        except TimeoutError:
            raise CannotDeploy(f"not ready within {timeout_s:g} s: {last_line(directory / 'worker.log')}") from None
        yield LocalDeployment(stream, model, *await _cache(stream))


async def _served_model(
    stream: EventStream, processes: Mapping[str, asyncio.subprocess.Process], directory: Path
) -> str:
    """Return the name of the model when the frontend serves one."""
    while True:
        for name, process in processes.items():
            if process.returncode is not None:
                raise CannotDeploy(
                    f"{name} ended with exit code {process.returncode}: {last_line(directory / f'{name}.log')}"
                )
        with contextlib.suppress(DynamoException, msgspec.DecodeError):
            listed = msgspec.json.decode(await stream.get("/v1/models"))
            names = [str(one["id"]) for one in listed.get("data", [])]
            if names:
                return names[0]
        await asyncio.sleep(POLL_S)


async def _cache(stream: EventStream) -> tuple[int, int]:
    """Return the blocks of the cache, and the tokens of a block."""
    text = (await stream.get("/metrics")).decode("utf-8", "replace")
    blocks, tokens = (
        max(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)), default=0.0)
        for name in KV_METRICS
    )
    return int(blocks), int(tokens)


@contextlib.asynccontextmanager
async def _process(
    command: list[str], log: Path, variables: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process in a group of its own, and stop the group at the end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=file,
                stderr=file,
                stdin=asyncio.subprocess.DEVNULL,
                env=dict(variables),
                start_new_session=True,
            )
        except OSError as error:
            raise CannotDeploy(f"cannot start {command[0]}: {error.strerror or error}") from None
        try:
            yield process
        finally:
            await _stopped(process)


async def _stopped(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def last_line(path: Path) -> str:
    """Return the last line of a log that is not empty."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
