"""Graph: the processes of a `dynamo serve`, with their command lines and environments. Pure."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS
from dynamo.core.supervisor import Process

FRONTEND, PLANNER = "frontend", "planner"
WORKER, PREFILL = "worker", "prefill"
"""Roles of workers; a worker's name is its role and its number."""
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
"""Planes that need no set-up on one machine; flags can override them, the environment cannot."""
LOOPBACK = dict.fromkeys(
    ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"), "127.0.0.1"
)
"""Worker addresses of a graph with its own discovery directory, which no process of another machine uses."""
GRACE_VARIABLE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"
SCALE_DOWN_GRACE_S = "1"
SCALING_WAIT_VARIABLE, SCALING_WAIT_S = "SCALING_MAX_WAIT_TIME", "300"
"""Seconds after which the planner stops to wait for a worker that does not become ready."""


class PerWorker(Protocol):
    """Flags and variables by which the workers of an engine differ."""

    def flags(self, role: str, index: int) -> Sequence[str]:
        """Return the flags of worker `index`, from 0."""

    def variables(self, index: int) -> Mapping[str, str]:
        """Return the variables of worker `index`, from 0."""


class ProcessGraph(Protocol):
    """Processes that start and end together: one frontend and workers."""

    @property
    def frontend(self) -> Process:
        """Return the frontend."""

    @property
    def workers(self) -> tuple[Process, ...]:
        """Return the workers of the start."""

    @property
    def planner(self) -> Process | None:
        """Return the planner, if there is one."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return all processes in their start order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """What the workers of a graph have in common, and how they differ by role and number."""

    command: tuple[str, ...]
    variables: Mapping[str, str | None]
    workers: int
    """Number of workers of the role `worker` at most."""
    prefill_workers: int
    system_port: int | None
    """System port of the first worker; the others follow. None: workers have none."""
    per_worker: PerWorker | None = None

    def worker(self, role: str, number: int, devices: Sequence[str] = ()) -> Process:
        """Return the process of a worker; numbers of a role begin with 1. `devices`: the only GPUs that it uses."""
        variables = dict(self.variables)
        index = number - 1 + (self.workers if role == PREFILL else 0)
        if self.system_port is not None:
            variables["DYN_SYSTEM_PORT"] = str(self.system_port + index)
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        mode = ("--disaggregation-mode=prefill" if role == PREFILL else "--disaggregation-mode=decode",)
        own: Sequence[str] = ()
        if self.per_worker is not None:
            own = self.per_worker.flags(role, index)
            variables |= self.per_worker.variables(index)
        return Process(
            name=f"{role}-{number}",
            command=(*self.command, *(mode if self.prefill_workers else ()), *own),
            variables=variables,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A frontend, its workers, and possibly the planner that changes their number."""

    frontend: Process
    roles: Mapping[str, int]
    """Number of workers of each role at the start."""
    template: WorkerTemplate
    planner: Process | None = None
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """GPUs of each worker of the start, by its name; the planner's workers receive theirs when they are started."""

    @property
    def workers(self) -> tuple[Process, ...]:
        """Return the workers of the start."""
        return tuple(
            self.template.worker(role, number, self.devices.get(f"{role}-{number}", ()))
            for role, count in self.roles.items()
            for number in range(1, count + 1)
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return all processes in their start order: the ones that load longest first."""
        return (*self.workers, self.frontend, *(() if self.planner is None else (self.planner,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLocation:
    """Location and environment of the graph."""

    discovery: str
    """The directory of the discovery records."""
    is_private: bool = True
    """Whether that directory belongs to this graph alone."""
    variables: Mapping[str, str]
    """The environment that the processes inherit; variables set here are not overridden."""
    python: str = sys.executable


def plan(
    place: GraphLocation,
    *,
    engine: str,
    workers: int,
    prefill_workers: int = 0,
    max_workers: int | None = None,
    planner_config: str | None = None,
    planner_variables: Mapping[str, str] | None = None,
    frontend_flags: Sequence[str] = (),
    engine_flags: Sequence[str] = (),
    key_variables: Mapping[str, str] | None = None,
    per_worker: PerWorker | None = None,
    devices: Mapping[str, Sequence[str]] | None = None,
    verbose: bool = False,
) -> Graph:
    """Return the graph of one frontend and `workers` engines with file discovery, TCP requests and ZMQ events.

    `prefill_workers` further engines compute the prompts, and the others decode. `key_variables` contain the API keys
    for the frontend, whose command line has none; workers get the admin keys only. With `planner_config`, the JSON
    text of its settings, a planner changes the number of workers, up to `max_workers`; `planner_variables` contain the
    settings that must not be in a command line. `devices` are the GPUs of each worker, by its name.
    """
    shared = shared_variables(place, verbose=verbose)
    # At the end, workers are stopped after the frontend, so no request needs a grace period; with a planner, one may be
    # stopped while the frontend serves, which has to receive the change of discovery first.
    grace = {
        GRACE_VARIABLE: place.variables.get(GRACE_VARIABLE) or ("0" if planner_config is None else SCALE_DOWN_GRACE_S)
    }
    keys = dict(key_variables or {})
    worker_keys = {API_KEYS: None, ADMIN_API_KEYS: keys.get(ADMIN_API_KEYS)}
    frontend = Process(
        name=FRONTEND,
        command=_command(place, "dynamo.frontend", frontend_flags),
        variables=shared | _no_system_port() | keys,
    )
    planner = None
    if planner_config is not None:
        planner = _planner(place, planner_config, shared, planner_variables or {})
    return Graph(
        frontend=frontend,
        planner=planner,
        roles={WORKER: workers, PREFILL: prefill_workers} if prefill_workers else {WORKER: workers},
        template=WorkerTemplate(
            command=_command(place, f"dynamo.{engine}", engine_flags),
            variables=shared | grace | worker_keys,
            workers=max(workers, max_workers or 0),
            prefill_workers=prefill_workers,
            system_port=_system_port(place.variables),
            per_worker=per_worker,
        ),
        devices=devices or {},
    )


def shared_variables(place: GraphLocation, *, verbose: bool) -> dict[str, str]:
    """Return the variables of every process: planes, discovery directory, addresses and log level."""
    shared = {
        **PLANES,
        "DYN_FILE_KV": place.discovery,
        "DYN_LOG": place.variables.get("DYN_LOG") or ("info" if verbose else "warn"),
    }
    if place.is_private:
        shared |= {name: place.variables.get(name) or address for name, address in LOOPBACK.items()}
    return shared


def _planner(place: GraphLocation, config: str, shared: Mapping[str, str], variables: Mapping[str, str]) -> Process:
    wait_s = place.variables.get(SCALING_WAIT_VARIABLE) or SCALING_WAIT_S
    own = {SCALING_WAIT_VARIABLE: wait_s, API_KEYS: None, ADMIN_API_KEYS: None, **variables}
    return Process(
        name=PLANNER,
        command=_command(place, "dynamo.planner", (f"--config={config}",)),
        variables={**shared, **_no_system_port(), **own},
    )


def _command(place: GraphLocation, module: str, flags: Sequence[str]) -> tuple[str, ...]:
    # -P: a file of the current directory must not replace one of our modules or of a library.
    return (place.python, "-P", "-m", module, *flags)


def _no_system_port() -> dict[str, str]:
    """Disable the system port: the frontend has no system server and must not use a worker's port."""
    return {"DYN_SYSTEM_PORT": "-1"}


def _system_port(variables: Mapping[str, str]) -> int | None:
    """Return the first worker's system port, which is the environment's; the workers share a machine."""
    text = variables.get("DYN_SYSTEM_PORT", "")
    return int(text) if text.isdigit() and text != "0" else None
