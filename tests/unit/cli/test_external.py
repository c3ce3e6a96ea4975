"""External engines: flags, GPUs and ports of the workers of vLLM, SGLang, TensorRT-LLM and the proxy."""

import json

import pytest

from dynamo.cli.external import ExternalEngine, WorkerPorts, value_of
from dynamo.cli.graph import PREFILL, WORKER
from dynamo.core.errors import ConfigError


def engine(kind: str, *arguments: str, directory: str | None = "/m", name: str | None = "m") -> ExternalEngine:
    return ExternalEngine(engine=kind, directory=directory, model_name=name, arguments=arguments)


def ports(kind: str, *arguments: str, has_events: bool = True, has_roles: bool = False) -> WorkerPorts:
    made = engine(kind, *arguments)
    return made.per_worker(
        has_events=has_events, has_roles=has_roles, has_gpus=True, has_planner=False, port_base=20080
    )


@pytest.mark.parametrize(
    ("kind", "flag"), [("vllm", "--model=/m"), ("sglang", "--model-path=/m"), ("trtllm", "--model=/m")]
)
def test_model_path_and_name_are_passed_under_the_flags_of_the_engine(kind: str, flag: str) -> None:
    assert engine(kind, "--x", "1").flags() == [flag, "--served-model-name=m", "--x", "1"]
    assert engine(kind, "--served-model-name", "n").flags() == [flag, "--served-model-name", "n"]


def test_model_is_required_once() -> None:
    with pytest.raises(ConfigError, match="MODEL is missing: --engine vllm has no bundled model"):
        engine("vllm", directory=None)
    with pytest.raises(ConfigError, match="MODEL '/m' and --model are mutually exclusive"):
        engine("vllm", "--model", "other")
    assert engine("vllm", "--model=x", directory=None).model_path == "x"
    with pytest.raises(ConfigError, match="expected the server's URL after the options: -- --url URL"):
        engine("openai_proxy")


@pytest.mark.parametrize(
    ("kind", "arguments", "gpus"),
    [
        ("vllm", (), 1),
        ("vllm", ("--tensor-parallel-size", "4", "-pp=2"), 8),
        ("vllm", ("-dp", "2", "-tp", "2"), 4),
        ("sglang", ("--tp", "4", "--dp", "2"), 8),
        ("sglang", ("--tp", "4", "--dp", "4", "--enable-dp-attention"), 4),
        ("trtllm", ("--tensor-parallel-size=2",), 2),
    ],
)
def test_gpus_of_a_worker_are_the_product_of_its_parallel_sizes(
    kind: str, arguments: tuple[str, ...], gpus: int
) -> None:
    assert engine(kind, *arguments).gpus == gpus


def test_proxy_requires_no_gpu_and_an_invalid_size_is_named() -> None:
    assert engine("openai_proxy", "--url", "http://x", name=None).gpus == 0
    with pytest.raises(ConfigError, match="--tensor-parallel-size two: must be a whole number of at least 1"):
        _ = engine("vllm", "-tp", "two").gpus


def test_kv_events_of_each_worker_have_distinct_ports() -> None:
    endpoints = [json.loads(ports("vllm").flags(WORKER, index)[0].partition("=")[2]) for index in range(3)]
    assert len({one[name] for one in endpoints for name in ("endpoint", "replay_endpoint")}) == 6
    assert all(one["enable_kv_cache_events"] for one in endpoints)


def test_kv_events_are_enabled_only_for_the_kv_router_unless_configured_by_the_user() -> None:
    assert ports("vllm", has_events=False).flags(WORKER, 0) == ()
    assert ports("vllm", "--kv-events-config", "{}").flags(WORKER, 0) == ()
    assert ports("trtllm").flags(WORKER, 0) == ("--publish-kv-events",)


def test_disaggregated_workers_can_transfer_blocks_and_only_prefill_workers_publish_events() -> None:
    made = ports("vllm", has_roles=True)
    transfer = '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    assert made.flags(WORKER, 0) == (transfer,)
    assert len(made.flags(PREFILL, 1)) == 2
    assert made.variables(0)["VLLM_NIXL_SIDE_CHANNEL_PORT"] != made.variables(1)["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    own = ports("vllm", "--kv-transfer-config", "{}", has_roles=True, has_events=False)
    assert own.flags(WORKER, 0) == ()


def test_blocks_of_an_engine_without_gpus_are_transferred_from_host_memory() -> None:
    made = engine("vllm").per_worker(
        has_events=False, has_roles=True, has_gpus=False, has_planner=False, port_base=20080
    )
    assert '"kv_buffer_device": "cpu"' in made.flags(WORKER, 0)[0]


def test_sglang_workers_have_distinct_bootstrap_ports() -> None:
    made = ports("sglang", has_roles=True, has_events=False)
    flags = [flag for index in range(2) for flag in made.flags(WORKER, index) if "bootstrap" in flag]
    assert len(set(flags)) == 2


def test_forward_passes_are_published_for_a_planner() -> None:
    made = engine("vllm").per_worker(
        has_events=False, has_roles=False, has_gpus=True, has_planner=True, port_base=20080
    )
    assert {made.variables(index)["DYN_FORWARDPASS_METRIC_PORT"] for index in range(2)} == {"24176", "24184"}
    assert "DYN_FORWARDPASS_METRIC_PORT" not in ports("vllm").variables(0)


def test_value_of_a_flag_is_the_last_one() -> None:
    assert value_of(["--a", "1", "--a=2"], ("--a",)) == "2"
    assert value_of(["--a"], ("--a",)) is None
