"""StepResult: what one step of a simulated engine does, to be told to the world when it is over."""

from dataclasses import dataclass, field
from typing import Generic

from dynamo.mocker.simulation.sequence import Owner, Sequence
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad


@dataclass(slots=True)
class StepResult(Generic[Owner]):
    """What a step does, to be told to the world `duration_ms` after it began."""

    duration_ms: float
    sequences: list[Sequence[Owner]]
    """Who gets a token and goes on …"""
    tokens: list[int]
    """… and which."""
    finished: list[Sequence[Owner]]
    """Who gets `last_token` and is done."""
    prefilled: list[Sequence[Owner]]
    """Those of them whose prompt was completed by this step: for the others it is one more token of an answer."""
    events: list[KvEvent]
    load: WorkerLoad
    forward_pass: ForwardPass
    host_events: list[KvEvent] = field(default_factory=list)
    """What happened in the host's tier, if there is one."""
