from collections.abc import Callable
from typing import Any

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import ProfileSpec, profile_spec


@pytest.fixture
def spec_of() -> Callable[..., ProfileSpec]:
    """Return a maker of specifications."""

    def make(**changes: Any) -> ProfileSpec:
        base = {
            "model": "Qwen/Qwen3-32B",
            "image": "registry/dynamo-planner:1.6.1",
            "hardware": {"gpuSku": "h200_sxm", "totalGpus": 16, "numGpusPerNode": 8},
        }
        return profile_spec({**base, **changes})

    return make


@pytest.fixture
def pair() -> Configuration:
    """Return a disaggregated configuration."""
    return Configuration(
        prefill=EngineChoice(parallel=PickedParallelConfig(tp=2), replicas=3, batch=8, max_tokens=32768),
        decode=EngineChoice(parallel=PickedParallelConfig(tp=4), batch=64),
        ttft_ms=500.0,
        itl_ms=15.0,
        request_rate=10.0,
        osl=1000,
    )


@pytest.fixture
def single() -> Configuration:
    """Return an aggregated configuration."""
    return Configuration(
        prefill=None,
        decode=EngineChoice(parallel=PickedParallelConfig(tp=2), replicas=4, batch=32),
        ttft_ms=500.0,
        itl_ms=15.0,
        request_rate=10.0,
        osl=1000,
    )
