"""Settings of the global router."""

from pathlib import Path

import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.global_router.main import GlobalRouterOptions, open_handler


def test_a_configuration_file_is_required() -> None:
    with pytest.raises(ConfigError, match="--config is missing"):
        GlobalRouterOptions(model_name="m")
    with pytest.raises(ConfigError, match="--model-name is missing"):
        GlobalRouterOptions(config="pools.json")


async def test_missing_configuration_file_is_named(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    with pytest.raises(ConfigError, match=r"--config .*missing\.json: No such file"):
        open_handler(cluster.runtime(), GlobalRouterOptions(config=str(tmp_path / "missing.json"), model_name="m"))
    await cluster.shutdown()


def test_former_variables_of_the_targets_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET", "7.5")
    words = ["--config", "pools.json", "--model-name", "m"]
    options = load(GlobalRouterOptions, words, {"DYN_GLOBAL_ROUTER_DEFAULT_ITL_TARGET_MS": "3"})
    assert (options.default_ttft_target_ms, options.default_itl_target_ms) == (7.5, 3.0)
