"""Helpers of workers and components."""

import asyncio
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Gauge

from dynamo.common.utils import graceful_shutdown, time_section
from dynamo.common.utils.endpoint_types import parse_endpoint_types
from dynamo.common.utils.engine_response import normalize_finish_reason, trailing_stop_prefix_len
from dynamo.common.utils.guided_json import admits_only_empty_object, reject_nonprogressing_guided_json_ref_cycles
from dynamo.common.utils.input_params import InputParamManager
from dynamo.common.utils.label_injecting_collector import LabelInjectingCollector
from dynamo.common.utils.media_decoder import enable_frontend_video_decoding
from dynamo.common.utils.media_nixl import read_decoded_media_via_nixl
from dynamo.common.utils.nixl_telemetry import derive_nixl_prometheus_port, nixl_prometheus_base_port
from dynamo.common.utils.output_modalities import RequestType, parse_request_type
from dynamo.common.utils.prometheus import get_prometheus_expfmt, get_prometheus_typed
from dynamo.common.utils.runtime import parse_endpoint, run_async
from dynamo.common.utils.token_ids import normalize_request_token_ids, token_ids_len
from dynamo.common.utils.topology import read_topology_config
from dynamo.common.utils.video_utils import compute_num_frames, frames_to_numpy, parse_size
from dynamo.llm import HttpError, ModelType


def test_packed_token_ids_become_a_list() -> None:
    packed = b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert token_ids_len(packed) == 2
    assert normalize_request_token_ids({"token_ids": packed}) == {"token_ids": [1, 256]}
    with pytest.raises(ValueError, match="expected 4 bytes"):
        normalize_request_token_ids({"token_ids": b"123"})


def test_endpoint_types_are_parsed() -> None:
    assert parse_endpoint_types("chat, completions") == ModelType.Chat | ModelType.Completions
    for text in ("", "none,chat", "images"):
        with pytest.raises(ValueError):
            parse_endpoint_types(text)


def test_endpoint_names_are_parsed() -> None:
    assert parse_endpoint("dyn://a.b.c") == ("a", "b", "c")
    with pytest.raises(ValueError):
        parse_endpoint("a.b")


def test_stop_string_prefix_at_the_end_of_a_text_is_detected() -> None:
    assert trailing_stop_prefix_len("abc<|e", {"<|end|>", "xyz"}) == 3
    assert trailing_stop_prefix_len("abc", set()) == 0
    assert normalize_finish_reason("abort: timeout") == "cancelled"


async def test_coroutine_runs_inside_a_running_loop() -> None:
    async def three() -> int:
        return 3

    assert run_async(three) == 3


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
    ],
)
def test_reference_cycle_that_enters_no_part_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(HttpError):
        reject_nonprogressing_guided_json_ref_cycles(schema)


def test_recursive_schema_is_accepted() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    reject_nonprogressing_guided_json_ref_cycles(tree)


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, True), ({"maxProperties": 3}, True), ({"minProperties": 1}, False), ({"$ref": "#"}, False)],
)
def test_schema_of_the_empty_object(more: dict[str, object], expected: bool) -> None:
    assert admits_only_empty_object({"type": "object", "additionalProperties": False, **more}) is expected


def test_reasoning_is_moved_into_the_content_for_templates_without_reasoning() -> None:
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
            return messages[0]["content"]

    request = {"messages": [{"role": "assistant", "reasoning_content": "why", "content": "what"}]}
    assert InputParamManager(Tokenizer()).get_input_param(request, use_tokenizer=True) == "<think>why</think>what"


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        ({}, None),
        ({"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}, 9090),
        (
            {
                "NIXL_TELEMETRY_ENABLE": "1",
                "NIXL_TELEMETRY_EXPORTER": "prometheus",
                "NIXL_TELEMETRY_PROMETHEUS_PORT": "0x1F90",
            },
            8080,
        ),
    ],
)
def test_base_port_of_nixl_metrics(variables: dict[str, str], port: int | None) -> None:
    assert nixl_prometheus_base_port(variables) == port


@pytest.mark.parametrize(
    ("base", "rank", "variables"),
    [(9000, 8, {}), (65530, 0, {}), (9000, 0, {"DYN_SYSTEM_PORT": "9007"})],
)
def test_ports_of_ranks_that_do_not_fit_are_refused(base: int, rank: int, variables: dict[str, str]) -> None:
    assert derive_nixl_prometheus_port(9100, 3, env=variables) == 9103
    with pytest.raises(ValueError):
        derive_nixl_prometheus_port(base, rank, env=variables)


