"""StepResult: the result of one step of a simulated engine, valid at the step's end."""

from dataclasses import dataclass, field
from typing import Generic

from dynamo.mocker.simulation.blocks import Change, events_of
from dynamo.mocker.simulation.sequence import Owner, SimulatedSequence
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad


@dataclass(slots=True)
class StepResult(Generic[Owner]):
    """The result of a step, to be published `duration_ms` after the step began."""

    duration_ms: float
    sequences: list[SimulatedSequence[Owner]]
    """Sequences that get a token and continue."""
    tokens: list[int]
    """The token of each of `sequences`; empty if the rank is not observed."""
    finished: list[SimulatedSequence[Owner]]
    """Sequences that get `last_token` and end."""
    prefilled: list[SimulatedSequence[Owner]]
    """Sequences of this step whose prompt was completed by it; for the others the token is not the first."""
    changes: list[Change]
    """Stored and removed blocks of the device."""
    load: WorkerLoad
    forward_pass: ForwardPass
    host_events: list[KvEvent] = field(default_factory=list)
    """Stored and removed blocks of the host tier."""

    @property
    def events(self) -> list[KvEvent]:
        """Return the changes as events."""
        return events_of(self.changes)
