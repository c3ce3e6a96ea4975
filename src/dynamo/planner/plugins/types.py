"""Messages between the pipeline and its plugins: upstream's names and fields, of the protocol `dynamo.planner.plugin.v1`.

A plugin implements the method of its stage: `Predict(PredictStageRequest)`, `Propose(ProposeStageRequest)`,
`Reconcile(ReconcileStageRequest)` or `Constrain(ConstrainStageRequest)`.
"""

import enum
from typing import Literal

import msgspec

ResultKind = Literal["", "accept", "override", "reject"]


class HoldPolicy(enum.IntEnum):
    """What represents a plugin at ticks at which it is not called."""

    ACCEPT_WHEN_IDLE = 0
    """Nothing."""
    HOLD_LAST = 1
    """Its last override."""


class CircuitState(enum.IntEnum):
    """State of the circuit breaker of a plugin."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class OverrideType(enum.IntEnum):
    """Meaning of a target: a recommendation, a floor or a ceiling."""

    SET = 0
    AT_LEAST = 1
    AT_MOST = 2


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: named fields only, absent ones have the protocol's zero value."""


class TrafficMetrics(_Message):
    """Traffic of the observation window; lengths are means in tokens."""

    duration_s: float = 0.0
    num_req: float = 0.0
    isl: float = 0.0
    osl: float = 0.0
    kv_hit_rate: float | None = None
    accept_length: float | None = None


class FpmData(_Message):
    """The latest forward pass of each rank as msgpack, by `worker/rank`."""

    prefill_engines: dict[str, bytes] = {}
    decode_engines: dict[str, bytes] = {}


class WorkerState(_Message):
    """Numbers of workers by role; None: the role does not exist, or the number is unknown."""

    ready_prefill: int | None = None
    ready_decode: int | None = None
    expected_prefill: int | None = None
    expected_decode: int | None = None
    prefill_scaling_in_progress: bool | None = None
    decode_scaling_in_progress: bool | None = None


class ObservationData(_Message):
    """Observations of a tick; None if not due."""

    traffic: TrafficMetrics | None = None
    fpm: FpmData | None = None
    workers: WorkerState | None = None


class PredictionData(_Message):
    """Predicted traffic of the next interval; None: no prediction."""

    predicted_num_req: float | None = None
    predicted_isl: float | None = None
    predicted_osl: float | None = None
    predicted_kv_hit_rate: float | None = None
    predicted_accept_length: float | None = None
    source: str = ""


class ComponentTarget(_Message):
    """A number of replicas of one role (`prefill` or `decode`)."""

    sub_component_type: str
    replicas: int | None = None
    type: OverrideType = OverrideType.SET


class ScalingProposal(_Message):
    """The targets of a stage."""

    targets: list[ComponentTarget] = []
    reason: str = ""
    source: str = ""


class PipelineContext(_Message):
    """State of a tick, which each stage extends."""

    request_id: str = ""
    """Identifies the tick."""
    decision_id: str = ""
    """Set by RECONCILE."""
    observations: ObservationData | None = None
    predictions: PredictionData | None = None
    proposal: ScalingProposal | None = None
    constrained: ScalingProposal | None = None


class AcceptResult(_Message):
    """No change to the proposal."""


class RejectResult(_Message):
    """End the tick without an action."""

    reason: str = ""


class OverrideResult(_Message):
    """Targets in place of, or as bounds of, the proposal."""

    targets: list[ComponentTarget] = []
    reason: str = ""


class _StageResponse(_Message):
    """One of accept, override and reject."""

    result_kind: ResultKind = ""
    accept: AcceptResult | None = None
    override: OverrideResult | None = None
    reject: RejectResult | None = None
    final: bool = False
    """An override that replaces the other plugins' results of the stage."""

    def __post_init__(self) -> None:
        """Derive the kind from the result that is present; more than one is a `ValueError`."""
        present: list[ResultKind] = []
        if self.accept is not None:
            present.append("accept")
        if self.override is not None:
            present.append("override")
        if self.reject is not None:
            present.append("reject")
        if len(present) > 1:
            raise ValueError(f"stage response: {' and '.join(present)} are mutually exclusive")
        if self.result_kind and present and present != [self.result_kind]:
            raise ValueError(f"result_kind {self.result_kind!r}: must be {present[0]!r}, the result that is present")
        if present:
            self.result_kind = present[0]


