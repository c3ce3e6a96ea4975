"""Merge rules: rejections, final overrides, bounds, and unknown baselines."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.merge import Clamp, PluginResult, PredictionChain, merge_targets
from dynamo.planner.plugins.types import (
    ComponentTarget,
    OverrideResult,
    OverrideType,
    PredictionData,
    PredictStageResponse,
    RejectResult,
)


def override(plugin_id: str, priority: int, *targets: tuple[int, OverrideType], is_final: bool = False) -> PluginResult:
    made = [ComponentTarget(sub_component_type="decode", replicas=count, type=of) for count, of in targets]
    return PluginResult(plugin_id, priority, OverrideResult(targets=made), is_final)


def decode(results: list[PluginResult], baseline: int = 4, *, allows_set: bool = True) -> int | None:
    found = merge_targets(results, {"decode": baseline}, allows_set=allows_set)
    return None if found.proposal is None else found.proposal.targets[0].replicas


def test_recommendation_of_the_smallest_priority_wins() -> None:
    assert decode([override("b", 2, (9, OverrideType.SET)), override("a", 1, (6, OverrideType.SET))]) == 6


def test_recommendation_is_clamped_between_floor_and_ceiling() -> None:
    results = [override("a", 1, (9, OverrideType.SET)), override("cap", 5, (5, OverrideType.AT_MOST))]
    found = merge_targets(results, {"decode": 4})
    assert found.proposal is not None
    assert found.proposal.targets[0].replicas == 5
    assert [(one.component, one.bound, one.plugin_id) for one in found.clamped] == [("decode", Clamp.CEILING, "cap")]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_floor_has_precedence_over_ceiling(wanted: int, floor: int, ceiling: int) -> None:
    results = [
        override("a", 1, (wanted, OverrideType.SET)),
        override("b", 1, (floor, OverrideType.AT_LEAST), (ceiling, OverrideType.AT_MOST)),
    ]
    assert decode(results) == max(floor, min(ceiling, wanted))


def test_rejection_ends_the_stage() -> None:
    found = merge_targets(
        [override("a", 1, (9, OverrideType.SET)), PluginResult("b", 9, RejectResult(reason="frozen"))], {}
    )
    assert found.is_rejected
    assert (found.rejected_by, found.reject_reason) == ("b", "frozen")


def test_final_override_replaces_the_results_of_other_plugins() -> None:
    results = [override("a", 1, (9, OverrideType.SET)), override("b", 5, (2, OverrideType.SET), is_final=True)]
    assert decode(results) == 2


def test_constrain_stage_ignores_recommendations_and_final() -> None:
    results = [override("a", 1, (9, OverrideType.SET), is_final=True), override("b", 2, (3, OverrideType.AT_MOST))]
    found = merge_targets(results, {"decode": 4}, allows_set=False)
    assert found.proposal is not None
    assert (found.proposal.targets[0].replicas, found.dropped_sets) == (3, ("decode",))


def test_ceiling_for_a_role_of_unknown_size_is_not_zero() -> None:
    found = merge_targets([override("a", 1, (5, OverrideType.AT_MOST))], {})
    assert found.proposal is not None
    assert found.proposal.targets == []


def test_first_prediction_of_a_field_wins_and_final_ends_the_chain() -> None:
    chain = PredictionChain()
    assert chain.add("a", PredictStageResponse(predictions=PredictionData(predicted_num_req=1.0, source="a")))
    later = PredictionData(predicted_num_req=2.0, predicted_isl=3.0, source="b")
    assert not chain.add("b", PredictStageResponse(predictions=later, final=True))
    assert chain.prediction == PredictionData(predicted_num_req=1.0, predicted_isl=3.0, source="a")
