"""Graph: which processes a `dynamo serve` owns, and what each is told. Pure."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS

FRONTEND = "frontend"
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
"""A graph on one machine needs nothing that must be set up; a flag may say otherwise, the environment may not."""
LOOPBACK = dict.fromkeys(
    ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"), "127.0.0.1"
)
"""Addresses of the workers of a graph with its own discovery directory: no process of another machine uses them."""
GRACE_VARIABLE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the graph: its name in messages, its command, and what it finds in its environment."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """None removes a variable that would be inherited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A frontend and the workers behind it."""

    frontend: Process
    workers: tuple[Process, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        """All of them, in the order in which they start: what takes longest to be ready first."""
        return (*self.workers, self.frontend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the graph runs."""

    discovery: str
    """The directory in which the processes find each other."""
    is_private: bool = True
    """That directory is this graph's own."""
    variables: Mapping[str, str]
    """The environment that the processes inherit; what it sets is not overridden."""
    python: str = sys.executable


def plan(
    place: Place,
    *,
    engine: str,
    workers: int,
    prefill_workers: int = 0,
    frontend_flags: Sequence[str] = (),
    engine_flags: Sequence[str] = (),
    key_variables: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Graph:
    """One frontend and `workers` engines over file discovery, TCP requests and ZMQ events.

    With `prefill_workers` these compute the prompts, and the others go on from them. `key_variables` hand the API keys
    to the frontend, which gets none on its command line; workers get those of administrators alone.
    """
    shared = {
        **PLANES,
        "DYN_FILE_KV": place.discovery,
        "DYN_LOG": place.variables.get("DYN_LOG") or ("info" if verbose else "warn"),
    }
    if place.is_private:
        shared |= {name: place.variables.get(name) or address for name, address in LOOPBACK.items()}
    # Workers are asked to end only when no frontend is left, so there is nobody to go on answering.
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
    """The workers' names, and what each is told of its part."""
    decode = ("--disaggregation-mode=decode",) if prefill_workers else ()
    for number in range(1, workers + 1):
        yield f"worker-{number}", decode
    for number in range(1, prefill_workers + 1):
        yield f"prefill-{number}", ("--disaggregation-mode=prefill",)


def _command(place: Place, module: str, flags: Sequence[str]) -> tuple[str, ...]:
    # -P: a file of the current directory must not stand in for one of ours or of a library.
    return (place.python, "-P", "-m", module, *flags)


def _no_system_port() -> dict[str, str]:
    """The frontend has no system server, so it must not take a worker's port."""
    return {"DYN_SYSTEM_PORT": "-1"}


def _system_port(variables: Mapping[str, str], index: int) -> dict[str, str]:
    """Each worker's own system port: the one of the environment, counted up, because they share a machine."""
    text = variables.get("DYN_SYSTEM_PORT", "")
    if not text.isdigit() or text == "0":
        return {}
    return {"DYN_SYSTEM_PORT": str(int(text) + index)}
