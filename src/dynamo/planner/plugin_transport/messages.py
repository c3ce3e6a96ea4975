"""Wire messages of `dynamo.planner.plugin.v1`, and their conversion from and to the messages of `dynamo.planner.plugins.types`."""

from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command
from dynamo.planner.plugins import types

try:
    from dynamo.grpc.message_tables import classes_of, file_of
except ImportError:
    raise ConfigError(f"scheduling: gRPC plugins require gRPC; install it: {install_command('grpc')}") from None

T = TypeVar("T", bound=msgspec.Struct)

PACKAGE = "dynamo.planner.plugin.v1"
REGISTRY_SERVICE = f"{PACKAGE}.PluginRegistry"
SERVICES = {
    "Predict": f"{PACKAGE}.PredictPlugin",
    "Propose": f"{PACKAGE}.ProposePlugin",
    "Reconcile": f"{PACKAGE}.ReconcilePlugin",
    "Constrain": f"{PACKAGE}.ConstrainPlugin",
    "Bootstrap": f"{PACKAGE}.PluginLifecycle",
}
"""Service of each method of a plugin."""
RESPONSES: dict[str, type[types.WireMessage]] = {
    "Predict": types.PredictStageResponse,
    "Propose": types.ProposeStageResponse,
    "Reconcile": types.ReconcileStageResponse,
    "Constrain": types.ConstrainStageResponse,
    "Bootstrap": types.BootstrapResponse,
}
_RESULT = "1 accept AcceptResult|result, 2 override OverrideResult|result, 3 reject RejectResult|result, 4 final bool"
TABLE = {
    "RegisterRequest": (
        "1 plugin_id string, 2 plugin_type string, 3 priority uint32, 4 endpoint string, 5 version string,"
        " 6 execution_interval_seconds float, 7 hold_policy HoldPolicy, 8 needs string*, 9 protocol_version string,"
        " 10 auth_token string, 13 requires_produced_fields string*, 14 observation_window_seconds float"
    ),
    "RegisterResponse": "1 accepted bool, 2 reject_reason string, 3 negotiated_protocol_version string",
    "HeartbeatRequest": "1 plugin_id string, 2 auth_token string",
    "HeartbeatResponse": "1 ok bool",
    "UnregisterRequest": "1 plugin_id string, 2 reason string, 3 auth_token string",
    "UnregisterResponse": "1 ok bool",
    "ListPluginsRequest": "1 stage_filter string, 2 include_disabled bool",
    "ListPluginsResponse": "1 plugins PluginInfo*",
    "PluginInfo": (
        "1 plugin_id string, 2 plugin_type string, 3 priority uint32, 4 version string, 5 protocol_version string,"
        " 6 enabled bool, 7 is_builtin bool, 8 transport string, 9 circuit_state CircuitState,"
        " 10 evaluations_total uint64, 11 last_call_at_seconds_ago double, 12 cache_age_seconds double"
    ),
    "PipelineContext": (
        "1 request_id string, 2 decision_id string, 3 observations ObservationData, 4 predictions PredictionData,"
        " 5 proposal ScalingProposal, 6 constrained ScalingProposal"
    ),
    "ObservationData": "1 traffic TrafficMetrics, 2 fpm FpmData, 3 workers WorkerState",
    "TrafficMetrics": (
        "1 duration_s double, 2 num_req double, 3 isl double, 4 osl double, 5 kv_hit_rate double?,"
        " 6 accept_length double?"
    ),
    "FpmData": "1 prefill_engines bytes%, 2 decode_engines bytes%",
    "WorkerState": (
        "1 ready_prefill int32?, 2 ready_decode int32?, 3 expected_prefill int32?, 4 expected_decode int32?,"
        " 5 prefill_scaling_in_progress bool?, 6 decode_scaling_in_progress bool?"
    ),
    "PredictionData": (
        "1 predicted_num_req double?, 2 predicted_isl double?, 3 predicted_osl double?, 4 source string,"
        " 5 predicted_kv_hit_rate double?, 6 predicted_accept_length double?"
    ),
    "ScalingProposal": "1 targets ComponentTarget*, 2 reason string, 3 source string",
    "ComponentTarget": "1 sub_component_type string, 3 replicas int32?, 4 type OverrideType",
    "OverrideResult": "1 targets ComponentTarget*, 2 reason string",
    "AcceptResult": "",
    "RejectResult": "1 reason string",
    "PredictStageRequest": "1 context PipelineContext",
    "PredictStageResponse": "1 predictions PredictionData, 2 reason string, 3 final bool",
    "ProposeStageRequest": "1 context PipelineContext",
    "ProposeStageResponse": _RESULT,
    "ProposeResult": (
        "1 plugin_id string, 2 accept AcceptResult|result, 3 override OverrideResult|result,"
        " 4 reject RejectResult|result, 5 priority uint32"
    ),
    "ReconcileStageRequest": "1 context PipelineContext, 2 proposals ProposeResult*",
    "ReconcileStageResponse": _RESULT,
    "ConstrainStageRequest": "1 context PipelineContext",
    "ConstrainStageResponse": _RESULT,
    "BootstrapRequest": "1 bootstrap_data bytes, 2 hints string%",
    "BootstrapResponse": "1 ok bool, 2 message string",
    "ResetRequest": "1 reason string",
    "ResetResponse": "1 ok bool, 2 message string",
}
ENUMS: dict[str, type[IntEnum]] = {
    "hold_policy": types.HoldPolicy,
    "type": types.OverrideType,
    "circuit_state": types.CircuitState,
}
"""Enumeration of each field that is one; an unknown number is an error."""

NAMES = {kind.__name__: [one.name for one in kind] for kind in ENUMS.values()}

CLASSES = classes_of(file_of("planner_plugin.proto", PACKAGE, TABLE, NAMES))


def to_wire(message: msgspec.Struct) -> Any:
    """Return a message in its wire class. Raise `ValueError` for a number out of the field's range."""
    wire = CLASSES[type(message).__name__]()
    for field in wire.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if value is None:
            continue
        if isinstance(value, msgspec.Struct):
            getattr(wire, field.name).CopyFrom(to_wire(value))
            getattr(wire, field.name).SetInParent()
        elif isinstance(value, dict):
            getattr(wire, field.name).update(value)
        elif isinstance(value, list):
            getattr(wire, field.name).extend(to_wire(one) if isinstance(one, msgspec.Struct) else one for one in value)
        else:
            setattr(wire, field.name, value)
    return wire


def from_wire(wire: Any, kind: type[T]) -> T:
    """Return a wire message as one of `kind`. Raise `ValueError` for an unknown enumeration value."""
    values: dict[str, Any] = {}
    for field in wire.DESCRIPTOR.fields:
        value = getattr(wire, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        elif hasattr(value, "append"):  # A repeated field; older releases of protobuf name it differently.
            values[field.name] = [_converted(field, one) for one in value]
        elif not field.has_presence or wire.HasField(field.name):
            values[field.name] = _converted(field, value)
    return kind(**values)


def _converted(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return from_wire(value, getattr(types, field.message_type.name))
    return ENUMS[field.name](value) if field.name in ENUMS else value
