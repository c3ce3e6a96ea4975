"""Plugins written with the released planner's package: they register at our gateway and take part in our ticks."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner_peer import planner_home, planner_python

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.record import recorded
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.plugin_transport.host import PluginHost
from dynamo.protocols.planner import EngineCapabilities, ScalingDecision, TickInput, WorkerCounts

pytestmark = [pytest.mark.conformance, pytest.mark.kserve]

SCRIPT = Path(__file__).with_name("peer_plugin.py")
READY_S = 60.0
ENGINE = EngineCapabilities(num_gpu=1, context_length=4096, max_kv_tokens=100_000)
RAW: dict[str, Any] = {
    "max_gpu_budget": 64,
    "scheduling": {"gateway": {"enabled": True, "listen": "127.0.0.1:0", "allow_insecure": True}},
    "plugin_registration": {
        "auth": {"trusted_sources": ["static_secret"], "static_secrets": {"secret": "team"}},
        "transport": {"allow_insecure_grpc": True},
    },
}


def require_planner_peer() -> None:
    """Skip the test where the released planner is not installed."""
    if not os.path.exists(os.path.join(planner_home(), "ready")):
        pytest.skip(f"the released planner is not installed in {planner_home()}: python -m benchmarks.planner_peer")


@asynccontextmanager
async def released_plugin(*argv: str) -> AsyncIterator[str]:
    """Run the released reference plugin and yield its endpoint."""
    require_planner_peer()
    process = await asyncio.create_subprocess_exec(
        planner_python(),
        str(SCRIPT),
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            line = (await process.stdout.readline()).decode()
        if not line.startswith("LISTEN_READY "):
            _, errors = await process.communicate()
            pytest.fail(f"the released plugin did not start: {line}{errors.decode()[-1500:]}")
        yield line.split()[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def decided(host: PluginHost) -> TickDecision:
    """Return the decision of one tick with one worker of each role."""
    core = PlannerCore(parse(RAW), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    host.apply_changes(core.pipeline)
    counts = WorkerCounts(ready_num_prefill=1, ready_num_decode=1, expected_num_prefill=1, expected_num_decode=1)
    recording = recorded(core, core.first_tick(0.0), TickInput(now_s=5.0, worker_counts=counts))
    await host.finish(recording)
    assert recording.decision is not None
    return recording.decision


async def test_released_plugins_of_all_stages_register_and_decide_together() -> None:
    host = PluginHost(parse(RAW))
    await host.start()
    try:
        assert host.gateway is not None
        common = ("--listen", "127.0.0.1:0", "--auth-token", "secret", "--gateway-endpoint", host.gateway.address)
        async with (
            released_plugin(*common, "--stage", "propose", "--prefill", "7", "--decode", "11"),
            released_plugin(*common, "--stage", "predict", "--priority", "1", "--predict-isl", "567"),
            released_plugin(*common, "--stage", "constrain", "--prefill", "5", "--decode", "40"),
        ):
            decision = await decided(host)
    finally:
        await host.close()
    assert decision.scale_to == ScalingDecision(num_prefill=5, num_decode=11)
    assert decision.predictions is not None
    assert (decision.predictions.predicted_isl, decision.predictions.source) == (567.0, "subprocess_external_predict")
    assert not [one.failed for one in decision.stages if one.failed]


async def test_released_plugin_with_a_wrong_token_is_refused() -> None:
    host = PluginHost(parse(RAW))
    await host.start()
    try:
        assert host.gateway is not None
        argv = ("--listen", "127.0.0.1:0", "--auth-token", "other", "--gateway-endpoint", host.gateway.address)
        with pytest.raises(pytest.fail.Exception, match="auth_failed"):
            async with released_plugin(*argv):
                pass
        assert host.specs == []
    finally:
        await host.close()
