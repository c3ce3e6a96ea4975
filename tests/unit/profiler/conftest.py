from collections.abc import Callable
from typing import Any

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.recommend.exploration import configuration
from dynamo.profiler.recommend.routers import RouterChoice
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import ProfileSpec, profile_spec

MakeCandidate = Callable[..., CandidateDeployment]
MakeResult = Callable[..., SimulatedResult]


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


@pytest.fixture
def candidate_of() -> MakeCandidate:
    """Return a maker of candidates: numbers of decode and prefill engines, and GPUs per engine."""

    def make(
        decode: int,
        prefill: int = 0,
        *,
        tp: int = 1,
        batch: int = 64,
        router: str = "kv_router",
        preset: str | None = None,
        kv_dtype: str = "auto",
    ) -> CandidateDeployment:
        parallel = PickedParallelConfig(tp=tp)
        other = EngineChoice(parallel=parallel, replicas=prefill, batch=8, kv_dtype=kv_dtype) if prefill else None
        one = EngineChoice(parallel=parallel, replicas=decode, batch=batch, kv_dtype=kv_dtype)
        return CandidateDeployment(configuration(one, other), RouterChoice(mode=router), preset)

    return make


@pytest.fixture
def result_of() -> MakeResult:
    """Return a maker of results."""

    def make(
        candidate: CandidateDeployment, met_share: float = 1.0, goodput: float = 1000.0, mean_gpus: float | None = None
    ) -> SimulatedResult:
        return SimulatedResult(
            candidate=candidate,
            requests=100,
            met_share=met_share,
            goodput=goodput * met_share,
            output_tok_s=goodput,
            ttft_ms=100.0,
            p95_ttft_ms=200.0,
            itl_ms=10.0,
            e2e_ms=5000.0 / candidate.gpus,
            reused_share=0.0,
            mean_gpus=mean_gpus or candidate.gpus,
        )

    return make
