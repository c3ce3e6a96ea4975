"""Helpers of `dynamo.common` outside its larger packages, and the import of all modules without optional packages."""

import importlib
import json
import math
import os
import pkgutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamo.common
import dynamo.logits_processing
import dynamo.nixl_connect
from dynamo.common.config_dump import get_config_dump
from dynamo.common.engine_monitor import EngineHealthMonitorConfig
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, WelfordAccumulator, decode, encode
from dynamo.common.lora import LoRAManager, OnceLock
from dynamo.common.metadata_upload import MetadataUploader
from dynamo.common.model_taints import register_model_taint_route
from dynamo.common.native_offloading import (
    NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY,
    get_native_offloading_capacity_tokens,
    native_offloading_capacity,
)
from dynamo.common.protocols import MediaPassthroughRejected, sanitize_media_passthrough
from dynamo.common.protocols.audio_protocol import NvCreateAudioSpeechRequest
from dynamo.common.rl import RLAdminValidationError, RLRouteRegistry, register_rl_routes, require_lora_load_request
from dynamo.common.snapshot.lifecycle import SnapshotConfig
from dynamo.common.snapshot.restore_context import apply_snapshot_restore_env, write_snapshot_restore_context
from dynamo.common.storage import get_fs, upload_to_fs
from dynamo.common.token_budget import TokenBudget
from dynamo.common.utils.namespace import get_worker_namespace

MODULES = [
    module.name
    for package in (dynamo.common, dynamo.logits_processing, dynamo.nixl_connect)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize(
    "name", [*MODULES, "dynamo.experimental", "dynamo.frontend.frontend_args", "dynamo.router.args"]
)
def test_every_common_module_is_importable(name: str) -> None:
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    assert not missing


def test_worker_namespace_has_the_suffix_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "blue")
    assert get_worker_namespace("prod") == "prod-blue"


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("-1", 0.0), ("nan", 2.0), ("soon", 2.0)])
def test_health_monitor_interval_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_INTERVAL", text)
    assert EngineHealthMonitorConfig.from_env().interval == seconds


def test_forward_pass_metrics_survive_their_encoding_and_other_versions_are_dropped() -> None:
    metrics = ForwardPassMetrics(worker_id="w", dp_rank=1, counter_id=2)
    assert decode(encode(metrics)) == metrics
    assert decode(encode(ForwardPassMetrics(version=2))) is None
    assert decode(b"\xc1") is None


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_variance_equals_that_of_the_statistics_module(values: list[int]) -> None:
    accumulator = WelfordAccumulator()
    for value in values:
        accumulator.add(value)
    assert accumulator.variance() == pytest.approx(statistics.pvariance(values))


@pytest.mark.parametrize(
    ("request_", "url"),
    [
        ({}, None),
        ({"nvext": {"metadata_upload": {"url": " s3://a "}}}, "s3://a"),
        ({"extra_args": {"nvext": {"metadata_upload": {"url": "b"}}}}, "b"),
    ],
)
def test_destination_of_output_metadata(request_: dict[str, Any], url: str | None) -> None:
    uploader = MetadataUploader.from_backend_request(request_)
    assert (uploader and uploader.url) == url


@pytest.mark.parametrize("settings", ["s3://a", {}, {"url": " "}, {"url": 3}, {"url": "a", "token": "b"}])
def test_invalid_destination_is_refused(settings: object) -> None:
    with pytest.raises(ValueError, match="metadata_upload"):
        MetadataUploader.from_backend_request({"nvext": {"metadata_upload": settings}})


def test_native_offloading_capacity_is_read_from_runtime_data() -> None:
    data = {NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY: native_offloading_capacity(512.0)}
    assert get_native_offloading_capacity_tokens(data) == 512
    assert native_offloading_capacity(math.nan) is None
    assert get_native_offloading_capacity_tokens({NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY: 512}) is None


def test_negative_token_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="combined_limit -1"):
        TokenBudget(-1, reject_prompt_overflow=True, reject_total_overflow=True)


async def test_file_is_stored_and_its_url_returned(tmp_path: Path) -> None:
    files = get_fs(f"file://{tmp_path}/media")
    assert await upload_to_fs(files, "a.png", b"1", "http://cdn/") == "http://cdn/a.png"
    assert (tmp_path / "media" / "a.png").read_bytes() == b"1"


