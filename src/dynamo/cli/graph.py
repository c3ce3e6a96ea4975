"""Graph: the processes of a `dynamo serve`, with their command lines and environments. Pure."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS
from dynamo.core.supervisor import Process

FRONTEND = "frontend"
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
"""Planes that need no set-up on one machine; flags can override them, the environment cannot."""
LOOPBACK = dict.fromkeys(
    ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"), "127.0.0.1"
)
"""Worker addresses of a graph with its own discovery directory, which no process of another machine uses."""
GRACE_VARIABLE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A frontend and its workers."""

    frontend: Process
    workers: tuple[Process, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return all processes in their start order: the ones that load longest first."""
        return (*self.workers, self.frontend)


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
    frontend_flags: Sequence[str] = (),
    engine_flags: Sequence[str] = (),
    key_variables: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Graph:
    """Return the graph of one frontend and `workers` engines with file discovery, TCP requests and ZMQ events.

    `prefill_workers` further engines compute the prompts, and the others decode. `key_variables` contain the API keys
    for the frontend, whose command line has none; workers get the admin keys only.
    """
    shared = {
        **PLANES,
        "DYN_FILE_KV": place.discovery,
        "DYN_LOG": place.variables.get("DYN_LOG") or ("info" if verbose else "warn"),
    }
    if place.is_private:
        shared |= {name: place.variables.get(name) or address for name, address in LOOPBACK.items()}
    # Workers are stopped only after the frontend has ended, so no request needs a grace period.
    grace = {GRACE_VARIABLE: place.variables.get(GRACE_VARIABLE) or "0"}
    keys = dict(key_variables or {})
    worker_keys = {API_KEYS: None, ADMIN_API_KEYS: keys.get(ADMIN_API_KEYS)}
    frontend = Process(
        name=FRONTEND,
        command=_command(place, "dynamo.frontend", frontend_flags),
        variables=shared | _no_system_port() | keys,
    )
    return Graph(
        frontend=frontend,
        workers=tuple(
            Process(
                name=name,
                command=_command(place, f"dynamo.{engine}", (*engine_flags, *role_flags)),
                variables=shared | grace | worker_keys | _system_port(place.variables, index),
            )
            for index, (name, role_flags) in enumerate(_roles(workers, prefill_workers))
        ),
    )


def _roles(workers: int, prefill_workers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the workers' names and the flags of their roles."""
    decode = ("--disaggregation-mode=decode",) if prefill_workers else ()
    for number in range(1, workers + 1):
        yield f"worker-{number}", decode
    for number in range(1, prefill_workers + 1):
        yield f"prefill-{number}", ("--disaggregation-mode=prefill",)


def _command(place: GraphLocation, module: str, flags: Sequence[str]) -> tuple[str, ...]:
    # -P: a file of the current directory must not replace one of our modules or of a library.
    return (place.python, "-P", "-m", module, *flags)


def _no_system_port() -> dict[str, str]:
    """Disable the system port: the frontend has no system server and must not use a worker's port."""
    return {"DYN_SYSTEM_PORT": "-1"}


def _system_port(variables: Mapping[str, str], index: int) -> dict[str, str]:
    """Return a worker's system port: the environment's plus its index, because the workers share a machine."""
    text = variables.get("DYN_SYSTEM_PORT", "")
    if not text.isdigit() or text == "0":
        return {}
    return {"DYN_SYSTEM_PORT": str(int(text) + index)}
