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
from dynamo.mocker.simulation.engines import simulate
from dynamo.mocker.simulation.rules import RankLimits
from dynamo.mocker.simulation.sequence import SequenceState, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.load import ForwardPass, ScheduledRequests
from dynamo.replay.gaps import GapHistogram
from dynamo.replay.outcome import Flight


@dataclass(frozen=True, slots=True)
class CompletedSteps:
    """Completed steps."""

    forward_pass: ForwardPass
    """The mean of the steps' forward passes."""
    steps: int
    tokens: int
    """Number of tokens generated for all answers."""


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
    _ends: list[float] = field(init=False, default_factory=list)
    _since_ms: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.simulation = simulate(self.limits, self.timing, TokenSource(1 << 16, seed=self.seed), self.rank)
        self.simulation.is_observed = False

    @property
    def rank_id(self) -> tuple[int, int]:
        """Return the worker id and the rank."""
        return self.worker_id, self.rank

    @property
    def is_quiet(self) -> bool:
        """Return whether the rank has no requests and holds no blocks."""
        return self.doing is Doing.IDLE and self.simulation.is_idle and not self.simulation.kept

    def begin(self, now_ms: float) -> bool:
        """Begin the next activity; return False if there is no work."""
        assert self.doing is Doing.IDLE
        if self.simulation.is_idle:
            return False
        self.turn += 1
        self._since_ms = now_ms
        steps = self.simulation.steady_steps
        if steps > 1:
            self._ends = self.simulation.steady_ends(now_ms, steps)
            self.doing, self.until_ms = Doing.COASTING, self._ends[-1]
            return True
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
            return result, CompletedSteps(result.forward_pass, 1, len(result.sequences) + len(result.finished))
        if doing is Doing.COASTING:
            return None, self._skip(len(self._ends))
        return None, None

    def submit(self, flight: Flight, now_ms: float, transfer_ms: float | None = None) -> CompletedSteps | None:
        """Add a request and interrupt coasting (`turn` and `until_ms` change); return the steps that were completed.

        `transfer_ms`: duration of the transfer of a prompt that another worker computed. It begins now on SGLang, which has
        reserved the blocks before, and otherwise at the step that reserves them.
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
            is_remote=transfer_ms is not None,
            stays=flight.is_prefilling,
        )
        if transfer_ms is not None:
            if self.limits.engine_type == "sglang":
                self.simulation.arrive(sequence, now_ms + transfer_ms)
            else:
                self.simulation.transfer(sequence, transfer_ms)
            self.arriving[flight.key] = sequence
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
            steps = bisect_left(self._ends, now_ms)  # Completed steps only; the current one generates nothing.
            self._note_steps(steps)
            sim.skip(steps)
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
        self.doing, self.result = Doing.IDLE, None
        self.turn += 1
        return [sequence.owner for sequence in gone]

    def latest_pass(self) -> ForwardPass:
        """Return the latest step, or an empty one if the rank is idle."""
        return ForwardPass() if self.latest is None or self.is_quiet else self.latest

    def interrupt(self, now_ms: float) -> CompletedSteps | None:
        """Shorten coasting to the end of the current step; return the completed steps."""
        if self.doing is not Doing.COASTING:
            return None
        steps = min(bisect_left(self._ends, now_ms) + 1, len(self._ends))
        self.doing, self.until_ms = Doing.RESUMING, self._ends[steps - 1]
        self.turn += 1
        return self._skip(steps)

    def _skip(self, steps: int) -> CompletedSteps:
        sim = self.simulation
        count = len(sim.decoding)
        context = sim.context_tokens + count * (steps + 1) // 2
        self._note_steps(steps)
        sim.skip(steps)
        seconds = (self._ends[steps - 1] - self._since_ms) / 1000 / steps
        scheduled = ScheduledRequests(num_decode_requests=count, sum_decode_kv_tokens=context)
        return CompletedSteps(ForwardPass(seconds, scheduled), steps, steps * count)

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

    def _note_steps(self, steps: int) -> None:
        """Note the tokens of coasted steps."""
        count, ends = len(self.simulation.decoding), self._ends
        if steps:
            self._note_decode(count, ends[0])
        if steps > 1:
            first_ms, last_ms = ends[1] - ends[0], ends[steps - 1] - ends[steps - 2]
            self.gaps.add_steps(first_ms, last_ms, ends[steps - 1] - ends[0], steps - 1, count)
            self.decoded_ms = ends[steps - 1]