def test_request_for_media_has_the_type_of_the_workers_first_modality() -> None:
    chat = {"messages": []}
    assert parse_request_type(chat, ["image"]) == (chat, RequestType.CHAT_COMPLETION)
    parsed, kind = parse_request_type({"prompt": "a", "model": "m"}, ["video", "text"])
    assert (parsed.prompt, kind) == ("a", RequestType.VIDEO_GENERATION)
    with pytest.raises(ValueError, match="smell"):
        parse_request_type({}, ["smell"])


def test_timer_reports_intervals_and_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(time_section.time, "perf_counter", lambda: next(clock))
    reported: list[float] = []
    timer = time_section.Timer(reported.append, reported.append)
    assert (timer.stop_interval(), timer.stop_interval(), timer.stop()) == (1.0, 2.0, 7.0)
    assert reported == [1.0, 2.0, 7.0]


def test_topology_is_read_from_files_and_a_missing_domain_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        read_topology_config(poll_timeout=0)
    (tmp_path / "zone").write_text("west\n")
    assert read_topology_config(poll_timeout=0).topology_domains == {"zone": "west"}


def test_invalid_number_of_frames_is_replaced_by_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        options: dict[str, int] | None = None

        def enable_video(self, options: dict[str, int]) -> None:
            self.options = options

    for text, frames in (("8", 8), ("-1", 32)):
        monkeypatch.setenv("DYN_MM_VIDEO_NUM_FRAMES", text)
        decoder = Decoder()
        enable_frontend_video_decoding(decoder)
        assert decoder.options == {"max_frames": frames}


def test_metrics_of_an_engine_are_filtered_and_labelled() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:load", "Load", registry=registry).set(1)
    Gauge("other", "Other", registry=registry).set(2)
    text = get_prometheus_expfmt(registry, ["vllm:"], None, {"worker": "a"})
    assert 'vllm:load{worker="a"} 1.0' in text
    assert "other" not in text
    assert [family[0] for family in get_prometheus_typed(registry, None, ["vllm:"])] == ["other"]
    with pytest.raises(ValueError, match="le"):
        LabelInjectingCollector(registry, {"le": "1"})


async def test_shutdown_runs_its_steps_in_order_although_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_shutdown, "_shutdown_started", asyncio.Event())
    done: list[str] = []

    class Runtime:
        def shutdown(self) -> None:
            done.append("runtime")

    class Registered:
        async def unregister_endpoint_instance(self) -> None:
            done.append("endpoint")

    async def drain() -> None:
        raise RuntimeError("engine")

    async def clean_up() -> None:
        done.append("engine")

    endpoint, runtime = Registered(), cast(Any, Runtime())
    for _ in range(2):
        await graceful_shutdown.graceful_shutdown_with_discovery(
            runtime, [endpoint, endpoint], None, 0, drain_callback=drain, cleanup_callback=clean_up
        )
    assert done == ["endpoint", "engine", "runtime"]


def test_frames_of_a_video_become_one_array() -> None:
    assert frames_to_numpy([np.full((2, 2, 3), 0.5)]).tolist() == [[[[128] * 3] * 2] * 2]
    assert (parse_size("64x32"), parse_size("large", 1, 2)) == ((64, 32), (1, 2))
    assert (compute_num_frames(seconds=2, fps=10), compute_num_frames(3, 2)) == (20, 3)
    with pytest.raises(ValueError, match="different sizes"):
        frames_to_numpy([np.zeros((1, 1, 3)), np.zeros((2, 1, 3))])


async def test_media_decoded_by_a_frontend_is_read_into_an_array() -> None:
    class Reading:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        async def wait_for_completion(self) -> None: ...

    class Connector:
        remote: Any = None

        async def begin_read(self, remote: Any, local: Any) -> Reading:
            self.remote = remote
            return Reading()

    region = {"addr": 4096, "size": 12, "mem_type": "Dram", "device_id": 0}
    decoded = {"shape": [2, 2, 3], "dtype": "UINT8", "nixl_metadata": "b64:x", "nixl_descriptor": region}
    connector = Connector()
    array, metadata = await read_decoded_media_via_nixl(connector, decoded, return_metadata=True)
    assert (array.shape, metadata, connector.remote.descriptors[0].ptr) == ((2, 2, 3), None, 4096)
    with pytest.raises(ValueError, match="12 bytes"):
        await read_decoded_media_via_nixl(connector, {**decoded, "shape": [1]})
