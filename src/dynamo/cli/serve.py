"""Serving: `dynamo serve` starts a graph, waits until it is ready, prints how to use it, and stops it cleanly."""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from dynamo.cli import options
from dynamo.cli.announcement import Announcement
from dynamo.cli.autoscale import FOLLOW_S, Autoscaler, PlannerFollower, explain, planner_variables, visible_devices
from dynamo.cli.graph import FRONTEND, PLANNER, Graph, GraphLocation, plan
from dynamo.cli.life import EndGraph, GraphLife, Phase, RestartProcess
from dynamo.cli.replicas import DevicePool
from dynamo.core.boundaries import Rollback
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, DynamoException, StartupError
from dynamo.core.known_variables import warnings as unknown_variables
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.supervisor import Event, Exited, Process, Supervisor

POLL_S = 0.05  # Short, because start-up time is visible; a request to /health costs the loading processes little.
HEALTH_TIMEOUT_S = 1.0
LOG_LINES_SHOWN = 12
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PREFIX = "dynamo-serve-"
LOGS_KEPT = 5  # Runs whose logs are kept: enough to compare a crash with the ones before it.
FRONTEND_DRAIN_S = 7.0  # The frontend's own drain timeout for active requests is 5 s; the rest is for closing.
WORKER_DRAIN_S = 5.0  # The frontend has ended by then, so no request needs to be completed.


def serve(argv: list[str], started: float) -> int:
    """Run `dynamo serve`, started at the given time; return the exit status.

    Raises `ConfigError` before any process is started.
    """
    variables = environ()
    chosen = options.read(argv, variables)
    for warning in unknown_variables(variables):
        sys.stderr.write(f"warning: {warning}\n")
    host = chosen.frontend.http_host
    reserved = reserve_port(host, chosen.frontend.http_port)  # Until the end, also between two runs of the frontend.
    port = reserved.getsockname()[1]
    keys, session_key = chosen.keys, None
    if chosen.needs_key:  # This process lists the models to see whether they are served, so it needs a key too.
        session_key = secrets.token_urlsafe(32)
        keys = dataclasses.replace(keys, keys=(*keys.keys, session_key))
    planner = options.planner_config(chosen)
    devices = devices_of(chosen.serve, variables)
    home = LockedDirectory(PREFIX, logs_kept=LOGS_KEPT)
    discovery = variables.get("DYN_FILE_KV") or str(home.path / "discovery")
    graph = plan(
        GraphLocation(
            discovery=discovery,
            is_private=not variables.get("DYN_FILE_KV"),
            variables=variables,
        ),
        engine=chosen.serve.engine,
        workers=chosen.serve.workers,
        prefill_workers=chosen.serve.prefill_workers,
        max_workers=chosen.serve.max_workers,
        planner_config=None if planner is None else json.dumps(planner.as_json()),
        planner_variables=None if planner is None else planner_variables(planner),
        frontend_flags=chosen.frontend_flags(port),
        engine_flags=chosen.engine_flags(cores()),
        key_variables=keys.variables,
        verbose=chosen.serve.verbose,
    )
    announcement = Announcement(
        engine=chosen.serve.engine,
        workers=chosen.serve.workers,
        prefill_workers=chosen.serve.prefill_workers,
        is_demo=chosen.is_demo,
        host=host,
        port=port,
        command=options.own_command(sys.argv[0]),
        is_tls=chosen.frontend.tls_cert_path is not None,
        needs_key=chosen.needs_key,
        api=options.api_of(chosen.engine),
    )
    verbose = chosen.serve.verbose or bool(variables.get("DYN_LOG"))  # Setting a level implies showing the logs.
    progress = ProgressLine(started=started)
    with reserved:
        session = ServeSession(graph, announcement, home, variables, progress, verbose=verbose, key=session_key)
        if planner is not None:
            session.autoscale(discovery, planner.namespace, chosen.serve.max_workers or 1, devices)
        return session.run()


def devices_of(serve: options.ServeConfig, variables: Mapping[str, str]) -> DevicePool | None:
    """Return the GPUs for the workers; None if they use none. Raises `ConfigError` if they do not suffice."""
    if not serve.gpus_per_worker:
        return None
    pool = DevicePool(visible_devices(variables), serve.gpus_per_worker)
    if serve.max_workers is not None and serve.max_workers > pool.capacity:
        raise ConfigError(
            f"--max-workers {serve.max_workers}: must be at most {pool.capacity}, for which the GPUs suffice "
            f"(--gpus-per-worker {serve.gpus_per_worker})"
        )
    return pool


