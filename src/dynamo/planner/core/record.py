"""Decision records: ticks saved as JSON lines, and their replay.

The first line holds what the planner started with, each other line one tick: its input, the replies of the plugins that are not
built in, and the decision. Replaying the lines in order produces the same decisions, byte for byte.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.checkpoint import PlannerCheckpoint
from dynamo.planner.core.engine import BUILTINS, DecisionTurn, PlannerCore, TickDecision
from dynamo.planner.core.pipeline import Finished, PluginCall, PluginReply, PluginSpec, resume
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.plugins.types import (
    ConstrainStageResponse,
    PredictStageResponse,
    ProposeStageResponse,
    ReconcileStageResponse,
    StageResponse,
)
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import FpmObservations, ScheduledTick, TickInput, TrafficObservation, WorkerCounts

T = TypeVar("T")

SCHEMA = "dynamo.planner.ticks.v1"
RESPONSES: dict[str, type[StageResponse]] = {
    "predict": PredictStageResponse,
    "propose": ProposeStageResponse,
    "reconcile": ReconcileStageResponse,
    "constrain": ConstrainStageResponse,
}


class Start(msgspec.Struct, kw_only=True):
    """What a planner started with."""

    schema: str = SCHEMA
    config: dict[str, Any]
    capabilities: WorkerCapabilities
    plugins: list[PluginSpec] = []
    warm_up: list[TrafficObservation] = []
    bootstrap: dict[EngineRole, list[ForwardPassMetrics]] = {}
    start_s: float = 0.0
    checkpoint: PlannerCheckpoint | None = None
    """State of the planner where the record is not its first one; warm-up and bootstrap are part of it."""

    @classmethod
    def of(cls, core: PlannerCore) -> "Start":
        """Return the first line of a record that begins with the present state of a planner.

        The planner goes on from the saved form of its state, as the replay does: an ARIMA model is selected again.
        """
        saved = msgspec.json.decode(msgspec.json.encode(core.checkpoint()), type=PlannerCheckpoint)
        core.restore(saved)
        plugins = [one for one in core.pipeline.plugins if one not in BUILTINS]
        return cls(
            config=core.config.as_json(), capabilities=core.state.capabilities, plugins=plugins, checkpoint=saved
        )

    def planner(self) -> PlannerCore:
        """Return a planner in this state. Raise `ConfigError` for an invalid configuration."""
        core = PlannerCore(parse(self.config), self.capabilities, self.plugins)
        core.warm_up(self.warm_up)
        core.bootstrap(self.bootstrap)
        core.first_tick(self.start_s)
        if self.checkpoint is not None:
            core.restore(self.checkpoint)
        return core


class SavedInput(msgspec.Struct, kw_only=True):
    """Observations of a tick; the steps are lists, because JSON has no keys of worker and rank."""

    now_s: float
    traffic: TrafficObservation | None = None
    worker_counts: WorkerCounts | None = None
    prefill: list[ForwardPassMetrics] | None = None
    decode: list[ForwardPassMetrics] | None = None
    prompts: list[ForwardPassMetrics] | msgspec.UnsetType = msgspec.UNSET
    """Written only where there are any."""

    @classmethod
    def of(cls, seen: TickInput) -> "SavedInput":
        """Return the saved form of observations."""
        steps = seen.fpm_observations
        return cls(
            now_s=seen.now_s,
            traffic=seen.traffic,
            worker_counts=seen.worker_counts,
            prefill=None if steps is None else [steps.prefill[key] for key in sorted(steps.prefill)],
            decode=None if steps is None else [steps.decode[key] for key in sorted(steps.decode)],
            prompts=list(steps.prompts) if steps is not None and steps.prompts else msgspec.UNSET,
        )

    def restored(self) -> TickInput:
        """Return the observations."""
        steps = None
        if self.prefill is not None and self.decode is not None:
            prefill, decode = ({(one.worker_id, one.dp_rank): one for one in of} for of in (self.prefill, self.decode))
            steps = FpmObservations(prefill, decode, () if self.prompts is msgspec.UNSET else tuple(self.prompts))
        return TickInput(
            now_s=self.now_s, traffic=self.traffic, worker_counts=self.worker_counts, fpm_observations=steps
        )


class SavedReply(msgspec.Struct, kw_only=True):
    """Reply of a plugin that is not built in."""

    plugin_id: str
    stage: str
    response: dict[str, Any] | None = None
    failure: str = ""


class Tick(msgspec.Struct, kw_only=True):
    """One tick with its decision in JSON."""

    scheduled: ScheduledTick
    input: SavedInput
    replies: list[SavedReply] = []
    decision: msgspec.Raw = msgspec.Raw(b"null")


def decision_json(decision: TickDecision) -> bytes:
    """Return a decision as JSON with sorted keys."""
    return msgspec.json.encode(decision, order="sorted")


def encode(record: Start | Tick) -> bytes:
    """Return a line of a record."""
    return msgspec.json.encode(record) + b"\n"


def recorded(core: PlannerCore, scheduled: ScheduledTick, seen: TickInput) -> "Recording":
    """Return a tick under way, whose calls and replies are recorded.

    The planner decides from the saved form of the observations, so that a replay cannot differ in what JSON does not keep.
    """
    saved = msgspec.json.decode(msgspec.json.encode(SavedInput.of(seen)), type=SavedInput)
    return Recording(Tick(scheduled=scheduled, input=saved), core.turn(scheduled, saved.restored()))


class Recording:
    """A tick under way: `calls` are to be made and passed to `reply` until `decision` is set."""

    def __init__(self, tick: Tick, turn: DecisionTurn) -> None:
        self.tick = tick
        self.decision: TickDecision | None = None
        self.calls: list[PluginCall] = []
        self._turn = turn
        self._step(None)

    def reply(self, replies: Sequence[PluginReply]) -> None:
        """Pass the replies of the present calls on, in the same order."""
        for call, reply in zip(self.calls, replies, strict=True):
            self.tick.replies.append(
                SavedReply(
                    plugin_id=call.spec.plugin_id,
                    stage=call.spec.stage.value,
                    response=None if reply.response is None else msgspec.to_builtins(reply.response),
                    failure=reply.failure,
                )
            )
        self._step(list(replies))

    def _step(self, replies: list[PluginReply] | None) -> None:
        step = resume(self._turn, replies)
        if not isinstance(step, Finished):
            self.calls = step
            return
        self.calls, self.decision = [], step.result
        self.tick.decision = msgspec.Raw(decision_json(step.result))


def replay(lines: Iterable[bytes]) -> Iterator[tuple[Tick, bytes]]:
    """Yield each saved tick with the decision of a planner that starts from the first line.

    Raises `InvalidArgument` for a line that cannot be read, and for a tick whose plugins were called in another order.
    """
    source = iter(lines)
    core = _decoded(next(source, b""), Start, 1).planner()
    for number, line in enumerate(source, start=2):
        tick = _decoded(line, Tick, number)
        recording = Recording(
            Tick(scheduled=tick.scheduled, input=tick.input), core.turn(tick.scheduled, tick.input.restored())
        )
        saved = iter(tick.replies)
        while recording.decision is None:
            recording.reply([_restored(call, next(saved, None), number) for call in recording.calls])
        yield tick, decision_json(recording.decision)


def _restored(call: PluginCall, saved: SavedReply | None, line: int) -> PluginReply:
    if saved is None or (saved.plugin_id, saved.stage) != (call.spec.plugin_id, call.spec.stage.value):
        found = "no reply" if saved is None else f"a reply of {saved.plugin_id}"
        raise InvalidArgument(f"line {line}: expected a reply of {call.spec.plugin_id}, found {found}")
    if saved.response is None:
        return PluginReply(None, saved.failure)
    return PluginReply(msgspec.convert(saved.response, RESPONSES[saved.stage]))


def _decoded(line: bytes, kind: type[T], number: int) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"line {number}: cannot decode a {kind.__name__.lower()} record: {error}") from None
