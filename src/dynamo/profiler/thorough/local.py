"""Local deployment: a frontend and one worker on this machine, with a discovery folder of their own."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.core.parent import VARIABLE as PARENT_VARIABLE
from dynamo.profiler.graph.components import engine_args
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.thorough.deployment import (
    REQUEST_TIMEOUT_S,
    CannotDeploy,
    RunningDeployment,
    described,
    last_line,
    served_model,
)
from dynamo.replay.event_stream import EventStream

logger = logging.getLogger(__name__)

POLL_S = 0.2
STOP_S = 10.0
"""Seconds until a process that does not stop is killed."""
ENGINE_ARGS, MODEL = "{engine_args}", "{model}"
"""Placeholders of `--local-worker`."""


@dataclass(frozen=True, slots=True)
class LocalDeployer:
    """Runs candidates as processes of this machine."""

    command: str
    """Command of a worker; `{model}` and `{engine_args}` are replaced."""
    model: str
    backend: str
    timeout_s: float

    @property
    def is_single(self) -> bool:
        """Return whether the command does not depend on the parallelism."""
        return ENGINE_ARGS not in self.command

    def deployed(self, choice: EngineChoice, directory: Path) -> AbstractAsyncContextManager[RunningDeployment]:
        """Run a frontend and the worker of an engine."""
        text = self.command.replace(MODEL, self.model)
        text = text.replace(ENGINE_ARGS, " ".join(engine_args(self.backend, choice)))
        return deployed(text, directory, self.timeout_s)


@contextlib.asynccontextmanager
async def deployed(command: str, directory: Path, timeout_s: float) -> AsyncIterator[RunningDeployment]:
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
            # Processes of ours end with this one, even if it is killed.
            is_ours = Path(line[0]).name.startswith("python")
            own = {**variables, PARENT_VARIABLE: str(os.getpid())} if is_ours else variables
            processes[name] = await stack.enter_async_context(_process(line, directory / f"{name}.log", own))
        url = f"http://127.0.0.1:{port}"
        stream = EventStream(url, REQUEST_TIMEOUT_S)
        stack.callback(stream.close)
        try:
            async with asyncio.timeout(timeout_s):
                model = await _served_model(stream, processes, directory)
        except TimeoutError:
            raise CannotDeploy(f"not ready within {timeout_s:g} s: {last_line(directory / 'worker.log')}") from None
        yield await described(stream, url, model)


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
        found = await served_model(stream)
        if found is not None:
            return found
        await asyncio.sleep(POLL_S)


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