class ProgressLine:
    """Display of the state of an operation that takes a while."""

    def __init__(self, stream: TextIO | None = None, started: float | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._started = time.monotonic() if started is None else started
        self._shown = ""

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since creation, or since the given start."""
        return time.monotonic() - self._started

    def show(self, state: str) -> None:
        """Show the current state. If the output is not a terminal, print a line for each change."""
        if self._is_terminal:
            turn = SPINNER[int(self.elapsed_s * 10) % len(SPINNER)]
            self._write(f"\r\x1b[2K{turn} {state} ({self.elapsed_s:.1f} s)")
        elif state != self._shown:
            self._write(f"{state}\n")
        self._shown = state

    def print_line(self, text: str = "") -> None:
        """Print a permanent line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Clear the rewritten line, and the ^C that a terminal echoes."""
        if self._is_terminal:
            self._write("\r\x1b[2K")
        self._shown = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # A closed terminal or pipe must not end the running graph.
            self._stream.write(text)
            self._stream.flush()


class ServeSession:
    """One graph from its start to its end."""

    def __init__(
        self,
        graph: Graph,
        announcement: Announcement,
        home: LockedDirectory,
        variables: Mapping[str, str],
        progress: ProgressLine,
        *,
        verbose: bool = False,
        key: str | None = None,
    ) -> None:
        """`key` is an API key of the frontend, if it requires one."""
        self._graph = graph
        self._key = key
        self._processes = {process.name: process for process in graph.processes}
        self._announcement = announcement
        self._home = home
        self._supervisor = Supervisor(variables, None if verbose else home.logs)
        self._life = GraphLife()
        self._progress = progress
        self._autoscaler: Autoscaler | None = None
        self._follower: PlannerFollower | None = None
        self._are_logs_named = False
        """Whether a message named a log file, so that the logs must be kept."""

    def autoscale(self, discovery: str, namespace: str, max_workers: int, devices: DevicePool | None) -> None:
        """Let the graph's planner choose the number of workers."""
        self._follower = PlannerFollower(discovery, namespace)
        self._autoscaler = Autoscaler(
            self._graph, self._supervisor, self._follower, max_workers=max_workers, devices=devices
        )

    def run(self) -> int:
        """Start the processes, serve until the graph ends, stop them; return the exit status."""
        try:
            with self._supervisor.watching():
                self._start()
                end = self._await_ready() or self._serve()
                self._explain(end)
                self._supervisor.stop([PLANNER, FRONTEND], FRONTEND_DRAIN_S)
                self._supervisor.stop(self._workers(), WORKER_DRAIN_S)
        finally:
            if self._follower is not None:
                self._follower.close()
            self._home.close(keep_logs=self._are_logs_named)
        return end.status

    def _start(self) -> None:
        if self._autoscaler is None or self._follower is None:
            for process in self._graph.processes:
                self._supervisor.start(process)
            return
        self._autoscaler.start()
        for other in (self._graph.frontend, self._graph.planner):
            if other is not None:
                self._supervisor.start(other)
        self._follower.start()

    def _workers(self) -> list[str]:
        if self._autoscaler is not None:
            return self._autoscaler.replicas.names
        return [worker.name for worker in self._graph.workers]

    def _await_ready(self) -> EndGraph | None:
        """Return None once every worker serves the model, or the reason why the graph ended before."""
        from dynamo.http.client import ChatClient, Health  # Imported late, while the children are loading.

        client = ChatClient(self._announcement.url, timeout_s=HEALTH_TIMEOUT_S, verify=False, key=self._key)
        wanted = len(self._graph.workers)
        health = Health((), 0)
        while self._life.phase is Phase.STARTING:
            self._progress.show(loading(health.generate_instances, wanted))
            for event in self._supervisor.wait(POLL_S):
                outcome = self._decide(event)
                if isinstance(outcome, EndGraph):
                    return outcome
            with contextlib.suppress(DynamoException):
                health = client.health()
            left = wanted - health.generate_instances
            end = self._life.progressed(workers_left=left, is_listed=bool(health.models), now=time.monotonic())
            if end is not None:
                return end
        self._progress.print_line(self._announcement.ready(health.models[0], self._progress.elapsed_s))
        return None

    def _serve(self) -> EndGraph:
        """Restart processes that crash; return the reason for the end of the graph."""
        scaler = self._autoscaler
        while True:
            for event in self._supervisor.wait(None if scaler is None else FOLLOW_S):
                outcome = self._decide(event)
                if isinstance(outcome, EndGraph):
                    if scaler is None or outcome.culprit is None or not scaler.replicas.lose(outcome.culprit):
                        return outcome
                    self._life.survive(outcome.culprit)
                    self._progress.print_line(given_up_message(outcome, self._log_named(outcome.culprit)))
                if isinstance(outcome, RestartProcess):
                    self._supervisor.restart(self._process(outcome.name), outcome.delay_s)
                    self._progress.print_line(restart_message(outcome, self._log_named(outcome.name)))
            if scaler is not None and (change := scaler.step()):
                self._progress.print_line(explain(change, self._planner_decisions()))

    def _process(self, name: str) -> Process:
        found = None if self._autoscaler is None else self._autoscaler.processes.get(name)
        return found or self._processes[name]

    def _planner_decisions(self) -> list[dict[str, Any]]:
        """Return the planner's last decisions; none if the frontend does not answer, as while it restarts."""
        from dynamo.http.client import ChatClient

        client = ChatClient(self._announcement.url, timeout_s=HEALTH_TIMEOUT_S, verify=False, key=self._key)
        try:
            planners = client.planners()
        except DynamoException:
            return []
        return [decision for planner in planners for decision in planner.get("decisions", [])]

    def _log_named(self, name: str) -> str | None:
        """Return the path of a process's log for a message and keep the logs; None if it writes to the terminal."""
        path = self._supervisor.log_path(name)
        self._are_logs_named = self._are_logs_named or path is not None
        return None if path is None else str(path)

    def _decide(self, event: Event) -> EndGraph | RestartProcess | None:
        if isinstance(event, Exited):
            if self._autoscaler is not None and self._autoscaler.replicas.exited(event.name):
                return None
            return self._life.exited(event.name, event.status, time.monotonic())
        return self._life.stop("Ctrl-C" if event.number == signal.SIGINT else signal.Signals(event.number).name)

    def _explain(self, end: EndGraph) -> None:
        """Print why the graph ends; after a failure also the end of the log that shows the cause."""
        self._progress.clear()
        if end.culprit is None:
            self._progress.print_line(f"{end.reason}: stopping")
            return
        tail = self._supervisor.log_tail(end.culprit, LOG_LINES_SHOWN)
        if tail and tail[-1].startswith("error: "):
            sys.stderr.write(f"error: {end.culprit}: {tail[-1].removeprefix('error: ')}\n")
            return
        sys.stderr.write(f"error: {end.reason}\n")
        for line in tail:
            sys.stderr.write(f"  {line}\n")
        if tail:
            sys.stderr.write(f"Complete log: {self._log_named(end.culprit)}\n")


def restart_message(restart: RestartProcess, log: str | None) -> str:
    """Return the message about a crashed process."""
    when = f" in {restart.delay_s:.0f} s" if restart.delay_s else ""
    where = f" (log: {log})" if log else ""
    return f"{restart.reason}; restarting it{when}{where}"


def given_up_message(end: EndGraph, log: str | None) -> str:
    """Return the message about a worker that is not started again."""
    return f"{end.reason}; another worker takes its place when the planner next requires it{f' (log: {log})' if log else ''}"


def loading(ready: int, wanted: int) -> str:
    """Return the current step of start-up."""
    if ready < wanted:
        return f"Loading: {ready} of {wanted} workers ready"
    return "Loading: the frontend is reading the model's tokenizer"


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port, to a free one for 0. Raises `StartupError` before any process is started.

    It does not listen, so the frontend, which binds with SO_REUSEADDR too, can listen on the port; the kernel gives the
    port to no outgoing connection and to no process that requests any free port.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--http-port {port}: must be from 0 to 65535 (0 chooses a free port)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
        with Rollback(reserved.close):
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"--http-host {host!r}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"--http-port {port} is in use by another process; choose another with --http-port, or 0 for a free one"
            ) from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return reserved