class Routes:
    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def register_engine_route(self, name: str, handler: Any) -> None:
        self.handlers[name] = handler


@pytest.mark.parametrize("body", [{}, {"taints": "a"}, {"taints": [1]}, {"taints": ["dynamo.topology/zone=a"]}])
async def test_invalid_taints_are_refused(body: dict[str, Any]) -> None:
    routes: Any = Routes()
    register_model_taint_route(routes, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="taint"):
        await routes.handlers["update/model_taints"](body)


async def test_trainer_lists_routes_and_adapters_require_a_name_and_a_source() -> None:
    async def ping(body: dict[str, Any]) -> dict[str, Any]:
        return body

    routes: Any = Routes()
    registry = RLRouteRegistry(routes, world_size=2)
    register_rl_routes(routes, registry, {"ping": ping}, enable_dispatch=True)
    assert await registry.dispatch({"method": "routes"}) == {"status": "ok", "routes": ["ping"], "world_size": 2}
    assert (await registry.dispatch({"method": "stop"}))["status"] == "error"
    assert require_lora_load_request({"lora_name": "a", "source": {"uri": "u"}}) == ("a", "u")
    for request in (None, {"lora_name": "a"}, {"lora_name": 1, "source": {"uri": "u"}}):
        with pytest.raises(RLAdminValidationError):
            require_lora_load_request(request)


def test_value_is_created_once_and_again_after_a_failure() -> None:
    lock: OnceLock[str] = OnceLock()
    with pytest.raises(ZeroDivisionError):
        lock.get_or_init(lambda: str(1 / 0))
    assert (lock.get_or_init(lambda: "a"), lock.get_or_init(lambda: "b"), lock.get()) == ("a", "a", "a")


async def test_adapter_of_a_custom_source_is_downloaded_and_a_missing_one_reported(tmp_path: Path) -> None:
    class Source:
        async def exists(self, lora_uri: str) -> bool:
            return lora_uri.endswith("present")

        async def download(self, lora_uri: str, dest_path: Path) -> Path:
            return tmp_path

    manager = LoRAManager(tmp_path)
    manager.register_custom_source("mine", Source())
    assert await manager.download_lora("mine://present") == {"status": "success", "local_path": str(tmp_path)}
    assert (await manager.download_lora("mine://absent"))["status"] == "error"


def test_dump_has_the_configuration_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    dump = json.loads(get_config_dump({"modes": {"b", "a"}}))
    assert dump["config"] == {"modes": ["a", "b"]}
    assert dump["environment"]["HF_TOKEN"] == "<REDACTED>"
    assert "error" in json.loads(get_config_dump(float("nan")))


def test_context_of_a_snapshot_restores_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_SNAPSHOT_CONTROL_DIR", str(tmp_path))
    monkeypatch.setenv("POD_NAME", "new")
    monkeypatch.delenv("POD_UID", raising=False)
    write_snapshot_restore_context()
    monkeypatch.setenv("POD_NAME", "old")
    monkeypatch.setenv("POD_UID", "old")
    assert apply_snapshot_restore_env()["POD_NAME"] == "new"
    assert (os.environ["POD_NAME"], os.environ.get("POD_UID")) == ("new", None)
    (tmp_path / "restore-context.json").write_text('{"env": {"POD_NAME": 1}}')
    with pytest.raises(RuntimeError, match="restore context"):
        apply_snapshot_restore_env()


async def test_restored_process_resumes_after_its_sentinel(tmp_path: Path) -> None:
    class Engine:
        is_paused = False

        async def pause(self) -> None:
            self.is_paused = True

    (tmp_path / "restore-complete").touch()
    engine = Engine()
    assert await SnapshotConfig(str(tmp_path)).run_lifecycle(engine)
    assert engine.is_paused
    assert not (tmp_path / "ready-for-snapshot").exists()


def test_field_of_a_request_that_selects_a_file_is_refused() -> None:
    assert sanitize_media_passthrough({"media_passthrough": {"strength": 1}}) == {"strength": 1}
    with pytest.raises(MediaPassthroughRejected, match="vae_path"):
        sanitize_media_passthrough({"media_passthrough": {"vae_path": "/etc"}})
    with pytest.raises(ValueError, match="speed"):
        NvCreateAudioSpeechRequest(input="a", speed=9)
