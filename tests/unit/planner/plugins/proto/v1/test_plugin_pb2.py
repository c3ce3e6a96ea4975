"""Messages of the plugin protocol under the names that protoc generates."""

import pytest

from dynamo.planner.plugin_transport.messages import from_wire, to_wire
from dynamo.planner.plugins import types
from dynamo.planner.plugins.proto.v1 import plugin_pb2 as pb


def test_plugin_response_is_decoded_by_the_planner() -> None:
    response = pb.ProposeStageResponse()
    target = response.override.targets.add()
    target.sub_component_type, target.replicas, target.type = "decode", 3, pb.OverrideType.AT_LEAST
    found = from_wire(pb.ProposeStageResponse.FromString(response.SerializeToString()), types.ProposeStageResponse)
    assert found.result_kind == "override"
    assert found.override is not None
    target = types.ComponentTarget(sub_component_type="decode", replicas=3, type=types.OverrideType.AT_LEAST)
    assert found.override.targets == [target]


def test_enumerations_have_the_protocol_numbers() -> None:
    assert (pb.SET, pb.AT_LEAST, pb.AT_MOST) == (0, 1, 2)
    assert (pb.HoldPolicy.HOLD_LAST, pb.CircuitState.HALF_OPEN) == (1, 2)
    assert pb.RegisterRequest(hold_policy=pb.HOLD_LAST).hold_policy == 1


def test_registry_messages_are_complete() -> None:
    plugins = types.ListPluginsResponse(plugins=[types.PluginInfo(plugin_id="one", evaluations_total=2**40)])
    wire = to_wire(plugins)
    assert wire.plugins[0].evaluations_total == 2**40
    assert from_wire(wire, types.ListPluginsResponse) == plugins
    assert pb.ResetResponse(ok=True).ok


@pytest.mark.parametrize("name", pb.__all__)
def test_every_protobuf_name_exists(name: str) -> None:
    assert getattr(pb, name) is not None