class PredictStageRequest(_Message):
    """Call of `Predict`."""

    context: PipelineContext | None = None


class PredictStageResponse(_Message):
    """Predictions of one plugin; `final` ends the stage."""

    predictions: PredictionData | None = None
    reason: str = ""
    final: bool = False


class ProposeStageRequest(_Message):
    """Call of `Propose`."""

    context: PipelineContext | None = None


class ProposeStageResponse(_StageResponse):
    """Result of `Propose`."""


class ProposeResult(_Message):
    """Result of one PROPOSE plugin, passed to RECONCILE."""

    plugin_id: str = ""
    result_kind: ResultKind = ""
    accept: AcceptResult | None = None
    override: OverrideResult | None = None
    reject: RejectResult | None = None
    priority: int = 0


class ReconcileStageRequest(_Message):
    """Call of `Reconcile`."""

    context: PipelineContext | None = None
    proposals: list[ProposeResult] = []


class ReconcileStageResponse(_StageResponse):
    """Result of `Reconcile`."""


class ConstrainStageRequest(_Message):
    """Call of `Constrain`."""

    context: PipelineContext | None = None


class ConstrainStageResponse(_StageResponse):
    """Result of `Constrain`."""


StageResponse = PredictStageResponse | ProposeStageResponse | ReconcileStageResponse | ConstrainStageResponse
StageRequest = PredictStageRequest | ProposeStageRequest | ReconcileStageRequest | ConstrainStageRequest


class RegisterRequest(_Message):
    """Registration of one plugin."""

    plugin_id: str = ""
    plugin_type: str = ""
    priority: int = 0
    """Smaller numbers have precedence."""
    endpoint: str = ""
    """`grpc://host:port`."""
    version: str = ""
    execution_interval_seconds: float = 0.0
    hold_policy: HoldPolicy = HoldPolicy.ACCEPT_WHEN_IDLE
    needs: list[str] = []
    protocol_version: str = ""
    auth_token: str = ""
    requires_produced_fields: list[str] = []
    observation_window_seconds: float = 0.0


class RegisterResponse(_Message):
    """Result of a registration."""

    accepted: bool = False
    reject_reason: str = ""
    negotiated_protocol_version: str = ""


class HeartbeatRequest(_Message):
    """Sign of life of a plugin."""

    plugin_id: str = ""
    auth_token: str = ""


class HeartbeatResponse(_Message):
    """Result of a heartbeat."""

    ok: bool = False


class UnregisterRequest(_Message):
    """Removal of a plugin."""

    plugin_id: str = ""
    reason: str = ""
    auth_token: str = ""


class UnregisterResponse(_Message):
    """Result of a removal."""

    ok: bool = False


class ListPluginsRequest(_Message):
    """Query of the registered plugins; an empty stage is all stages."""

    stage_filter: str = ""
    include_disabled: bool = False


class PluginInfo(_Message):
    """State of a registered plugin."""

    plugin_id: str = ""
    plugin_type: str = ""
    priority: int = 0
    version: str = ""
    protocol_version: str = ""
    enabled: bool = False
    is_builtin: bool = False
    transport: Literal["", "in_process", "grpc"] = ""
    circuit_state: CircuitState = CircuitState.CLOSED
    evaluations_total: int = 0
    last_call_at_seconds_ago: float = 0.0
    cache_age_seconds: float = 0.0


class ListPluginsResponse(_Message):
    """The registered plugins."""

    plugins: list[PluginInfo] = []


class BootstrapRequest(_Message):
    """First call of a plugin that the configuration names."""

    bootstrap_data: bytes = b""
    hints: dict[str, str] = {}


class BootstrapResponse(_Message):
    """Result of `Bootstrap`."""

    ok: bool = False
    message: str = ""


class ResetRequest(_Message):
    """Request to forget state, with the reason."""

    reason: str = ""


class ResetResponse(_Message):
    """Result of `Reset`."""

    ok: bool = False
    message: str = ""


LifecycleMessage = BootstrapRequest | BootstrapResponse | ResetRequest | ResetResponse
RegistryRequest = RegisterRequest | HeartbeatRequest | UnregisterRequest | ListPluginsRequest
RegistryResponse = RegisterResponse | HeartbeatResponse | UnregisterResponse | ListPluginsResponse
WireMessage = StageRequest | StageResponse | LifecycleMessage | RegistryRequest | RegistryResponse
