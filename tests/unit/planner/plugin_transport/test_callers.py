"""Plugins in this process: each failure is a reason, never an exception of the tick."""

import asyncio
import re
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.plugins import InProcessPluginSpec, PluginStage, TransportConfig
from dynamo.planner.plugin_transport.callers import GrpcPlugin, InProcessPlugin, PluginCallError, load_plugin
from dynamo.planner.plugins.types import AcceptResult, ProposeStageRequest, ProposeStageResponse


class AcceptingPlugin:
    """Accepts all proposals."""

    async def Propose(self, request: ProposeStageRequest) -> ProposeStageResponse:
        return ProposeStageResponse(accept=AcceptResult())


class HangingPlugin:
    """Never returns."""

    async def Propose(self, request: ProposeStageRequest) -> ProposeStageResponse:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


class BrokenPlugin:
    """Fails at each call."""

    def Propose(self, request: ProposeStageRequest) -> ProposeStageResponse:
        raise KeyError("x")


class SilentPlugin:
    """Returns nothing."""

    async def Propose(self, request: ProposeStageRequest) -> None:
        return None


async def test_plugin_in_this_process_returns_its_response() -> None:
    response = await InProcessPlugin(AcceptingPlugin()).call("Propose", ProposeStageRequest(), 1.0)
    assert response == ProposeStageResponse(accept=AcceptResult())


@pytest.mark.parametrize(
    ("instance", "reason"),
    [
        (HangingPlugin(), "timeout: no response within 0.01 s"),
        (BrokenPlugin(), "KeyError: 'x'"),
        (SilentPlugin(), "invalid message: NoneType: must be ProposeStageResponse"),
        (object(), "unimplemented: object has no method Propose"),
    ],
)
async def test_failure_of_a_plugin_in_this_process_is_a_reason(instance: object, reason: str) -> None:
    with pytest.raises(PluginCallError, match=re.escape(reason)):
        await InProcessPlugin(instance).call("Propose", ProposeStageRequest(), 0.01)


def spec(**changes: Any) -> InProcessPluginSpec:
    fields: dict[str, Any] = {"module": __name__, "class_": "AcceptingPlugin", "plugin_id": "mine"}
    return InProcessPluginSpec(**{**fields, "plugin_type": PluginStage.PROPOSE, "priority": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plugin_id": "builtin_load_propose"}, "plugin_id: must not be empty or begin with builtin_"),
        ({"module": "no_such_module"}, "mine: module 'no_such_module': cannot be imported"),
        ({"module": "math", "class_": "Missing"}, "mine: class 'Missing': must be a class of the module math"),
        ({"module": "decimal", "class_": "Decimal"}, "mine: class 'Decimal': TypeError: must have a method Propose"),
        (
            {"module": "fractions", "class_": "Fraction", "kwargs": {"x": 1}},
            "mine: class 'Fraction': TypeError: Fraction.__new__() got an unexpected keyword argument 'x'",
        ),
    ],
)
def test_plugin_that_cannot_be_loaded_is_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_plugin(spec(**changes))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("endpoint", ["http://h:1", "grpc://", "inproc://a", "grpc://h:1"])
def test_endpoint_that_cannot_be_used_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        GrpcPlugin("p", endpoint, TransportConfig())
