from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo.mocker.profile import profiled
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.recommend.command import spec_of
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.output import roles
from dynamo.profiler.recommend.rehearsal import rehearsal_graph, write_curves
from dynamo.profiler.recommend.simulation import CandidateDeployment
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

MakeCandidate = Callable[..., CandidateDeployment]
SPEC = spec_of(RecommendConfig(model="Qwen/Qwen3-8B", gpu="h100_sxm", request_rate=5.0))
ENGINE = AnalyticEngine(
    shape=model_shape(known_config("Qwen/Qwen3-8B") or {}),
    gpu=gpu_spec("h100_sxm"),
    parallel=PickedParallelConfig(),
    efficiency=EFFICIENCIES["vllm"].efficiency,
)


@pytest.mark.parametrize("prefill", [0, 2])
def test_graph_has_simulated_engines_of_the_recommended_size(
    candidate_of: MakeCandidate, tmp_path: Path, prefill: int
) -> None:
    candidate = candidate_of(3, prefill)
    value = rehearsal_graph(SPEC, candidate, {role: ENGINE for role, _ in roles(candidate)}, tmp_path)
    assert decode(DynamoGraphDeployment, value).spec.components
    frontend, *workers = value["spec"]["components"]
    assert frontend["podTemplate"]["spec"]["containers"][0]["env"] == [{"name": "DYN_ROUTER_MODE", "value": "kv"}]
    assert [one["replicas"] for one in workers] == ([2, 3] if prefill else [3])
    for one in workers:
        args = one["podTemplate"]["spec"]["containers"][0]["args"]
        assert ("--disaggregation-mode" in args) is bool(prefill)
        assert int(args[args.index("--num-gpu-blocks-override") + 1]) == ENGINE.kv_tokens() // 64


def test_simulated_engines_have_the_estimated_step_times(tmp_path: Path) -> None:
    times = profiled(str(write_curves(tmp_path, ENGINE, ENGINE)), 1.0, 1.0)
    capacity = ENGINE.kv_tokens()
    assert times.prefill_ms(3000) == pytest.approx(ENGINE.prefill_ms(3000) + ENGINE.request_ms(), rel=0.1)
    assert times.decode_ms(32 * 3000, capacity, 32) == pytest.approx(ENGINE.decode_ms(32 * 3000, capacity, 32), rel=0.2)
