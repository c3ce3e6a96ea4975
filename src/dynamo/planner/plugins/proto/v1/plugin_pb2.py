"""Message classes and enumerations of `dynamo.planner.plugin.v1`."""

from typing import Any

from dynamo.planner.plugin_transport.messages import CLASSES
from dynamo.planner.plugins.types import CircuitState, HoldPolicy, OverrideType

__all__ = [
    "ACCEPT_WHEN_IDLE",
    "AT_LEAST",
    "AT_MOST",
    "CLOSED",
    "DESCRIPTOR",
    "HALF_OPEN",
    "HOLD_LAST",
    "OPEN",
    "SET",
    "AcceptResult",
    "BootstrapRequest",
    "BootstrapResponse",
    "CircuitState",
    "ComponentTarget",
    "ConstrainStageRequest",
    "ConstrainStageResponse",
    "FpmData",
    "HeartbeatRequest",
    "HeartbeatResponse",
    "HoldPolicy",
    "ListPluginsRequest",
    "ListPluginsResponse",
    "ObservationData",
    "OverrideResult",
    "OverrideType",
    "PipelineContext",
    "PluginInfo",
    "PredictStageRequest",
    "PredictStageResponse",
    "PredictionData",
    "ProposeResult",
    "ProposeStageRequest",
    "ProposeStageResponse",
    "ReconcileStageRequest",
    "ReconcileStageResponse",
    "RegisterRequest",
    "RegisterResponse",
    "RejectResult",
    "ResetRequest",
    "ResetResponse",
    "ScalingProposal",
    "TrafficMetrics",
    "UnregisterRequest",
    "UnregisterResponse",
    "WorkerState",
]

AcceptResult: Any = CLASSES["AcceptResult"]
BootstrapRequest: Any = CLASSES["BootstrapRequest"]
BootstrapResponse: Any = CLASSES["BootstrapResponse"]
ComponentTarget: Any = CLASSES["ComponentTarget"]
ConstrainStageRequest: Any = CLASSES["ConstrainStageRequest"]
ConstrainStageResponse: Any = CLASSES["ConstrainStageResponse"]
FpmData: Any = CLASSES["FpmData"]
HeartbeatRequest: Any = CLASSES["HeartbeatRequest"]
HeartbeatResponse: Any = CLASSES["HeartbeatResponse"]
ListPluginsRequest: Any = CLASSES["ListPluginsRequest"]
ListPluginsResponse: Any = CLASSES["ListPluginsResponse"]
ObservationData: Any = CLASSES["ObservationData"]
OverrideResult: Any = CLASSES["OverrideResult"]
PipelineContext: Any = CLASSES["PipelineContext"]
PluginInfo: Any = CLASSES["PluginInfo"]
PredictStageRequest: Any = CLASSES["PredictStageRequest"]
PredictStageResponse: Any = CLASSES["PredictStageResponse"]
PredictionData: Any = CLASSES["PredictionData"]
ProposeResult: Any = CLASSES["ProposeResult"]
ProposeStageRequest: Any = CLASSES["ProposeStageRequest"]
ProposeStageResponse: Any = CLASSES["ProposeStageResponse"]
ReconcileStageRequest: Any = CLASSES["ReconcileStageRequest"]
ReconcileStageResponse: Any = CLASSES["ReconcileStageResponse"]
RegisterRequest: Any = CLASSES["RegisterRequest"]
RegisterResponse: Any = CLASSES["RegisterResponse"]
RejectResult: Any = CLASSES["RejectResult"]
ResetRequest: Any = CLASSES["ResetRequest"]
ResetResponse: Any = CLASSES["ResetResponse"]
ScalingProposal: Any = CLASSES["ScalingProposal"]
TrafficMetrics: Any = CLASSES["TrafficMetrics"]
UnregisterRequest: Any = CLASSES["UnregisterRequest"]
UnregisterResponse: Any = CLASSES["UnregisterResponse"]
WorkerState: Any = CLASSES["WorkerState"]

ACCEPT_WHEN_IDLE = HoldPolicy.ACCEPT_WHEN_IDLE
HOLD_LAST = HoldPolicy.HOLD_LAST
SET = OverrideType.SET
AT_LEAST = OverrideType.AT_LEAST
AT_MOST = OverrideType.AT_MOST
CLOSED = CircuitState.CLOSED
OPEN = CircuitState.OPEN
HALF_OPEN = CircuitState.HALF_OPEN

DESCRIPTOR: Any = RegisterRequest.DESCRIPTOR.file
