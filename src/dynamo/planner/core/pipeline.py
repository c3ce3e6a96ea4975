"""Plugin pipeline of a tick: PREDICT → PROPOSE → RECONCILE → CONSTRAIN, without I/O.

`PluginPipeline.run` is a generator: it yields the plugin calls of a stage and receives their replies in the same order. The caller
makes the calls in whatever way it likes (`drive` for plugins in this process), enforces the time limit of each and of the
tick, and reports failures as replies. Time is an argument.
"""

import enum
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from dynamo.core.boundaries import ErrorBoundary
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.checkpoint import PluginCheckpoint
from dynamo.planner.core.circuit import Circuit
from dynamo.planner.core.merge import MergeOutcome, PluginResult, PredictionChain, merge_targets
from dynamo.planner.core.reasons import ExecuteAction
from dynamo.planner.plugins.types import (
    AcceptResult,
    ConstrainStageRequest,
    HoldPolicy,
    OverrideResult,
    PipelineContext,
    PredictStageRequest,
    PredictStageResponse,
    ProposeResult,
    ProposeStageRequest,
    ReconcileStageRequest,
    RejectResult,
    ScalingProposal,
    StageRequest,
    StageResponse,
)

T = TypeVar("T")

TIME_TOLERANCE_S = 1e-6
"""A plugin is due if its interval ends within this of the tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """Registration of one plugin."""

    plugin_id: str
    stage: PluginStage
    priority: int
    execution_interval_s: float = 0.0
    """Minimum seconds between calls; 0: every tick."""
    hold_policy: HoldPolicy = HoldPolicy.ACCEPT_WHEN_IDLE
    requires: tuple[str, ...] = ()
    """Dotted paths of the context that must be set, such as `predictions.predicted_num_req`."""


@dataclass(frozen=True, slots=True)
class PluginCall:
    """A call that the owner of the pipeline has to make."""

    spec: PluginSpec
    request: StageRequest


@dataclass(frozen=True, slots=True)
class PluginReply:
    """Result of a call: a response, or the reason why there is none."""

    response: StageResponse | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What happened in one stage."""

    stage: PluginStage
    results: tuple[PluginResult, ...] = ()
    held: tuple[str, ...] = ()
    """Plugins represented by their last override."""
    failed: tuple[tuple[str, str], ...] = ()
    """Plugins that failed, each with the reason."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Plugins that were due but not called, each with the reason."""
    outcome: MergeOutcome | None = None


class ActivityKind(enum.Enum):
    """What a plugin did, or why it did nothing."""

    DUE = enum.auto()
    EVALUATED = enum.auto()
    FAILED = enum.auto()
    IDLE = enum.auto()
    """Its interval has not passed."""
    HELD = enum.auto()
    """Its last override takes part."""
    UNSATISFIED = enum.auto()


@dataclass(frozen=True, slots=True)
class PluginActivity:
    """One event of a plugin in a tick, for metrics; not part of the decision."""

    kind: ActivityKind
    stage: PluginStage
    plugin_id: str
    seconds: float = 0.0
    """DUE: delay after the end of its interval. HELD: age of the override."""
    missing: str = ""
    """UNSATISFIED: the path of the context that is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOutcome:
    """Result of a tick's pipeline."""

    action: ExecuteAction
    proposal: ScalingProposal | None
    context: PipelineContext
    stages: tuple[StageRecord, ...]
    rejected_by: str = ""
    reject_reason: str = ""

    @property
    def has_proposals(self) -> bool:
        """Return whether any plugin proposed or bounded a number."""
        return any(isinstance(one.result, OverrideResult) for stage in self.stages for one in stage.results)


@dataclass(slots=True)
class _PluginState:
    circuit: Circuit = field(default_factory=Circuit)
    called_at_s: float | None = None
    last_override: PluginResult | None = None
    override_at_s: float | None = None


Turn = Generator[list[PluginCall], list[PluginReply], PipelineOutcome]


