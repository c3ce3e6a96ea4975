"""HTTP workers: several frontend processes on one port, started, watched and stopped by a parent (`--http-workers`).

The kernel distributes connections over them (SO_REUSEPORT). A worker that ends is restarted. On a stop signal, the
parent forwards it and waits until all workers have drained. On Linux a worker whose parent dies ends too.
"""

import asyncio
import contextlib
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from dynamo.core.backoff import Backoff
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.parent import VARIABLE as PARENT_VARIABLE
from dynamo.core.tasks import TaskOwner

logger = logging.getLogger(__name__)

WORKERS_MAX = 256
INDEX_VARIABLE = "DYN_HTTP_WORKER_INDEX"
FOLDER_VARIABLE = "DYN_HTTP_WORKER_FOLDER"
CONFIG_ERROR = 2  # Exit status of a worker with an invalid configuration; a restart would fail in the same way.
RESTART_FIRST_S, RESTART_MAX_S = 0.2, 10.0
PROVEN_S = 30.0  # The failure of a worker that ran this long has a new cause.
DRAIN_MARGIN_S = 10.0  # In addition to the drain timeout, for closing discovery and the planes.


class Workers:
    """The worker processes of one port."""

    def __init__(
        self, command: Sequence[str], count: int, drain_s: float, variables: Mapping[str, str] | None = None
    ) -> None:
        """`command` starts each process; `variables` are added to its environment."""
        self._command = command
        self._variables = variables or {}
        self._count = count
        self._drain_s = drain_s
        self._folder = LockedDirectory("dynamo-http-")
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0
        self._tasks = TaskOwner("http workers")

    async def run(self, parent_id: int) -> int:
        """Run until stopped. Return the status of a worker with an invalid configuration, else 0."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._stopping.set)
        try:
            for index in range(self._count):
                self._tasks.start(self._keep(index, parent_id), f"worker {index}")
            await self._stopping.wait()
            await self._stop()
        finally:
            await self._tasks.cancel_and_wait(1.0)
            self._folder.close()
        return self._status

    async def _keep(self, index: int, parent_id: int) -> None:
        backoff = Backoff(RESTART_FIRST_S, RESTART_MAX_S)
        while not self._stopping.is_set():
            began_s = time.monotonic()
            process = self._processes[index] = await asyncio.create_subprocess_exec(
                *self._command,
                env={
                    **environ(),
                    **self._variables,
                    INDEX_VARIABLE: str(index),
                    FOLDER_VARIABLE: self._folder.path,
                    PARENT_VARIABLE: str(parent_id),
                },
                pass_fds=[self._folder.lock],  # The directory is in use while a worker drains.
                start_new_session=True,  # Ctrl-C reaches this process only: a worker may still be importing.
            )
            status = await process.wait()
            if self._stopping.is_set():
                return
            if status == CONFIG_ERROR:
                self._status = status
                self._stopping.set()
                return
            if time.monotonic() - began_s >= PROVEN_S:
                backoff.reset()
            wait_s = backoff.next(random.random())
            logger.error("http worker %d ended with status %d; restarting it in %.1f s", index, status, wait_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _stop(self) -> None:
        """Stop all workers at the same time; kill those that do not end in time."""
        for process in self._running():
            process.terminate()
        waits = [process.wait() for process in self._running()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s + DRAIN_MARGIN_S):
                await asyncio.gather(*waits)
        for process in self._running():
            logger.error("http worker with pid %d did not end in time; killing it", process.pid)
            process.kill()
            await process.wait()

    def _running(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self._processes.values() if process.returncode is None]


def command_of(argv: Sequence[str], port: int) -> list[str]:
    """Return the command line of a worker: this process's, with the port that was bound."""
    safe = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe, "-m", "dynamo.frontend", *argv, f"--http-port={port}"]


def check_platform() -> None:
    """Raise `ConfigError` on systems where processes cannot share a port."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("--http-workers: not supported on this system, which cannot share a port between processes")
