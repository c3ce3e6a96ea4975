"""SimulatedWorker: one simulated rank of a worker, advanced by single steps or by many equal steps at once.

idle ── arrive ──▶ stepping ──▶ stepping ─ … ─▶ coasting ──▶ stepping ─ … ─▶ idle
                   one step, result at its end  several decode-only steps at once;
                                                an arriving request waits for the end of the current step
"""

import enum
import math
from bisect import bisect_left
from dataclasses import dataclass, field

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.blocks import Change
from dynamo.mocker.simulation.engines import simulate
from dynamo.mocker.simulation.rules import RankLimits
from dynamo.mocker.simulation.sequence import SequenceState, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.load import ForwardPass
from dynamo.replay.coast import Coast, CompletedSteps
from dynamo.replay.gaps import GapHistogram
from dynamo.replay.outcome import Flight


class Doing(enum.Enum):
    """The activity of a worker."""

    IDLE = "idle"
    STEPPING = "stepping"
    COASTING = "coasting"
    RESUMING = "resuming"
    """The current step of an interrupted coasting phase is not over."""


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One rank of a worker; `slot` is the worker's place in the cluster, which its successor takes."""

    worker_id: int
    rank: int
    slot: int
    limits: RankLimits
    timing: StepTimes
    seed: int
    gaps: GapHistogram
    reports_answers: bool = True
    """Whether the placement depends on the blocks of answers, which no prompt contains. Always with a host tier."""
    simulation: Batching[Flight] = field(init=False)
    doing: Doing = field(init=False, default=Doing.IDLE)
    until_ms: float = field(init=False, default=0.0)
    """Time at which the current activity ends."""
    turn: int = field(init=False, default=0)
    """Number of activities begun; identifies wake-ups of interrupted activities."""
    result: StepResult[Flight] | None = field(init=False, default=None)
    real_steps: int = field(init=False, default=0)
    begun: dict[SimulatedSequence[Flight], float] = field(init=False, default_factory=dict)
    """Sequences without a decode step since their prompt was computed, and the time of that."""
    arriving: dict[str, SimulatedSequence[Flight]] = field(init=False, default_factory=dict)
    """Sequences whose prompts are transferred to this worker and whose arrival time is not known yet."""
    reserving: dict[SimulatedSequence[Flight], None] = field(init=False, default_factory=dict)
    """Sequences that have no blocks yet and whose prompts another worker computes afterwards."""
    is_stalled: bool = field(init=False, default=False)
    """Whether the last step did nothing and no later one does until a request or a prompt arrives, or one leaves."""
    _is_changed: bool = field(init=False, default=False)
    """Whether that has happened since the current step began."""
    cancelled: set[SimulatedSequence[Flight]] = field(init=False, default_factory=set)
    """Sequences that were cancelled in the current step, whose result may contain them."""
    decoded_ms: float = field(init=False, default=0.0)
    """End of the last decode step."""
    noted_ms: float = field(init=False, default=0.0)
    """Time up to which the levels are in the timeline."""
    tallied: tuple[int, int] = field(init=False, default=(0, 0))
    """Admitted and reused tokens that are in the timeline."""
    latest: ForwardPass | None = field(init=False, default=None)
    prompts: tuple[int, ForwardPass] | None = field(init=False, default=None)
    """Number and figures of the last step that computed prompts, until the planner takes it."""
    passes: int = field(init=False, default=0)
    coast: Coast | None = field(init=False, default=None)
    """The steps of the current coasting phase."""
    changes: list[Change] = field(init=False, default_factory=list)
    """Changes of the cache that the placement receives at the end of the current step of a coasting phase."""

    def __post_init__(self) -> None:
        self.simulation = simulate(self.limits, self.timing, TokenSource(1 << 16, seed=self.seed), self.rank)
        self.simulation.is_observed = False
        self.simulation.reports_answers = self.reports_answers or self.simulation.host is not None

    @property
    def rank_id(self) -> tuple[int, int]:
        """Return the worker id and the rank."""
        return self.worker_id, self.rank

    @property
    def is_quiet(self) -> bool:
        """Return whether the rank has no requests and holds no blocks."""
        sim = self.simulation
        return self.doing is Doing.IDLE and sim.is_idle and not sim.kept and not sim.loading

    def begin(self, now_ms: float, *, crosses_borders: bool = False, is_direct: bool = False) -> bool:
        """Begin the next activity; return False if there is no work. For the others see `Batching.coast_steps`."""
        assert self.doing is Doing.IDLE
        if self.reserving:
            self.simulation.reserve(now_ms)
        if self.simulation.is_idle or self.is_stalled:
            return False
        self.turn += 1
        steps = self.simulation.coast_steps(crosses_borders=crosses_borders, is_direct=is_direct)
        if steps > 1:
            self.coast = Coast(self.simulation, now_ms, self.simulation.steady_ends(now_ms, steps))
            self.doing, self.until_ms = Doing.COASTING, self.coast.ends[-1]
            return True
        self._is_changed = False
        self.result = self.simulation.step(now_ms)
        self.real_steps += 1
        assert self.simulation.pool.free >= 0, "more blocks are held than the rank has"
        self.doing, self.until_ms = Doing.STEPPING, now_ms + self.result.duration_ms
        return True

    def end(self) -> tuple[StepResult[Flight] | None, CompletedSteps | None]:
        """End the activity; return the step's result, or the mean of the steps that were coasted."""
        doing, self.doing = self.doing, Doing.IDLE
        if doing is Doing.STEPPING:
            result, self.result = self.result, None
            assert result is not None
            waits = not (self._is_changed or self.simulation.has_timed_arrivals)
            self.is_stalled = waits and self._did_nothing(result)
            if self.cancelled:
                result.prefilled = [one for one in result.prefilled if one not in self.cancelled]
                result.finished = [one for one in result.finished if one not in self.cancelled]
                self.cancelled.clear()
            return result, CompletedSteps(result.forward_pass, 1, len(result.sequences) + len(result.finished))
        if doing is Doing.COASTING:
            assert self.coast is not None
            return None, self._pass(len(self.coast.ends))
        return None, None

    def _did_nothing(self, result: StepResult[Flight]) -> bool:
        """Return whether a step computed and changed nothing, as while all blocks are held for prompts that have not arrived."""
        sim = self.simulation
        is_busy = sim.decoding or sim.partial is not None or sim.loaded
        return not (is_busy or result.sequences or result.finished or result.prefilled or result.changes)

    def passed(self, border: int) -> list[CompletedSteps]:
        """Return the steps of coasting up to the executed step `border`: those before it, and that step."""
        coast = self.coast
        assert coast is not None
        self._note_steps(coast, border + 1)
        before = [coast.passed(border)] if border > coast.noted else []
        return [*before, coast.passed(border + 1)]

    def submit(
        self, flight: Flight, now_ms: float, transfer_ms: float | None = None
    ) -> tuple[SimulatedSequence[Flight], CompletedSteps | None]:
        """Add a request and interrupt coasting (`turn` and `until_ms` change); return its sequence, and the steps that were completed.

        `transfer_ms`: duration of the transfer of a prompt that another worker computed, from the step that reserves its blocks. The
        prompt of a request that is `reserving` is computed afterwards.
        """
        passed = self.interrupt(now_ms)
        names, turn = flight.names, flight.turn
        assert names is not None
        sequence = self.simulation.submit(
            flight,
            range(turn.input_tokens + flight.migrated_tokens),
            1 if flight.is_prefilling else turn.output_tokens - flight.migrated_tokens,
            now_ms,
            named=(names.packed, list(names.sequence_hashes)),
            is_remote=flight.is_reserving or transfer_ms is not None,
            stays=flight.is_prefilling,
        )
        if flight.is_reserving:
            self.reserving[sequence] = None
        elif transfer_ms is not None:
            self.simulation.transfer(sequence, transfer_ms)
            self.arriving[flight.key] = sequence
        return sequence, passed

    def reserved(self) -> list[Flight]:
        """Return the requests for which blocks have been reserved since the last call."""
        if not self.reserving:
            return []
        found = [sequence for sequence in self.reserving if sequence.state is not SequenceState.WAITING]
        for sequence in found:
            del self.reserving[sequence]
        return [sequence.owner for sequence in found]

    def let_go(self, sequence: SimulatedSequence[Flight], now_ms: float) -> tuple[list[Change], CompletedSteps | None]:
        """Release a prompt that was computed for another worker.

        Return the changes of the cache, which follow those of the current step if there is one, and the steps that were completed.
        """
        passed = self.interrupt(now_ms)
        self.simulation.let_go(sequence)
        changes = self.simulation.pool.changes()
        if self.result is not None:
            self.result.changes += changes
            changes = []
        return changes, passed

    def receive(self, sequence: SimulatedSequence[Flight], now_ms: float) -> CompletedSteps | None:
        """Interrupt coasting because a prompt arrives in its reserved blocks; return the steps that were completed."""
        passed = self.interrupt(now_ms)
        self.simulation.arrive(sequence, now_ms)
        return passed

    def cancel(self, sequence: SimulatedSequence[Flight], now_ms: float) -> CompletedSteps | None:
        """Remove a request whose prompt is not computed and release its blocks; return the steps that were completed."""
        passed = self.interrupt(now_ms)
        self.simulation.cancel(sequence)
        self.simulation.let_go(sequence)
        self.reserving.pop(sequence, None)
        if self.result is not None:
            self.cancelled.add(sequence)
        return passed

    def arrivals(self) -> list[tuple[str, float]]:
        """Return the requests whose transfers have begun since the last call, and the times at which they end."""
        if not self.arriving:
            return []
        known = [(key, one.ready_ms) for key, one in self.arriving.items() if one.ready_ms < math.inf]
        for key, _ in known:
            del self.arriving[key]
        return known

    def fail(self, now_ms: float) -> list[Flight]:
        """Remove all requests after a failure and return them, with the number of their generated tokens updated."""
        sim, result = self.simulation, self.result
        is_cut = self.doing is Doing.STEPPING or (self.doing is Doing.RESUMING and self.until_ms > now_ms)
        if self.doing is Doing.COASTING:
            assert self.coast is not None
            steps = bisect_left(self.coast.ends, now_ms)  # Completed steps only; the current one generates nothing.
            is_cut = steps < self.coast.done  # It is executed if it is a border.
            self._note_steps(self.coast, steps)
            self.coast.advance(steps)
        self.coast = None
        self.changes.clear()
        gone: list[SimulatedSequence[Flight]] = [*sim.decoding, *([sim.partial] if sim.partial else []), *sim.waiting]
        gone += [*sim.loading, *sim.loaded]
        begun = set()
        if result is not None:
            begun = {*result.prefilled, *result.sequences, *result.finished}
            gone += result.finished
        for sequence in gone:
            generated = sim.generated_tokens(sequence)
            if is_cut and (sequence in begun or (result is None and sequence.state is SequenceState.DECODING)):
                generated -= 1
            if not sequence.owner.is_prefilling:
                sequence.owner.migrated_tokens += generated
                if sequence.owner.first_ms >= 0:
                    last_ms = self.begun.get(sequence, self.decoded_ms)
                    sequence.owner.paused_ms = sequence.paused_ms if sequence.paused_ms >= 0 else last_ms
                if sequence.owner.second_ms > now_ms:
                    sequence.owner.second_ms = -1.0
        lost = [sequence.owner for sequence in gone if sequence not in self.cancelled]
        self.doing, self.result = Doing.IDLE, None
        self.turn += 1
        self.reserving.clear()
        self.cancelled.clear()
        return lost

    def latest_pass(self) -> ForwardPass:
        """Return the latest step, or an empty one if the rank is idle."""
        return ForwardPass() if self.latest is None or self.is_quiet else self.latest

    def interrupt(self, now_ms: float) -> CompletedSteps | None:
        """Shorten coasting to the end of the current step; return the completed steps. Called before every change from outside."""
        self.is_stalled, self._is_changed = False, True
        if self.doing is not Doing.COASTING:
            return None
        assert self.coast is not None
        steps = self.coast.begun(now_ms)
        self.doing, self.until_ms = Doing.RESUMING, self.coast.ends[steps - 1]
        self.turn += 1
        return self._pass(steps)

    def _pass(self, steps: int) -> CompletedSteps:
        """End coasting after the step number `steps`."""
        coast, self.coast = self.coast, None
        assert coast is not None
        while coast.border < steps:
            self.changes += coast.cross()
        self._note_steps(coast, steps)
        coast.advance(steps)
        return coast.passed(steps)

    # Times between tokens.

    def first_token(self, sequence: SimulatedSequence[Flight], now_ms: float) -> None:
        """Note the token that ends a computed prompt: the first one, or the next one after a preemption or a migration."""
        flight = sequence.owner
        paused_ms = max(sequence.paused_ms, flight.paused_ms)
        if paused_ms >= 0:
            self.gaps.add(now_ms - paused_ms)
            sequence.paused_ms = flight.paused_ms = -1.0
            if flight.second_ms < 0:
                flight.second_ms = now_ms
        if sequence.state is SequenceState.DECODING:
            self.begun[sequence] = now_ms

    def decoded(self, result: StepResult[Flight], now_ms: float) -> None:
        """Note the tokens of a step, except those that end a prompt."""
        count = len(result.sequences) + len(result.finished) - len(result.prefilled)
        if count > 0:
            self._note_decode(count, now_ms)

    def _note_decode(self, count: int, now_ms: float) -> None:
        if self.begun:
            for sequence, since_ms in self.begun.items():
                if sequence.paused_ms >= 0:  # Preempted before its next token.
                    sequence.paused_ms = since_ms
                    continue
                count -= 1
                self.gaps.add(now_ms - since_ms)
                if sequence.owner.second_ms < 0:
                    sequence.owner.second_ms = now_ms
            self.begun.clear()
        if count:
            self.gaps.add(now_ms - self.decoded_ms, count)
        self.decoded_ms = now_ms

    def _note_steps(self, coast: Coast, steps: int) -> None:
        """Note the tokens of coasted steps up to number `steps`."""
        first, count, ends = coast.noted, len(self.simulation.decoding), coast.ends
        if steps > first == 0:
            self._note_decode(count, ends[0])
            first = 1
        if steps > first:
            last_ms = ends[steps - 1]
            first_ms = ends[first] - ends[first - 1]
            self.gaps.add_steps(first_ms, last_ms - ends[steps - 2], last_ms - ends[first - 1], steps - first, count)
            self.decoded_ms = last_ms