class PluginPipeline:
    """The registered plugins, their circuit breakers and their last results. One owner."""

    def __init__(self, plugins: Sequence[PluginSpec] = ()) -> None:
        self._plugins: dict[str, PluginSpec] = {}
        self._states: dict[str, _PluginState] = {}
        self.activity: list[PluginActivity] = []
        """Events of the last tick."""
        for plugin in plugins:
            self.register(plugin)

    def register(self, plugin: PluginSpec) -> None:
        """Add a plugin, or replace the one of the same id with a fresh state."""
        self._plugins[plugin.plugin_id] = plugin
        self._states[plugin.plugin_id] = _PluginState()

    def unregister(self, plugin_id: str) -> bool:
        """Remove a plugin and its last result; return whether it was registered."""
        self._states.pop(plugin_id, None)
        return self._plugins.pop(plugin_id, None) is not None

    @property
    def plugins(self) -> list[PluginSpec]:
        """The registered plugins."""
        return list(self._plugins.values())

    def circuit(self, plugin_id: str) -> Circuit:
        """Return the circuit breaker of a plugin."""
        return self._states[plugin_id].circuit

    def checkpoint(self) -> dict[str, PluginCheckpoint]:
        """Return the state of each plugin."""
        found = {}
        for plugin_id, state in self._states.items():
            last = state.last_override
            found[plugin_id] = PluginCheckpoint(
                failures=state.circuit.failures,
                opened_at_s=state.circuit.opened_at_s,
                called_at_s=state.called_at_s,
                override=last.result if last and isinstance(last.result, OverrideResult) else None,
                is_final=last is not None and last.is_final,
            )
        return found

    def restore(self, saved: Mapping[str, PluginCheckpoint]) -> None:
        """Set the state of the registered plugins to that of a checkpoint."""
        for plugin_id, one in saved.items():
            spec, state = self._plugins.get(plugin_id), self._states.get(plugin_id)
            if spec is None or state is None:
                continue  # Not configured any more.
            state.circuit.failures, state.circuit.opened_at_s = one.failures, one.opened_at_s
            state.called_at_s = one.called_at_s
            if one.override is not None:
                state.last_override = PluginResult(plugin_id, spec.priority, one.override, one.is_final)

    def run(self, context: PipelineContext, baseline: Mapping[str, int], now_s: float) -> Turn:
        """Run one tick from a context and the current numbers by role."""
        self.activity = []
        stages = [(yield from self._predict(context, now_s))]
        proposals: list[ProposeResult] = []
        current = dict(baseline)
        for stage in (PluginStage.PROPOSE, PluginStage.RECONCILE, PluginStage.CONSTRAIN):
            record = yield from self._fan_out(stage, context, current, proposals, now_s)
            stages.append(record)
            outcome = record.outcome
            if outcome is None or outcome.proposal is None:
                return PipelineOutcome(
                    action=ExecuteAction.SKIP_SHORT_CIRCUIT,
                    proposal=None,
                    context=context,
                    stages=tuple(stages),
                    rejected_by=outcome.rejected_by if outcome else "",
                    reject_reason=outcome.reject_reason if outcome else "",
                )
            current = {one.sub_component_type: one.replicas or 0 for one in outcome.proposal.targets}
            if stage is PluginStage.PROPOSE:
                proposals = [_proposed(one) for one in record.results]
            if stage is PluginStage.CONSTRAIN:
                context.constrained = outcome.proposal
            else:
                context.proposal = outcome.proposal
            if stage is PluginStage.RECONCILE:
                context.decision_id = f"{context.request_id}-decision" if context.request_id else "decision"
        done = PipelineOutcome(
            action=ExecuteAction.APPLY, proposal=context.constrained, context=context, stages=tuple(stages)
        )
        if done.has_proposals:
            return done
        return PipelineOutcome(
            action=ExecuteAction.SKIP_NO_TARGETS, proposal=None, context=context, stages=tuple(stages)
        )

    def _predict(
        self, context: PipelineContext, now_s: float
    ) -> Generator[list[PluginCall], list[PluginReply], StageRecord]:
        """Call the predictors one after the other, so that each sees the predictions before it."""
        chain = PredictionChain()
        failed: list[tuple[str, str]] = []
        due, held, skipped = self._due(PluginStage.PREDICT, context, now_s)
        for spec in due:
            (reply,) = yield [PluginCall(spec, PredictStageRequest(context=context))]
            response = self._received(spec, reply, PredictStageResponse, now_s, failed)
            if not isinstance(response, PredictStageResponse):
                continue
            goes_on = chain.add(spec.plugin_id, response)
            context.predictions = chain.prediction
            if not goes_on:
                break
        return StageRecord(
            PluginStage.PREDICT, held=tuple(one.plugin_id for one in held), failed=tuple(failed), skipped=tuple(skipped)
        )

    def _fan_out(
        self,
        stage: PluginStage,
        context: PipelineContext,
        baseline: Mapping[str, int],
        proposals: list[ProposeResult],
        now_s: float,
    ) -> Generator[list[PluginCall], list[PluginReply], StageRecord]:
        """Call all due plugins of a stage at once, and merge their results with those that are held."""
        due, held, skipped = self._due(stage, context, now_s)
        failed: list[tuple[str, str]] = []
        results: list[PluginResult] = []
        if due:
            replies = yield [PluginCall(spec, _request(stage, context, proposals)) for spec in due]
            for spec, reply in zip(due, replies, strict=True):
                response = self._received(spec, reply, object, now_s, failed)
                result = None if response is None else _result(spec, response)
                if result is not None:
                    results.append(result)
                    if isinstance(result.result, OverrideResult):
                        state = self._states[spec.plugin_id]
                        state.last_override, state.override_at_s = result, now_s
        held_results = self._held(stage, held, now_s)
        merged = merge_targets((*results, *held_results), baseline, allows_set=stage is not PluginStage.CONSTRAIN)
        return StageRecord(
            stage,
            (*results, *held_results),
            tuple(one.plugin_id for one in held_results),
            tuple(failed),
            tuple(skipped),
            merged,
        )

    def _held(self, stage: PluginStage, plugins: Sequence[PluginSpec], now_s: float) -> list[PluginResult]:
        """Return the last overrides of plugins."""
        found = []
        for spec in plugins:
            state = self._states[spec.plugin_id]
            if state.last_override is None:
                continue
            since_s = state.called_at_s if state.override_at_s is None else state.override_at_s
            age_s = 0.0 if since_s is None else max(0.0, now_s - since_s)
            self.activity.append(PluginActivity(ActivityKind.HELD, stage, spec.plugin_id, age_s))
            found.append(state.last_override)
        return found

    def _due(
        self, stage: PluginStage, context: PipelineContext, now_s: float
    ) -> tuple[list[PluginSpec], list[PluginSpec], list[tuple[str, str]]]:
        """Return the plugins to call, those to represent by their last result, and those skipped with a reason."""
        due, held, skipped = [], [], []
        for spec in sorted(self._plugins.values(), key=lambda one: one.priority):
            if spec.stage is not stage:
                continue
            state = self._states[spec.plugin_id]
            missing = next((path for path in spec.requires if _at(context, path) is None), None)
            # After a clock that jumped back, the last call lies in the future: call again.
            elapsed_s = math.inf if state.called_at_s is None else now_s - state.called_at_s
            if 0 <= elapsed_s < spec.execution_interval_s - TIME_TOLERANCE_S:
                self.activity.append(PluginActivity(ActivityKind.IDLE, stage, spec.plugin_id))
                if spec.hold_policy is HoldPolicy.HOLD_LAST:
                    held.append(spec)
            elif not state.circuit.can_call(now_s):
                skipped.append((spec.plugin_id, "circuit open"))
            elif missing is not None:
                skipped.append((spec.plugin_id, f"{missing} is not set"))
                self.activity.append(PluginActivity(ActivityKind.UNSATISFIED, stage, spec.plugin_id, missing=missing))
            else:
                self.activity.append(PluginActivity(ActivityKind.DUE, stage, spec.plugin_id, _lag(spec, elapsed_s)))
                due.append(spec)
        return due, held, skipped

    def _received(
        self, spec: PluginSpec, reply: PluginReply, expected: type[object], now_s: float, failed: list[tuple[str, str]]
    ) -> StageResponse | None:
        """Return the response of a call, and update the plugin's state."""
        state = self._states.get(spec.plugin_id)
        if state is None:
            return None  # Unregistered during the call.
        if reply.response is None or not isinstance(reply.response, expected):
            state.circuit.failed(now_s)
            failed.append((spec.plugin_id, reply.failure or "response of another stage"))
            self.activity.append(PluginActivity(ActivityKind.FAILED, spec.stage, spec.plugin_id))
            return None
        self.activity.append(PluginActivity(ActivityKind.EVALUATED, spec.stage, spec.plugin_id))
        state.called_at_s = now_s  # A call that failed is repeated at the next tick, until the circuit opens.
        state.circuit.succeeded()
        return reply.response


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """Result of a turn that has no more calls."""

    result: T


