"""HTTP workers: several frontend processes on one port, started, watched and stopped by a parent (`--http-workers`).

The kernel distributes connections over them (SO_REUSEPORT). A worker that ends is restarted. On a stop signal, the
parent forwards it and waits until all workers have drained. On Linux a worker whose parent dies ends too.
"""

import logging
import random
import signal
import sys
from collections.abc import Mapping, Sequence

from dynamo.core.backoff import Backoff
from dynamo.core.config import environ
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.supervisor import Exited, Process, Signalled, Supervisor
from dynamo.frontend.config import FOLDER_VARIABLE, INDEX_VARIABLE

logger = logging.getLogger(__name__)

CONFIG_ERROR = 2  # Exit status of a worker with an invalid configuration; a restart would fail in the same way.
RESTART_FIRST_S, RESTART_MAX_S = 0.2, 10.0
PROVEN_S = 30.0  # The failure of a worker that ran this long has a new cause.
DRAIN_MARGIN_S = 10.0  # In addition to the drain timeout, for closing discovery and the planes.


class HttpWorkers:
    """The worker processes of one port."""

    def __init__(
        self, command: Sequence[str], count: int, drain_s: float, variables: Mapping[str, str] | None = None
    ) -> None:
        """`command` starts each process; `variables` are added to its environment."""
        self._drain_s = drain_s
        self._folder = LockedDirectory("dynamo-http-")
        self._supervisor = Supervisor(environ(), stop_signals=(signal.SIGTERM, signal.SIGINT))
        self._processes = {
            str(index): Process(
                name=str(index),
                command=tuple(command),
                variables={**(variables or {}), INDEX_VARIABLE: str(index), FOLDER_VARIABLE: str(self._folder.path)},
                pass_fds=(self._folder.lock,),  # The directory is in use while a worker drains.
            )
            for index in range(count)
        }
        self._backoffs = {name: Backoff(RESTART_FIRST_S, RESTART_MAX_S) for name in self._processes}

    def run(self) -> int:
        """Run until stopped. Return the status of a worker with an invalid configuration, else 0."""
        try:
            with self._supervisor.watching():
                for process in self._processes.values():
                    self._supervisor.start(process)
                status = self._supervise()
                self._stop()
        finally:
            self._folder.close()
        return status

    def _supervise(self) -> int:
        """Restart workers that end, until a stop signal or an invalid configuration; return the exit status."""
        while True:
            for event in self._supervisor.wait():
                if isinstance(event, Signalled):
                    return 0
                if event.status == CONFIG_ERROR:
                    return event.status
                self._restart(event)

    def _restart(self, exited: Exited) -> None:
        backoff = self._backoffs[exited.name]
        if exited.ran_s >= PROVEN_S:
            backoff.reset()
        wait_s = backoff.next(random.random())
        logger.error("http worker %s ended with status %d; restarting it in %.1f s", exited.name, exited.status, wait_s)
        self._supervisor.restart(self._processes[exited.name], wait_s)

    def _stop(self) -> None:
        """Stop all workers at the same time; kill those that do not end in time."""
        timeout_s = self._drain_s + DRAIN_MARGIN_S
        left = self._supervisor.terminate([*self._processes], timeout_s, until_signal=False)
        for name in left:
            logger.error("http worker with pid %s did not end in time; killing it", self._supervisor.pid(name))
        self._supervisor.kill(left)


def command_of(argv: Sequence[str], port: int) -> list[str]:
    """Return the command line of a worker: this process's, with the port that was bound."""
    safe = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe, "-m", "dynamo.frontend", *argv, f"--http-port={port}"]
