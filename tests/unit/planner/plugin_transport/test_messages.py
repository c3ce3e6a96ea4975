"""Wire messages are unchanged by a round trip."""

import pytest

from dynamo.planner.plugin_transport.messages import CLASSES, from_wire, to_wire
from dynamo.planner.plugins.types import (
    AcceptResult,
    ComponentTarget,
    FpmData,
    HoldPolicy,
    ObservationData,
    OverrideResult,
    OverrideType,
    PipelineContext,
    PredictionData,
    PredictStageResponse,
    ProposeResult,
    ProposeStageResponse,
    ReconcileStageRequest,
    RegisterRequest,
    RejectResult,
    TrafficMetrics,
    WireMessage,
    WorkerState,
)

TARGET = ComponentTarget(sub_component_type="decode", replicas=0, type=OverrideType.AT_LEAST)
CONTEXT = PipelineContext(
    request_id="tick-1",
    observations=ObservationData(
        traffic=TrafficMetrics(duration_s=5.0, num_req=3.0, isl=1.5, osl=2.0, kv_hit_rate=0.0, accept_length=2.0),
        fpm=FpmData(prefill_engines={"1/0": b"\x01"}),
        workers=WorkerState(ready_prefill=0, expected_decode=4, decode_scaling_in_progress=False),
    ),
    predictions=PredictionData(predicted_num_req=0.0, predicted_accept_length=1.0, source="a"),
)


@pytest.mark.parametrize(
    "message",
    [
        ReconcileStageRequest(
            context=CONTEXT,
            proposals=[ProposeResult(plugin_id="a", priority=3, override=OverrideResult(targets=[TARGET], reason="r"))],
        ),
        ProposeStageResponse(accept=AcceptResult(), final=True),
        ProposeStageResponse(reject=RejectResult(reason="no")),
        ProposeStageResponse(),
        PredictStageResponse(predictions=PredictionData(predicted_isl=0.0), final=True),
        RegisterRequest(plugin_id="a", hold_policy=HoldPolicy.HOLD_LAST, needs=["traffic"], priority=2),
    ],
)
def test_messages_round_trip(message: WireMessage) -> None:
    wire = CLASSES[type(message).__name__].FromString(to_wire(message).SerializeToString())
    assert from_wire(wire, type(message)) == message


def test_unknown_override_type_is_an_error() -> None:
    wire = CLASSES["ProposeStageResponse"]()
    wire.override.targets.add(sub_component_type="decode", replicas=1, type=9)
    with pytest.raises(ValueError, match="9 is not a valid OverrideType"):
        from_wire(wire, ProposeStageResponse)


def test_number_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="out of range"):
        to_wire(ComponentTarget(sub_component_type="decode", replicas=2**40))