def resume(
    turn: Generator[list[PluginCall], list[PluginReply], T], replies: list[PluginReply] | None
) -> list[PluginCall] | Finished[T]:
    """Return the next calls of a turn, given the replies to the last ones (None at the start), or its result."""
    try:
        return next(turn) if replies is None else turn.send(replies)
    except StopIteration as done:
        return Finished(done.value)


def drive(turn: Generator[list[PluginCall], list[PluginReply], T], call: Callable[[PluginCall], StageResponse]) -> T:
    """Run a turn whose plugins are called in this process; an exception is a failed call."""
    replies: list[PluginReply] | None = None
    while not isinstance(step := resume(turn, replies), Finished):
        replies = [call_plugin(one, call) for one in step]
    return step.result


def call_plugin(one: PluginCall, call: Callable[[PluginCall], StageResponse]) -> PluginReply:
    """Return the reply of a plugin in this process; an exception is a failure."""
    failures: list[str] = []
    with ErrorBoundary(lambda error: failures.append(f"{type(error).__name__}: {error}")):  # It must not end the tick.
        return PluginReply(call(one))
    return PluginReply(None, failures[0])


def _lag(spec: PluginSpec, elapsed_s: float) -> float:
    """Return the seconds after the end of a plugin's interval; 0 at its first call and without an interval."""
    if not math.isfinite(elapsed_s) or spec.execution_interval_s <= 0:
        return 0.0
    return max(0.0, elapsed_s - spec.execution_interval_s)


