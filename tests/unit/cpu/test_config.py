import os
from typing import Any

import pytest

from dynamo.core.config import as_flags, load
from dynamo.core.errors import ConfigError
from dynamo.cpu.config import DEMO_MODEL, CpuConfig


def read(*argv: str) -> CpuConfig:
    return load(CpuConfig, argv, {})


def test_cpu_config_serves_the_bundled_model_by_default() -> None:
    assert (read().directory, read().name) == (DEMO_MODEL, "dynamo-demo")


def test_cpu_config_names_a_model_after_its_directory() -> None:
    assert read("--model-path", "some/where/Qwen3-0.6B/").name == "Qwen3-0.6B"
    assert read("--model-path", "x", "--served-model-name", "mine").name == "mine"
    assert os.path.isabs(read("--model-path", "x").directory)


def test_cpu_config_flags_equal_those_of_other_engines() -> None:
    config = read(
        "--num-gpu-blocks-override", "64", "--no-enable-prefix-caching", "--max-num-seqs", "4", "--block-size", "8"
    )
    assert (config.kv_cache_blocks, config.enable_prefix_caching) == (64, False)
    assert (config.max_num_seqs, config.block_size) == (4, 8)
    assert load(CpuConfig, as_flags(config), {}) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-size", "0"], "--block-size 0: expected 1 or more"),
        (["--max-num-seqs", "-1"], "--max-num-seqs -1"),
        (["--threads", "0"], "--threads 0"),
        (["--max-waiting-requests", "-1"], "--max-waiting-requests -1: expected 0 or more"),
        (["--max-num-batched-tokens", "8"], r"at least --max-num-seqs \(32\)"),
        (["--max-model-length", "8"], "did you mean --max-model-len"),
    ],
)
def test_cpu_config_refuses_invalid_settings(argv: list[str], message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv)


def test_cpu_config_uses_the_call_format_of_the_bundled_model_by_default() -> None:
    assert CpuConfig().tool_call_parser == "hermes"
    assert CpuConfig(tool_call_parser="mistral").tool_call_parser == "mistral"
    assert CpuConfig(model_path="somewhere").tool_call_parser is None
