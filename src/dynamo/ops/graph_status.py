"""Status of the graphs of this machine: rows from their records, their processes and the answers of their frontends."""

import concurrent.futures
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import DynamoException
from dynamo.http.client import ChatClient
from dynamo.ops.doctor.sockets import listening_ports
from dynamo.ops.graphs import FoundGraph, GraphState, is_alive
from dynamo.ops.local_graph import state_of
from dynamo.ops.report import CheckStatus

TIMEOUT_S = 3.0
NOT_WORKERS = frozenset({"dynamo.frontend", "dynamo.planner"})
QUERIES_MAX = 8
STOPPED_STATES = frozenset({"T", "t"})
"""States of processes that a signal or a debugger has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHealth:
    """What the frontend of a graph answers."""

    models: tuple[str, ...] = ()
    instances: int | None = None
    """Workers that it lists; None if they are not known."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGraphStatus:
    """State of one graph: its record, its processes that run, and its frontend's answer."""

    graph: FoundGraph
    alive: tuple[bool, ...]
    """Whether each recorded process runs."""
    health: GraphHealth
    stopped: tuple[str, ...] = ()
    """Names of processes that a signal or a debugger has stopped."""

    @property
    def status(self) -> CheckStatus:
        """Return PASS if all processes run and the model is served; WARN while some start; SKIP if it has ended."""
        if not self.graph.is_running:
            return CheckStatus.SKIP
        if self.graph.record.state is GraphState.STARTING:
            return CheckStatus.WARN
        if not (all(self.alive) and self.health.models) or self.health.error or self.stopped:
            return CheckStatus.FAIL
        return CheckStatus.WARN if self.is_loading else CheckStatus.PASS

    @property
    def is_loading(self) -> bool:
        """Return whether a worker, such as one that was restarted, is not ready yet."""
        return self.health.instances is not None and self.health.instances < self.workers

    @property
    def workers(self) -> int:
        """Return the number of processes that are workers."""
        return sum(one.module not in NOT_WORKERS for one in self.graph.record.processes)

    @property
    def state(self) -> str:
        """Return the state in words."""
        record = self.graph.record
        if not self.graph.is_running:
            return f"ended: {record.end or 'dynamo serve was killed'}"
        if self.status is CheckStatus.FAIL:
            if self.stopped:
                return f"stopped by a signal or a debugger: {', '.join(self.stopped)}; kill -CONT PID continues it"
            lost = [one.name for one, alive in zip(record.processes, self.alive, strict=True) if not alive]
            return self.health.error or (f"not running: {', '.join(lost)}" if lost else "no model is served")
        if record.state is GraphState.SERVING and self.is_loading:
            return f"serving, {self.health.instances} of {self.workers} workers ready"
        return record.state.value

    def value(self, now: float) -> dict[str, Any]:
        """Return the status as a JSON object."""
        record = self.graph.record
        return {
            "name": record.name,
            "status": self.status.value,
            "state": self.state,
            "is_running": self.graph.is_running,
            "pid": record.pid,
            "url": record.url,
            "engine": record.engine,
            "models": list(self.health.models) or ([record.model] if record.model else []),
            "workers_ready": self.health.instances,
            "uptime_s": round(now - record.started, 1) if self.graph.is_running else None,
            "logs": str(self.graph.logs) if record.has_logs else None,
            "processes": [
                {
                    "name": one.name,
                    "pid": one.pid,
                    "module": one.module,
                    "gpus": one.gpus,
                    "is_running": alive,
                    "is_stopped": one.name in self.stopped,
                }
                for one, alive in zip(record.processes, self.alive, strict=True)
            ],
        }


def statuses(graphs: Sequence[FoundGraph], key: str | None) -> list[LocalGraphStatus]:
    """Return the state of each graph; the frontends are queried concurrently, each for a few seconds at most."""
    with concurrent.futures.ThreadPoolExecutor(QUERIES_MAX) as pool:
        answers = list(pool.map(lambda one: query(one, key), graphs))
    return [
        LocalGraphStatus(
            graph=one,
            alive=tuple(one.is_running and is_alive(each.pid, each.ticks) for each in one.record.processes),
            health=health,
            stopped=tuple(
                each.name for each in one.record.processes if one.is_running and state_of(each.pid) in STOPPED_STATES
            ),
        )
        for one, health in zip(graphs, answers, strict=True)
    ]


def query(graph: FoundGraph, key: str | None) -> GraphHealth:
    """Return the answer of a graph's frontend; an error if it does not answer."""
    if not graph.is_running:
        return GraphHealth()
    try:
        client = ChatClient(graph.record.url, timeout_s=TIMEOUT_S, verify=False, key=key)
        instances = reachable(client.instances(), listening_ports())
        return GraphHealth(models=tuple(client.models()) if instances else (), instances=instances)
    except DynamoException as error:
        if graph.record.needs_key and key is None:
            return GraphHealth(models=(graph.record.model,), error="")
        return GraphHealth(error=f"the frontend does not answer: {' '.join(str(error).split())}")


def reachable(instances: Iterable[Mapping[str, Any]], ports: Container[int] | None) -> int:
    """Return the number of workers among the registered endpoints.

    A worker that was killed stays registered for some seconds: it is not counted if no process listens on its port.
    `ports` are those of this machine; None if they are not known.
    """
    found = 0
    for one in instances:
        transport = one.get("transport")
        address = transport.get("tcp") if isinstance(transport, dict) else None
        port = str(address).partition("/")[0].rpartition(":")[2]
        found += one.get("endpoint") == "generate" and (ports is None or not port.isdigit() or int(port) in ports)
    return found


def as_lines(found: Sequence[LocalGraphStatus], now: float | None = None) -> list[str]:
    """Return two lines for each graph and one for each of its processes."""
    lines: list[str] = []
    for one in found:
        value = one.value(time.time() if now is None else now)
        uptime = f", up {duration(value['uptime_s'])}" if value["uptime_s"] is not None else ""
        lines.append(f"{value['status']}  {value['name']}  {value['state']}{uptime}")
        models = ", ".join(value["models"]) or "no model yet"
        lines.append(f"      {models} ({value['engine']}) at {value['url']}, dynamo serve is process {value['pid']}")
        width = max((len(each["name"]) for each in value["processes"]), default=0)
        for each in value["processes"]:
            state = "stopped" if each["is_stopped"] else "running" if each["is_running"] else "ended"
            gpus = f"  GPUs {each['gpus']}" if each["gpus"] else ""
            lines.append(
                f"      {each['name'].ljust(width)}  {each['pid']:>7}  {state}  {each['module']}{gpus}".rstrip()
            )
        if value["logs"]:
            lines.append(f"      logs: {value['logs']}")
    return lines


def duration(seconds: float) -> str:
    """Return a duration such as `42 s`, `5 min` or `3 h 20 min`."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
