import shlex
from collections.abc import Callable

import pytest

from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.recommend import output
from dynamo.profiler.recommend.command import spec_of
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

MakeCandidate = Callable[..., CandidateDeployment]
MakeResult = Callable[..., SimulatedResult]
CONFIG = RecommendConfig(model="Qwen/Qwen3-8B", gpu="h100_sxm", request_rate=5.0)


def test_table_marks_the_front_and_lists_fewest_gpus_first(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    small, large = result_of(candidate_of(2)), result_of(candidate_of(4))
    lines = output.table([large, small], [small], 0.95).splitlines()
    assert lines[1].startswith("*    2")
    assert lines[2].startswith("     4")


def test_every_worker_has_its_own_gpus_and_ports(candidate_of: MakeCandidate) -> None:
    found = output.workers(CONFIG, candidate_of(2, 1, tp=2))
    assert [one.gpus for one in found] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert len({one.variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in found}) == 3
    sglang = RecommendConfig(model="m", gpu="h100_sxm", request_rate=5.0, backend="sglang")
    ports = {
        one.command[one.command.index("--disaggregation-bootstrap-port") + 1]
        for one in output.workers(sglang, candidate_of(2, 2))
    }
    assert len(ports) == 4


def test_launch_script_starts_the_frontend_and_all_workers(candidate_of: MakeCandidate) -> None:
    text = output.launch_commands(CONFIG, candidate_of(2, router="kv_router"))
    assert text.count("dynamo.vllm") == 2
    assert "--router-mode kv" in text
    for line in text.splitlines():
        assert shlex.split(line, comments=True) is not None


def test_compose_file_reserves_the_gpus_of_each_worker(candidate_of: MakeCandidate) -> None:
    services = output.compose(CONFIG, candidate_of(2, router="round_robin"))["services"]
    assert set(services) == {"etcd", "frontend", "worker-0", "worker-1"}
    device = services["worker-1"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["device_ids"] == ["1"]
    assert services["frontend"]["command"][-2:] == ["--router-mode", "round-robin"]


@pytest.mark.parametrize("prefill", [0, 2])
def test_graph_is_a_valid_resource(candidate_of: MakeCandidate, prefill: int) -> None:
    value = output.graph(spec_of(CONFIG), candidate_of(3, prefill))
    graph = decode(DynamoGraphDeployment, value)
    assert len(graph.spec.components or ()) == (3 if prefill else 2)
    assert value["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]["env"]


def test_assumptions_state_the_load_and_the_error_of_the_estimate() -> None:
    load, engine, *_ = output.assumptions(CONFIG, EFFICIENCIES["vllm"], is_corrected=True)
    assert "5 per second" in load
    assert "corrected by the given points" in engine
    assert "median error" in engine
