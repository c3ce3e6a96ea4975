"""Engine controls: sleep and wake, profiles, weight updates and adapters."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.settle import repeat
from tests.unit.cpu.conftest import CONFIG, ReceivedOutput, random_adapter

from dynamo.backend.engine import EngineConfig
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.engine import CpuEngine
from dynamo.cpu.lora import TARGETS
from dynamo.protocols.engine import PreprocessedRequest, Routing, SamplingOptions, StopConditions
from dynamo.protocols.kv_events import Cleared

TIMEOUT_S = 30.0
PROMPT = [(11 * at) % 90 for at in range(21)]


class Host:
    worker_id = 7

    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.events: list[Any] = []
        self.service: list[str] = []

    def publish_kv_event(self, event: Any, dp_rank: int = 0, tier: str = "device") -> None:
        self.events.append(event)

    def publish_load(self, load: Any) -> None: ...

    def publish_forward_pass(self, passed: Any, dp_rank: int = 0) -> None: ...

    def fail(self, error: BaseException) -> None:
        raise error

    async def leave_service(self) -> None:
        self.service.append("left")

    async def return_to_service(self) -> None:
        self.service.append("back")


class Listening(ReceivedOutput):
    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def finish(self) -> None:
        super().finish()
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.ended.set()


class EngineUnderTest:
    """A running engine, its host and its routes."""

    def __init__(self, engine: CpuEngine, host: Host, config: EngineConfig, path: str) -> None:
        self.engine, self.host, self.config, self.path = engine, host, config, path

    async def press(self, name: str, **body: Any) -> dict[str, Any]:
        return await ({**self.config.routes, **self.config.endpoints})[name](body)

    def begin(self, lora: str | None = None, *, count: int = 8) -> Listening:
        request = PreprocessedRequest(
            model="m",
            token_ids=PROMPT,
            stop_conditions=StopConditions(max_tokens=count),
            sampling_options=SamplingOptions(temperature=0.0),
            routing=None if lora is None else Routing(lora_name=lora),
        )
        reply = Listening()
        self.engine.submit(request, reply)
        return reply

    async def until_on_disk(self, blocks: int) -> None:
        stored = [0]

        async def read_status() -> None:
            stored.append((await self.press("kvbm"))["tiers"]["disk"]["stored"])

        await repeat(read_status, lambda: stored[-1] >= blocks)

    async def send_request(self, lora: str | None = None) -> list[int]:
        reply = self.begin(lora)
        await asyncio.wait_for(reply.ended.wait(), TIMEOUT_S)
        assert reply.error is None, reply.error
        return reply.tokens


@pytest.fixture
async def start(write_model: Callable[..., str], tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    started: list[CpuEngine] = []

    async def begin(**options: Any) -> EngineUnderTest:
        host, path = Host(), options.pop("model_path", None) or write_model()
        given = {"model_path": path, "block_size": 4, "enable_rl": True, "profile_dir": str(tmp_path / "profiles")}
        engine = CpuEngine(CpuConfig(**(given | options)))
        started.append(engine)
        return EngineUnderTest(engine, host, await engine.start(host), path)

    yield begin
    for engine in started:
        await engine.stop()


def changed(path: str, tmp_path: Path, seed: int = 5) -> str:
    """The same model with other weights and other norms, which adapters are read against."""
    new = tmp_path / f"changed{seed}"
    shutil.copytree(path, new)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (tensor * rng.uniform(0.7, 1.3, tensor.shape)).astype(np.float32)
        for name, tensor in load_file(new / "model.safetensors").items()
    }
    save_file(tensors, new / "model.safetensors")
    return str(new)


def trace_in(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return found


async def test_engine_sleep_refuses_requests_and_wake_accepts_requests(start: Any) -> None:
    stand = await start()
    want = await stand.send_request()
    assert (await stand.press("control/sleep", level=2))["status"] == "ok"
    assert not stand.engine.core.model.is_loaded
    assert stand.host.service == ["left"]
    with pytest.raises(EngineShutdown, match="asleep") as refused:
        stand.begin()
    assert refused.value.retry_elsewhere
    await stand.engine.between_steps(lambda: None)  # The events of the last step are published.
    assert any(isinstance(event, Cleared) for event in stand.host.events), "routers do not count on its cache"
    assert (await stand.press("control/wake_up", tags=["kv_cache"]))["message"] == "Engine partly awake"
    assert "allowed values" in (await stand.press("control/wake_up", tags=["odd"]))["message"]
    assert (await stand.press("control/wake_up", tags=["weights"]))["message"] == "Engine woke"
    assert stand.host.service == ["left", "back"]
    assert await stand.send_request() == want


async def test_engine_sleep_is_refused_while_busy(start: Any) -> None:
    stand = await start()
    reply = stand.begin(count=200)
    found = await stand.press("control/sleep")  # This host does not wait until it is quiet.
    assert found["status"] == "error"
    assert stand.host.service == ["left", "back"]
    await asyncio.wait_for(reply.ended.wait(), TIMEOUT_S)
    assert len(reply.tokens) == 200
    assert await stand.send_request()


async def test_engine_weight_update_applies_to_model_and_adapters(
    start: Any, write_adapter: Callable[..., str], tmp_path: Path
) -> None:
    stand = await start(enable_lora=True)
    tensors = random_adapter(CONFIG, targets=TARGETS)
    await stand.config.adapters.load("tuned", write_adapter(tensors))
    before = [await stand.send_request(), await stand.send_request("tuned")]
    new = changed(stand.path, tmp_path)
    assert (await stand.press("update_weights_from_disk", model_path=new, weight_version=7))["status"] == "ok"
    assert stand.host.service == ["left", "back"]
    after = [await stand.send_request(), await stand.send_request("tuned")]
    fresh = await start(model_path=new, enable_lora=True)
    await fresh.config.adapters.load("tuned", write_adapter(tensors))
    assert after == [await fresh.send_request(), await fresh.send_request("tuned")]
    assert after != before
    assert (await stand.press("get_weight_version"))["version"] == "7"


async def test_engine_weight_update_during_sleep_applies_after_wake(start: Any, tmp_path: Path) -> None:
    stand = await start()
    await stand.press("control/sleep")
    new = changed(stand.path, tmp_path)
    assert (await stand.press("update_weights_from_disk", model_path=new))["status"] == "ok"
    assert stand.host.service == ["left"], "it sleeps on"
    await stand.press("control/wake_up")
    fresh = await start(model_path=new)
    assert await stand.send_request() == await fresh.send_request()


async def test_engine_weight_update_of_another_model_is_refused_and_keeps_the_old_weights(
    start: Any, write_model: Callable[..., str], tmp_path: Path
) -> None:
    stand = await start()
    want = await stand.send_request()
    other = write_model(num_hidden_layers=3)
    assert "another model" in (await stand.press("update_weights_from_disk", model_path=other))["message"]
    assert (await stand.press("update_weights_from_disk", model_path=str(tmp_path)))["status"] == "error"
    assert stand.host.service == []
    assert await stand.send_request() == want


async def test_engine_weight_update_is_refused_during_block_transfers(start: Any, tmp_path: Path) -> None:
    stand = await start(disaggregation_mode="decode")
    found = await stand.press("update_weights_from_disk", model_path=changed(stand.path, tmp_path))
    assert "disaggregated" in found["message"]


async def test_engine_weight_update_invalidates_blocks_of_lower_tiers(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "64")
    stand = await start(kv_cache_blocks=16)
    before = await stand.send_request()
    new = changed(stand.path, tmp_path)
    assert (await stand.press("update_weights_from_disk", model_path=new))["status"] == "ok"
    fresh = await start(model_path=new, kv_cache_blocks=16)
    after = await fresh.send_request()
    assert [await stand.send_request(), await stand.send_request()] == [after, after] != [before, before]
    await stand.press("control/sleep")
    await stand.press("update_weights_from_disk", model_path=stand.path)
    await stand.press("control/wake_up")
    assert await stand.send_request() == before


async def test_engine_routes_depend_on_the_kind_of_worker(start: Any) -> None:
    trainers = {"update_weights_from_disk", "get_weight_version", "set_weight_version", "flush_cache", "abort_request"}
    profile = {"control/start_profile", "control/stop_profile"}
    sleep = {"control/sleep", "control/wake_up"}
    assert (await start(enable_rl=False)).config.routes.keys() == profile | sleep
    assert (await start()).config.routes.keys() == profile | sleep | trainers | {"liveness_probe"}
    decode = await start(disaggregation_mode="decode", enable_rl=False)
    assert decode.config.routes.keys() == profile, "others read its cache where it lies"
    assert decode.config.endpoints.keys() == {"clear_kv_blocks"}


async def test_engine_abort_ends_a_request_by_id(start: Any) -> None:
    stand = await start()
    reply = stand.begin(count=200)
    assert await stand.press("abort_request", request_id="request") == {"status": "ok", "request_id": "request"}
    await asyncio.wait_for(reply.ended.wait(), TIMEOUT_S)
    assert reply.messages[-1].finish_reason == "cancelled"
    await stand.press("abort_request", request_id="unknown")
    assert await stand.send_request()


async def test_engine_profile_contains_every_step_since_its_start(start: Any, tmp_path: Path) -> None:
    stand = await start()
    await stand.send_request()
    assert (await stand.press("control/start_profile", profile_prefix="a/b"))["status"] == "ok"
    assert (await stand.press("control/start_profile"))["status"] == "error"
    await stand.press("clear_kv_blocks")
    await stand.send_request()
    reported = await stand.press("control/stop_profile")
    assert Path(reported["path"]).parent == tmp_path / "profiles"
    assert Path(reported["path"]).name.startswith("a-b-")
    events = trace_in(reported["path"])
    steps = [event["args"] for event in events if event["name"] == "step"]
    assert sum(step["prefill_tokens"] for step in steps) == len(PROMPT)
    assert sum(step["decode_requests"] for step in steps) == 7
    assert (await stand.press("control/stop_profile"))["status"] == "error"


async def test_engine_profile_reports_an_unwritable_path(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stand = await start(profile_dir=str(tmp_path / "file"))
    await stand.press("control/start_profile")
    assert (await stand.press("control/stop_profile"))["status"] == "error"


async def test_engine_unload_of_an_adapter_ends_its_requests(start: Any, write_adapter: Callable[..., str]) -> None:
    stand = await start(enable_lora=True)
    adapters = stand.config.adapters
    assert adapters.slots == 8
    tensors = random_adapter(CONFIG, targets=TARGETS)
    await adapters.load("tuned", write_adapter(tensors))
    want = await stand.send_request("tuned")
    assert want != await stand.send_request()
    reply = stand.begin("tuned")
    await adapters.unload("tuned")
    await asyncio.wait_for(reply.ended.wait(), TIMEOUT_S)
    assert reply.tokens == want
    with pytest.raises(WorkerUnavailable):
        stand.begin("tuned")
    await adapters.load("tuned", write_adapter(random_adapter(CONFIG, targets=TARGETS, seed=9)))
    assert await stand.send_request("tuned") != want, "nothing is left of the one that had its name"
    await adapters.unload("tuned")
    await adapters.load("tuned", write_adapter(tensors))
    assert await stand.send_request("tuned") == want


async def test_engine_adapter_routes_require_lora_to_be_enabled(start: Any, tmp_path: Path) -> None:
    stand = await start()
    assert stand.config.adapters is None
    with pytest.raises(WorkerUnavailable):
        stand.begin("tuned")
    with pytest.raises(ConfigError, match="--enable-lora"):
        CpuConfig(enable_lora=True, embedding_worker=True)
    with pytest.raises(ConfigError, match="--max-loras 0"):
        CpuConfig(enable_lora=True, max_loras=0)


async def test_engine_controls_are_refused_after_stop(start: Any) -> None:
    stand = await start()
    await stand.engine.stop()
    with pytest.raises(EngineShutdown):
        await stand.engine.between_steps(lambda: None)


async def test_engine_control_error_between_steps_reaches_its_caller(start: Any) -> None:
    stand = await start()

    def fail() -> None:
        raise InvalidArgument("not like this")

    with pytest.raises(InvalidArgument, match="not like this"):
        await stand.engine.between_steps(fail)
    assert await stand.send_request()


async def test_engine_tiers_separate_adapters_across_a_restart(
    start: Any,
    write_model: Callable[..., str],
    write_adapter: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "64")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "64")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_DIR", str(tmp_path / "disk"))
    monkeypatch.setenv("DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", "true")
    old, new = (write_adapter(random_adapter(CONFIG, targets=TARGETS, seed=seed)) for seed in (1, 2))
    model, output = write_model(), list[list[int]]()
    for path in (old, new, old):  # Each start uses a new engine; the disk outlives them.
        stand = await start(kv_cache_blocks=16, enable_lora=True, model_path=model)
        await stand.config.adapters.load("tuned", path)
        reply = stand.begin("tuned")
        await asyncio.wait_for(reply.ended.wait(), TIMEOUT_S)
        output.append(reply.tokens)
        usage = reply.messages[-1].completion_usage
        assert usage.prompt_tokens_details.cached_tokens == (0 if len(output) < 3 else len(PROMPT) // 4 * 4)
        await stand.until_on_disk(len(PROMPT) // 4 * min(len(output), 2))
        await stand.engine.stop()
    assert output[0] == output[2] != output[1]
