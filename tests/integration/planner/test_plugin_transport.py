"""gRPC plugins: real servers, one that proposes, one that hangs, one that registers itself and one that goes away."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tests.cluster.processes import DEADLINE_S

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.record import Start, encode, recorded, replay
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.plugin_transport.host import PluginHost
from dynamo.planner.plugin_transport.messages import CLASSES, REGISTRY_SERVICE, SERVICES
from dynamo.protocols.planner import EngineCapabilities, ScalingDecision, TickInput, WorkerCounts

pytestmark = [pytest.mark.integration, pytest.mark.kserve]

ENGINE = EngineCapabilities(num_gpu=1, context_length=4096, max_kv_tokens=100_000)
CAPABILITIES = WorkerCapabilities(prefill=ENGINE, decode=ENGINE)
SECRET = {"trusted_sources": ["static_secret"], "static_secrets": {"secret": "team"}}
INSECURE = {"allow_insecure_grpc": True, "request_timeout_seconds": DEADLINE_S}


@dataclass
class ProposingPlugin:
    """A plugin server that sets the decode workers, after a delay."""

    replicas: int = 3
    delay_s: float = 0.0
    requests: list[Any] = field(default_factory=list)

    async def propose(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        response = CLASSES["ProposeStageResponse"]()
        response.override.targets.add(sub_component_type="decode", replicas=self.replicas)
        return response


@asynccontextmanager
async def served(plugin: ProposingPlugin) -> AsyncIterator[str]:
    """Serve a plugin and yield its endpoint."""
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        plugin.propose,
        request_deserializer=CLASSES["ProposeStageRequest"].FromString,
        response_serializer=CLASSES["ProposeStageResponse"].SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICES["Propose"], {"Propose": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def raw_config(*endpoints: str, **registration: Any) -> dict[str, Any]:
    entries = [
        {
            "plugin_id": f"p{number}",
            "plugin_type": "propose",
            "priority": number,
            "endpoint": endpoint,
            "auth_token": "secret",
        }
        for number, endpoint in enumerate(endpoints)
    ]
    return {
        "scheduling": {"external_plugins": entries},
        "plugin_registration": {"auth": SECRET, "transport": INSECURE, **registration},
    }


@asynccontextmanager
async def hosted(raw: dict[str, Any]) -> AsyncIterator[tuple[PluginHost, PlannerCore, Callable[[], Awaitable[TickDecision]]]]:  # fmt: skip
    """Yield a host, its planner, and a function that makes one tick."""
    host = PluginHost(parse(raw))
    await host.start()
    core = PlannerCore(parse(raw), CAPABILITIES, host.specs)
    scheduled = core.first_tick(0.0)

    async def tick() -> TickDecision:
        nonlocal scheduled
        host.apply_changes(core.pipeline)
        counts = WorkerCounts(ready_num_prefill=1, ready_num_decode=1, expected_num_prefill=1, expected_num_decode=1)
        recording = recorded(core, scheduled, TickInput(now_s=scheduled.at_s, worker_counts=counts))
        await host.finish(recording)
        assert recording.decision is not None
        scheduled = core.next_tick(scheduled, scheduled.at_s)
        return recording.decision

    try:
        yield host, core, tick
    finally:
        await host.close()


async def test_grpc_plugin_receives_the_observations_and_sets_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynamo.planner.audit")
    plugin = ProposingPlugin(replicas=4)
    async with served(plugin) as endpoint, hosted(raw_config(endpoint)) as (_, _, tick):
        decision = await tick()
    assert decision.scale_to == ScalingDecision(num_decode=4)
    context = plugin.requests[0].context
    assert (context.request_id, context.observations.workers.ready_decode) == ("tick-1", 1)
    assert any('"event": "plugin_evaluated"' in line and '"tick_id": "tick-1"' in line for line in caplog.messages)


async def test_hanging_plugin_times_out_and_opens_its_circuit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynamo.planner.audit")
    plugin = ProposingPlugin(delay_s=10 * DEADLINE_S)
    async with served(plugin) as endpoint:
        raw = raw_config(endpoint, transport={**INSECURE, "request_timeout_seconds": 0.05})
        async with hosted(raw) as (_, _, tick):
            decisions = [await tick() for _ in range(6)]
    assert all(one.scale_to is None for one in decisions)
    # A request that times out on a busy machine before it is received is counted as a timeout, too.
    assert [sum(word in line for line in caplog.messages) for word in ("plugin_timeout", "plugin_circuit_open")] == [
        5,
        1,
    ]
    assert len(plugin.requests) <= 5


async def test_slow_plugin_does_not_extend_the_tick_beyond_its_limit() -> None:
    async with served(ProposingPlugin(delay_s=10 * DEADLINE_S)) as endpoint:
        raw = raw_config(endpoint)
        raw["scheduling"]["tick_max_duration_seconds"] = 0.1
        async with hosted(raw) as (_, _, tick):
            async with asyncio.timeout(DEADLINE_S):
                decision = await tick()
    assert decision.scale_to is None


async def test_last_override_of_a_plugin_holds_between_its_calls() -> None:
    plugin = ProposingPlugin(replicas=5)
    async with served(plugin) as endpoint:
        raw = raw_config(endpoint)
        raw["scheduling"]["external_plugins"][0]["execution_interval_seconds"] = 100.0
        async with hosted(raw) as (_, _, tick):
            decisions = [await tick() for _ in range(3)]
    assert [one.scale_to for one in decisions] == [ScalingDecision(num_decode=5)] * 3
    assert len(plugin.requests) == 1


async def test_unreachable_plugin_does_not_stop_the_planner() -> None:
    async with hosted(raw_config("grpc://127.0.0.1:1")) as (_, _, tick):
        decision = await tick()
    assert decision.scale_to is None
    assert any("unavailable" in reason for one in decision.stages for _, reason in one.failed)


async def registry_call(address: str, method: str, **fields: Any) -> Any:
    kind = f"{method}Request"
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{REGISTRY_SERVICE}/{method}",
            request_serializer=CLASSES[kind].SerializeToString,
            response_deserializer=CLASSES[f"{method}Response"].FromString,
        )
        return await call(CLASSES[kind](**fields), timeout=DEADLINE_S)


async def test_plugin_registers_itself_and_its_ticks_replay() -> None:
    raw = raw_config()
    raw["scheduling"]["gateway"] = {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}
    async with served(ProposingPlugin(replicas=2)) as endpoint, hosted(raw) as (host, core, tick):
        assert host.gateway is not None
        assert (await tick()).scale_to is None
        fields = {"plugin_id": "mine", "plugin_type": "propose", "priority": 1, "endpoint": endpoint}
        answer = await registry_call(
            host.gateway.address, "Register", **fields, protocol_version="1.0", auth_token="secret"
        )
        assert answer.accepted, answer.reject_reason
        assert (await registry_call(host.gateway.address, "Heartbeat", plugin_id="mine", auth_token="secret")).ok
        assert host.apply_changes(core.pipeline)
        lines = [encode(Start.of(core))]
        scheduled = core.first_tick(0.0)
        recording = recorded(core, scheduled, TickInput(now_s=100.0))
        await host.finish(recording)
        lines.append(encode(recording.tick))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await registry_call(host.gateway.address, "Unregister", plugin_id="mine", auth_token="wrong")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await registry_call(host.gateway.address, "Unregister", plugin_id="mine", auth_token="secret")).ok
        again = await registry_call(
            host.gateway.address, "Register", **fields, protocol_version="1.0", auth_token="secret"
        )
        assert again.accepted, again.reject_reason
        assert (await tick()).scale_to == ScalingDecision(num_decode=2)
        assert (await registry_call(host.gateway.address, "Unregister", plugin_id="mine", auth_token="secret")).ok
        assert (await tick()).scale_to is None
    assert recording.decision is not None
    assert recording.decision.scale_to == ScalingDecision(num_decode=2)
    assert [decided for _, decided in replay(lines)] == [bytes(recording.tick.decision)]


def test_gateway_refuses_an_unencrypted_address_without_permission() -> None:
    raw = {"scheduling": {"gateway": {"enabled": True, "listen": "127.0.0.1:0"}}}
    with pytest.raises(ConfigError, match=r"scheduling\.gateway\.listen"):
        PluginHost(parse(raw))
