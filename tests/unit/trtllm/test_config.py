"""TrtllmConfig: flags, files and patches become the arguments of LLM, later ones over earlier ones."""

from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.trtllm.config import engine_args, read_command_line


def args_of(*words: str) -> dict[str, Any]:
    config, patches = read_command_line(["--model", "m", *words])
    return engine_args(config, "/m", patches)


def test_flags_are_converted_to_engine_arguments() -> None:
    args = args_of(
        "--tensor-parallel-size", "2", "--max-seq-len", "64", "--kv-block-size", "16", "--load-format", "dummy"
    )
    assert (args["model"], args["backend"], args["tensor_parallel_size"], args["max_seq_len"]) == (
        "/m",
        "pytorch",
        2,
        64,
    )
    assert args["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "tokens_per_block": 16}
    assert args["load_format"] == "dummy"
    assert "max_batch_size" not in args
    assert "cache_transceiver_config" not in args


def test_engine_args_precedence_is_file_then_override_then_patch(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("kv_cache_config:\n  free_gpu_memory_fraction: 0.5\n  host_cache_size: 7\nmax_batch_size: 3\n")
    args = args_of(
        "--extra-engine-args", str(file),
        "--override-engine-args", '{"kv_cache_config": {"host_cache_size": 8}, "max_batch_size": 4}',
        "--trtllm.max-batch-size", "5", "--trtllm.kv_cache_config.enable_block_reuse=false",
    )  # fmt: skip
    assert args["max_batch_size"] == 5
    assert args["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.5,
        "tokens_per_block": 32,
        "host_cache_size": 8,
        "enable_block_reuse": False,
    }


def test_disaggregated_roles_have_a_cache_transceiver() -> None:
    assert args_of("--disaggregation-mode", "decode")["cache_transceiver_config"] == {"backend": "DEFAULT"}
    args = args_of("--disaggregation-mode", "prefill", "--trtllm.cache_transceiver_config.backend", "NIXL")
    assert args["cache_transceiver_config"] == {"backend": "NIXL"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--kv-block-size", "0"], "--kv-block-size"),
        (["--free-gpu-memory-fraction", "2"], "--free-gpu-memory-fraction"),
        (["--modality", "video"], "--modality"),
        (["--revision", "x"], "--revision"),
        (["--enable-multimodal"], "--enable-multimodal"),
        (["--disaggregation-mode", "encode"], "--disaggregation-mode"),
        (["--trtllm.x"], "--trtllm.x"),
        (["--trtllm.a b", "1"], "--trtllm"),
        (["--override-engine-args", "["], "--override-engine-args"),
        (["--override-engine-args", "[]"], "--override-engine-args"),
        (["--extra-engine-args", "/nowhere.yaml"], "--extra-engine-args"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_invalid_option_is_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        args_of(*words)


def test_model_flag_is_required() -> None:
    with pytest.raises(ConfigError, match="--model"):
        read_command_line([])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (False, False)),
        (("--publish-kv-events",), (True, False)),
        (("--publish-events-and-metrics",), (True, True)),
        (("--no-publish-events-and-metrics", "--publish-metrics"), (False, True)),
    ],
)
def test_deprecated_flag_publishes_events_and_metrics(words: tuple[str, ...], expected: tuple[bool, bool]) -> None:
    config, _ = read_command_line(["--model", "m", *words])
    assert (config.publish_kv_events, config.publish_metrics) == expected
