"""Outcome: the requests of a run, each with its times, and what the workers did meanwhile."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dynamo.replay.load import Session, Turn
from dynamo.replay.names import PromptNames
from dynamo.replay.timeline import Timeline


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way. Times are the clock's, in milliseconds; negative: not yet."""

    key: str
    session: Session
    place: int
    """Which turn of the session it is."""
    turn: Turn
    arrived_ms: float
    names: PromptNames | None = None
    worker: int = -1
    slot: int = -1
    """Which of the cluster's places the worker has."""
    placed_ms: float = -1.0
    first_ms: float = -1.0
    second_ms: float = -1.0
    finished_ms: float = -1.0
    cached_tokens: int = 0
    said: int = 0
    """Tokens of the answer that workers gave which then failed."""
    migrations: int = 0
    is_prefilling: bool = False
    """Whether the worker that has it computes its prompt for another one."""
    has_travelled: bool = False
    """Whether its prompt was computed by another worker."""
    prefill_slot: int = -1
    """The place of the worker that computed its prompt for another one."""


@dataclass(slots=True)
class PlannerLog:
    """What a planner saw and did."""

    policy: str
    ticks: list[dict[str, Any]] = field(default_factory=list)
    scaling_events: list[dict[str, Any]] = field(default_factory=list)
    lifecycle_operations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    flights: list[Flight]
    """All requests that came, in the order of arrival."""
    duration_ms: float
    timeline: Timeline
    unfinished: int = 0
    """Requests that were under way when the time was over."""
    preemptions: int = 0
    migrations: int = 0
    admitted_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    transfers: int = 0
    """Prompts that one worker computed for another …"""
    transfer_ms: float = 0.0
    """… and how long they travelled, all together."""
    bypassed: int = 0
    """Prompts that were not worth that."""
    worker_ms: float = 0.0
    """How long workers were there, starting ones included."""
    planner: PlannerLog | None = None
    failures: Counter[str] = field(default_factory=Counter)
    """Of a real frontend: what requests failed of, and how many did."""
