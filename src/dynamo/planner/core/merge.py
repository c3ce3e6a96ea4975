"""Merge rules of the pipeline: how the results of the plugins of one stage become one proposal.

PROPOSE, RECONCILE and CONSTRAIN merge by the type of each target: a rejection ends the tick; a final override of the smallest
priority replaces the others; otherwise the recommendation (SET of the smallest priority, else the baseline) is clamped between
the largest AT_LEAST and the smallest AT_MOST. PREDICT is a chain: the first plugin that predicts a field wins.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.planner.plugins.types import (
    AcceptResult,
    ComponentTarget,
    OverrideResult,
    OverrideType,
    PredictionData,
    PredictStageResponse,
    RejectResult,
    ScalingProposal,
)

PREDICTED_FIELDS = (
    "predicted_num_req",
    "predicted_isl",
    "predicted_osl",
    "predicted_kv_hit_rate",
    "predicted_accept_length",
)


class Clamp(enum.StrEnum):
    """Bound that changed a recommendation."""

    FLOOR = "floor"
    CEILING = "ceiling"


@dataclass(frozen=True, slots=True)
class PluginResult:
    """Result of one plugin in one stage; smaller priorities have precedence."""

    plugin_id: str
    priority: int
    result: AcceptResult | OverrideResult | RejectResult
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class ClampRecord:
    """A recommendation that a bound changed, and the plugin that set the bound."""

    component: str
    bound: Clamp
    plugin_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOutcome:
    """Result of a stage."""

    proposal: ScalingProposal | None = None
    """None if the stage was rejected."""
    rejected_by: str = ""
    reject_reason: str = ""
    final_from: str = ""
    """Plugin whose final override replaced the others."""
    dropped_sets: tuple[str, ...] = ()
    """Roles whose SET targets were ignored, because the stage does not allow them."""
    clamped: tuple[ClampRecord, ...] = ()

    @property
    def is_rejected(self) -> bool:
        """Return whether the tick ends here."""
        return self.proposal is None


@dataclass(slots=True)
class _Bounds:
    """Targets of one role, each with its plugin."""

    floor: tuple[int, str] = (0, "")
    ceiling: tuple[int, str] | None = None
    recommendation: tuple[int, str] | None = None

    def add(self, target: ComponentTarget, replicas: int, plugin_id: str) -> None:
        if target.type is OverrideType.AT_LEAST:
            if replicas > self.floor[0]:
                self.floor = (replicas, plugin_id)
        elif target.type is OverrideType.AT_MOST:
            if self.ceiling is None or replicas < self.ceiling[0]:
                self.ceiling = (replicas, plugin_id)
        elif self.recommendation is None:
            self.recommendation = (replicas, plugin_id)


def merge_targets(
    results: Sequence[PluginResult], baseline: Mapping[str, int], *, allows_set: bool = True
) -> MergeOutcome:
    """Return the merged targets of a stage; without SET targets (CONSTRAIN), the baseline is only bounded."""
    ordered = sorted(results, key=lambda one: one.priority)
    for one in ordered:
        if isinstance(one.result, RejectResult):
            return MergeOutcome(rejected_by=one.plugin_id, reject_reason=one.result.reason)
    overrides = [(one, one.result) for one in ordered if isinstance(one.result, OverrideResult)]
    final = next(((one, result) for one, result in overrides if one.is_final), None) if allows_set else None
    if final is not None:
        return _final(final[0], final[1], baseline)
    bounds: dict[str, _Bounds] = {component: _Bounds() for component in baseline}
    dropped: list[str] = []
    for one, result in overrides:
        for target in result.targets:
            if target.replicas is None:
                continue
            component = target.sub_component_type
            if target.type is OverrideType.SET and not allows_set:
                dropped.append(component)
                continue
            bounds.setdefault(component, _Bounds()).add(target, target.replicas, one.plugin_id)
    clamped: list[ClampRecord] = []
    targets = []
    for component, bound in bounds.items():
        replicas = _resolved(component, bound, baseline, clamped)
        if replicas is not None:
            targets.append(ComponentTarget(sub_component_type=component, replicas=replicas))
    return MergeOutcome(
        proposal=ScalingProposal(targets=targets),
        dropped_sets=tuple(dict.fromkeys(dropped)),
        clamped=tuple(clamped),
    )


def _final(one: PluginResult, result: OverrideResult, baseline: Mapping[str, int]) -> MergeOutcome:
    """Return the numbers of a final override, whatever their types; other roles keep the baseline."""
    replicas = dict(baseline)
    replicas.update({t.sub_component_type: t.replicas for t in result.targets if t.replicas is not None})
    targets = [ComponentTarget(sub_component_type=component, replicas=count) for component, count in replicas.items()]
    return MergeOutcome(proposal=ScalingProposal(targets=targets), final_from=one.plugin_id)


def _resolved(component: str, bound: _Bounds, baseline: Mapping[str, int], clamped: list[ClampRecord]) -> int | None:
    """Return max(floor, min(ceiling, recommendation)); None for a role without recommendation, baseline and floor."""
    recommended = bound.recommendation[0] if bound.recommendation else baseline.get(component)
    if recommended is None and not bound.floor[1]:
        return None
    wanted = recommended or 0
    ceiling = wanted if bound.ceiling is None else bound.ceiling[0]
    replicas = max(bound.floor[0], min(ceiling, wanted))
    if replicas < wanted and bound.ceiling is not None:
        clamped.append(ClampRecord(component, Clamp.CEILING, bound.ceiling[1]))
    if replicas > wanted:
        clamped.append(ClampRecord(component, Clamp.FLOOR, bound.floor[1]))
    return replicas


@dataclass(slots=True)
class PredictionChain:
    """Predictions of a tick, filled by one plugin after the other in ascending priority."""

    prediction: PredictionData | None = None
    final_from: str = ""
    reasons: list[str] = field(default_factory=list)

    def add(self, plugin_id: str, response: PredictStageResponse) -> bool:
        """Add a plugin's predictions for the fields without any; return False if the chain ends."""
        if response.reason:
            self.reasons.append(response.reason)
        if response.predictions is not None:
            self.prediction = _first_of(self.prediction, response.predictions)
        if response.final:
            self.final_from = plugin_id
        return not response.final


def _first_of(earlier: PredictionData | None, later: PredictionData) -> PredictionData:
    if earlier is None:
        return later
    merged = {
        name: getattr(later, name) if getattr(earlier, name) is None else getattr(earlier, name)
        for name in PREDICTED_FIELDS
    }
    return PredictionData(**merged, source=earlier.source or later.source)
