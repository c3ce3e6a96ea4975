"""Session: one graph of `dynamo serve` from its start to its end; readiness, restarts, scaling and its record for `dynamo status`."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from dynamo.cli.announcement import Announcement
from dynamo.cli.autoscale import FOLLOW_S, Autoscaler, PlannerFollower, explain
from dynamo.cli.graph import FRONTEND, PLANNER, Graph, ProcessGraph
from dynamo.cli.life import EndGraph, GraphLife, Phase, RestartProcess
from dynamo.cli.replicas import DevicePool
from dynamo.core.errors import DynamoException
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.progress import ProgressLine
from dynamo.core.supervisor import Event, Exited, Process, Supervisor
from dynamo.ops.graphs import (
    GraphRecord,
    GraphState,
    RecordedProcess,
    forget_failed_start,
    start_ticks,
    write_record,
)
from dynamo.ops.local_graph import SERVE_PREFIX, module_of

POLL_S = 0.05  # Short, because start-up time is visible; a request to /health costs the loading processes little.
HEALTH_TIMEOUT_S = 1.0
RECORD_S = 30.0  # A process that was restarted is recorded at once; this covers records that could not be written.
LOG_LINES_SHOWN = 12
SERVE_LOG = "serve"
"""Name of the log of `dynamo serve` itself, which has the ends of its processes."""
PREFIX = SERVE_PREFIX
LOGS_KEPT = 5  # Runs whose logs are kept: enough to compare a crash with the ones before it.
FRONTEND_DRAIN_S = 7.0  # The frontend's own drain timeout for active requests is 5 s; the rest is for closing.
WORKER_DRAIN_S = 5.0  # The frontend has ended by then, so no request needs to be completed.


class ServeSession:
    """One graph from its start to its end."""

    def __init__(
        self,
        graph: ProcessGraph,
        announcement: Announcement,
        home: LockedDirectory,
        variables: Mapping[str, str],
        progress: ProgressLine,
        *,
        name: str = "",
        verbose: bool = False,
        key: str | None = None,
    ) -> None:
        """`name` is that of the record; `key` is an API key of the frontend, if it requires one."""
        self._graph = graph
        self._name = name or f"serve-{announcement.port}"
        self._started = time.time()
        self._has_logs = not verbose
        self._model = ""
        self._recorded: GraphRecord | None = None
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
        assert isinstance(self._graph, Graph), "a planner changes the number of workers of one template"
        self._autoscaler = Autoscaler(
            self._graph, self._supervisor, self._follower, max_workers=max_workers, devices=devices
        )

    def run(self) -> int:
        """Start the processes, serve until the graph ends, stop them; return the exit status."""
        try:
            with self._supervisor.watching():
                self._start()
                self._record(GraphState.STARTING)
                end = self._await_ready() or self._serve()
                self._explain(end)
                self._record(GraphState.ENDED, end.reason)
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
        self._model = health.models[0]
        self._record(GraphState.SERVING)
        forget_failed_start()
        self._progress.print_line(self._announcement.ready(self._model, self._progress.elapsed_s))
        return None

    def _serve(self) -> EndGraph:
        """Restart processes that crash; return the reason for the end of the graph."""
        scaler = self._autoscaler
        while True:
            for event in self._supervisor.wait(RECORD_S if scaler is None else FOLLOW_S):
                outcome = self._decide(event)
                if isinstance(outcome, EndGraph):
                    if scaler is None or outcome.culprit is None or not scaler.replicas.lose(outcome.culprit):
                        return outcome
                    self._life.survive(outcome.culprit)
                    self._note(given_up_message(outcome, self._log_named(outcome.culprit)))
                if isinstance(outcome, RestartProcess):
                    self._supervisor.restart(self._process(outcome.name), outcome.delay_s)
                    self._note(restart_message(outcome, self._log_named(outcome.name)))
            if scaler is not None and (change := scaler.step()):
                self._progress.print_line(explain(change, self._planner_decisions()))
            self._record(GraphState.SERVING)

    def _note(self, message: str) -> None:
        """Print a message about a process, and add it to the log that `dynamo logs` and `dynamo troubleshoot` read."""
        path = self._supervisor.log_path(SERVE_LOG)
        with contextlib.suppress(OSError), open(path or os.devnull, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n")
        self._progress.print_line(message)

    def _record(self, state: GraphState, end: str = "") -> None:
        """Write the processes that run now for `dynamo status`, if they have changed; a full disk does not end the graph."""
        processes = []
        for name in [*self._workers(), *(one.name for one in (self._graph.frontend, self._graph.planner) if one)]:
            pid, process = self._supervisor.pid(name), self._process(name)
            if pid is not None:
                gpus = process.variables.get("CUDA_VISIBLE_DEVICES") or ""
                processes.append(
                    RecordedProcess(
                        name=name, pid=pid, ticks=start_ticks(pid), module=module_of(list(process.command)), gpus=gpus
                    )
                )
        record = GraphRecord(
            name=self._name,
            state=state,
            pid=os.getpid(),
            ticks=start_ticks(os.getpid()),
            url=self._announcement.url,
            engine=self._announcement.engine,
            model=self._model,
            started=self._started,
            needs_key=self._key is not None,
            has_logs=self._has_logs,
            end=end,
            processes=processes,
        )
        if record != self._recorded:
            with contextlib.suppress(OSError):
                write_record(self._home.logs, record)
                self._recorded = record

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
        """Return the path of a process's log for a message, and keep the logs for `dynamo troubleshoot`; None without logs."""
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
        tail, log = self._supervisor.log_tail(end.culprit, LOG_LINES_SHOWN), self._log_named(end.culprit)
        if tail and tail[-1].startswith("error: "):
            sys.stderr.write(f"error: {end.culprit}: {tail[-1].removeprefix('error: ')}\n")
            return
        sys.stderr.write(f"error: {end.reason}\n")
        for line in tail:
            sys.stderr.write(f"  {line}\n")
        if tail:
            sys.stderr.write(f"Complete log: {log}\n")


def shows_logs(is_verbose: bool, variables: Mapping[str, str]) -> bool:
    """Return whether processes write to the terminal: setting a level implies it."""
    return is_verbose or bool(variables.get("DYN_LOG"))


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