def _request(stage: PluginStage, context: PipelineContext, proposals: list[ProposeResult]) -> StageRequest:
    if stage is PluginStage.PROPOSE:
        return ProposeStageRequest(context=context)
    if stage is PluginStage.RECONCILE:
        return ReconcileStageRequest(context=context, proposals=proposals)
    return ConstrainStageRequest(context=context)


def _result(spec: PluginSpec, response: StageResponse) -> PluginResult | None:
    """Return the result of a response; None if it contains none."""
    if isinstance(response, PredictStageResponse):
        return None
    found = response.accept or response.override or response.reject
    if found is None:
        return None
    is_final = response.final and spec.stage is not PluginStage.CONSTRAIN
    return PluginResult(spec.plugin_id, spec.priority, found, is_final)


def _proposed(one: PluginResult) -> ProposeResult:
    return ProposeResult(
        plugin_id=one.plugin_id,
        priority=one.priority,
        result_kind={AcceptResult: "accept", OverrideResult: "override", RejectResult: "reject"}[type(one.result)],  # type: ignore[arg-type]
        accept=one.result if isinstance(one.result, AcceptResult) else None,
        override=one.result if isinstance(one.result, OverrideResult) else None,
        reject=one.result if isinstance(one.result, RejectResult) else None,
    )


def _at(context: PipelineContext, path: str) -> object:
    """Return the value at a dotted path; None if any part is not set or does not exist."""
    value: object = context
    for name in path.split("."):
        if not isinstance(value, msgspec.Struct) or name not in value.__struct_fields__:
            return None
        value = getattr(value, name)
    return value
