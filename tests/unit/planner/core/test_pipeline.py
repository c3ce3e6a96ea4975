"""Plugin pipeline: stages, intervals, held results, failures, circuit breakers."""

from collections.abc import Callable

from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.circuit import Circuit
from dynamo.planner.core.pipeline import PipelineOutcome, PluginCall, PluginPipeline, PluginSpec, drive
from dynamo.planner.core.reasons import ExecuteAction
from dynamo.planner.plugins.types import (
    AcceptResult,
    CircuitState,
    ComponentTarget,
    ConstrainStageResponse,
    HoldPolicy,
    OverrideResult,
    OverrideType,
    PipelineContext,
    ProposeStageResponse,
    ReconcileStageRequest,
    ReconcileStageResponse,
    RejectResult,
    StageResponse,
)


def spec(plugin_id: str, stage: PluginStage = PluginStage.PROPOSE, **more: object) -> PluginSpec:
    return PluginSpec(plugin_id=plugin_id, stage=stage, priority=1, **more)  # type: ignore[arg-type]


def targets(count: int, of: OverrideType = OverrideType.SET) -> OverrideResult:
    return OverrideResult(targets=[ComponentTarget(sub_component_type="decode", replicas=count, type=of)])


def propose(count: int) -> Callable[[PluginCall], StageResponse]:
    return lambda call: ProposeStageResponse(override=targets(count))


def run(pipeline: PluginPipeline, call: Callable[[PluginCall], StageResponse], now_s: float = 0.0) -> PipelineOutcome:
    return drive(pipeline.run(PipelineContext(request_id="t"), {"decode": 2}, now_s), call)


def replicas(outcome: PipelineOutcome) -> int | None:
    return outcome.proposal.targets[0].replicas if outcome.proposal else None


def test_pipeline_without_proposals_applies_no_targets() -> None:
    assert run(PluginPipeline(), propose(9)).action is ExecuteAction.SKIP_NO_TARGETS


def test_pipeline_passes_the_proposals_to_reconcile_and_bounds_them_in_constrain() -> None:
    pipeline = PluginPipeline([spec("p"), spec("r", PluginStage.RECONCILE), spec("c", PluginStage.CONSTRAIN)])

    def call(one: PluginCall) -> StageResponse:
        if one.spec.stage is PluginStage.RECONCILE:
            assert isinstance(one.request, ReconcileStageRequest)
            assert [proposal.plugin_id for proposal in one.request.proposals] == ["p"]
            return ReconcileStageResponse(override=targets(8))
        if one.spec.stage is PluginStage.CONSTRAIN:
            return ConstrainStageResponse(override=targets(5, OverrideType.AT_MOST))
        return ProposeStageResponse(override=targets(4))

    outcome = run(pipeline, call)
    assert (outcome.action, replicas(outcome)) == (ExecuteAction.APPLY, 5)
    assert outcome.context.decision_id


def test_rejection_ends_the_tick_and_names_the_plugin() -> None:
    outcome = run(PluginPipeline([spec("p")]), lambda call: ProposeStageResponse(reject=RejectResult(reason="freeze")))
    assert outcome.action is ExecuteAction.SKIP_SHORT_CIRCUIT
    assert (outcome.rejected_by, outcome.reject_reason) == ("p", "freeze")


def test_throttled_plugin_is_represented_by_its_last_override_if_it_holds() -> None:
    for policy, expected in ((HoldPolicy.HOLD_LAST, 7), (HoldPolicy.ACCEPT_WHEN_IDLE, None)):
        pipeline = PluginPipeline([spec("p", execution_interval_s=60.0, hold_policy=policy)])
        assert replicas(run(pipeline, propose(7), 0.0)) == 7
        assert replicas(run(pipeline, propose(9), 30.0)) == expected
        assert replicas(run(pipeline, propose(9), 60.0)) == 9


def test_plugin_that_requires_a_missing_prediction_is_skipped() -> None:
    outcome = run(PluginPipeline([spec("p", requires=("predictions.predicted_isl",))]), propose(7))
    assert outcome.stages[1].skipped == (("p", "predictions.predicted_isl is not set"),)


def test_failing_plugin_does_not_end_the_tick_and_is_not_called_while_its_circuit_is_open() -> None:
    pipeline = PluginPipeline([spec("bad"), spec("good")])
    calls: list[str] = []

    def call(one: PluginCall) -> StageResponse:
        calls.append(one.spec.plugin_id)
        if one.spec.plugin_id == "bad":
            raise TimeoutError("5 s")
        return ProposeStageResponse(override=targets(3))

    for tick in range(5):
        outcome = run(pipeline, call, float(tick))
        assert outcome.stages[1].failed == (("bad", "TimeoutError: 5 s"),)
        assert replicas(outcome) == 3
    assert run(pipeline, call, 6.0).stages[1].skipped == (("bad", "circuit open"),)
    assert calls.count("bad") == 5
    run(pipeline, call, 40.0)
    assert calls.count("bad") == 6


def test_circuit_is_tried_once_after_the_cooldown_and_closes_on_success() -> None:
    circuit = Circuit(failures_max=2, cooldown_s=10.0)
    assert not circuit.failed(0.0)
    assert circuit.failed(1.0)
    assert circuit.state(5.0) is CircuitState.OPEN
    assert circuit.state(11.0) is CircuitState.HALF_OPEN
    assert circuit.failed(11.0)
    assert circuit.state(12.0) is CircuitState.OPEN
    circuit.succeeded()
    assert circuit.state(12.0) is CircuitState.CLOSED


def test_plugin_unregistered_during_its_call_leaves_no_state() -> None:
    pipeline = PluginPipeline([spec("p")])

    def call(one: PluginCall) -> StageResponse:
        pipeline.unregister("p")
        return ProposeStageResponse(override=targets(3))

    assert run(pipeline, call).action is ExecuteAction.SKIP_NO_TARGETS
    assert not pipeline.plugins


def test_plugin_is_called_and_its_circuit_closes_after_the_clock_has_jumped_back() -> None:
    spec = PluginSpec(plugin_id="p", stage=PluginStage.PROPOSE, priority=1, execution_interval_s=10.0)
    pipeline, calls = PluginPipeline([spec]), []

    def call(one: PluginCall) -> StageResponse:
        calls.append(one)
        return ProposeStageResponse(accept=AcceptResult())

    for now_s in (1000.0, 10.0, 15.0):
        drive(pipeline.run(PipelineContext(), {"decode": 1}, now_s), call)
    assert len(calls) == 2
    circuit = Circuit(failures_max=1)
    assert circuit.failed(1000.0)
    assert circuit.can_call(10.0)
