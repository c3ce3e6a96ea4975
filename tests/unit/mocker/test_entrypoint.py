"""The mocker's settings are read from upstream's names, and one without effect is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.llm.entrypoint import EngineType, EntrypointArgs
from dynamo.mocker.entrypoint import config_of

CANONICAL = {
    "engine": {
        "backend": "vllm",
        "worker_type": "aggregated",
        "block_size": 32,
        "num_gpu_blocks": 100,
        "speedup_ratio": 4.0,
        "max_model_len": None,
    },
    "dp_size": 2,
    "dynamo": {"enable_local_indexer": True, "reasoning": None},
}


def args(**more: Any) -> EntrypointArgs:
    return EntrypointArgs(EngineType.Mocker, "dir", "name", **more)


def test_canonical_engine_args_are_accepted() -> None:
    config = config_of(args(mocker_engine_args=CANONICAL), "dyn://a.b.c")
    assert (config.model_path, config.model_name, config.endpoint) == ("dir", "name", "dyn://a.b.c")
    assert (config.block_size, config.num_gpu_blocks, config.speedup_ratio) == (32, 100, 4.0)
    assert config.data_parallel_size == 2


def test_engine_args_file_overrides_arguments_and_arguments_override_the_block_size(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"num_gpu_blocks": 7}))
    config = config_of(
        args(mocker_engine_args=CANONICAL, extra_engine_args=str(file), kv_cache_block_size=8), "dyn://a.b.c"
    )
    assert (config.num_gpu_blocks, config.block_size) == (7, 32)
    assert config_of(args(kv_cache_block_size=8), "dyn://a.b.c").block_size == 8


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": {"sglang": {"radix": True}}}, "sglang.radix"),
        ({"engine": {"worker_type": "encode"}}, "worker_type"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
    ],
)
def test_unsupported_engine_arg_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        config_of(args(mocker_engine_args=settings), "dyn://a.b.c")


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_engine_args_file_without_an_object_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"engine\.json"):
        config_of(args(extra_engine_args=str(file)), "dyn://a.b.c")
