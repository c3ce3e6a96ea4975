import json
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from dynamo.profiler.recommend import output
from dynamo.profiler.recommend.command import spec_of
from dynamo.profiler.recommend.config import RecommendConfig
from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

MakeCandidate = Callable[..., CandidateDeployment]
MakeResult = Callable[..., SimulatedResult]
ESTIMATE = EstimateError(itl=0.1, ttft=0.5, source="12 points")
CONFIG = RecommendConfig(model="Qwen/Qwen3-8B", gpu="h100_sxm", request_rate=5.0)


def test_table_marks_the_front_and_lists_fewest_gpus_first(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    small, large = result_of(candidate_of(2)), result_of(candidate_of(4))
    lines = output.table([large, small], [small], 0.95, ESTIMATE).splitlines()
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
    (value,) = output.graph(spec_of(CONFIG), candidate_of(3, prefill))
    graph = decode(DynamoGraphDeployment, value)
    assert len(graph.spec.components or ()) == (3 if prefill else 2)
    assert value["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]["env"]


def test_graph_of_a_scaled_deployment_has_the_planner_and_its_configuration(candidate_of: MakeCandidate) -> None:
    settings, value = output.graph(spec_of(CONFIG), candidate_of(3, preset="load_180_10"))
    graph = decode(DynamoGraphDeployment, value)
    kinds = {one["type"]: one for one in value["spec"]["components"]}
    assert set(kinds) == {"frontend", "decode", "planner"}
    assert kinds["decode"]["scalingAdapter"] == {"enabled": True}
    config = json.loads(settings["data"]["planner_config.json"])
    assert (config["load_adjustment_interval_seconds"], config["enable_throughput_scaling"]) == (10, False)
    assert (config["ttft_ms"], config["itl_ms"], config["mode"]) == (2000.0, 30.0, "agg")
    volumes = kinds["planner"]["podTemplate"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == settings["metadata"]["name"]
    assert graph.spec.components


def test_assumptions_state_the_load_and_the_error_of_the_estimate() -> None:
    load, engine, _, planner, _ = output.assumptions(CONFIG, ESTIMATE, uses_presets=False)
    assert "5 per second" in load
    assert "12 points" in engine
    assert "TTFT ±50 %, ITL ±10 %" in engine
    assert "not simulated, the load lasts less than 600 s" in planner
    assert "starts in 120 s" in output.assumptions(CONFIG, ESTIMATE, uses_presets=True)[3]


def test_latencies_have_error_bars_and_a_source(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    one = result_of(candidate_of(2))
    assert "100 ±50" in output.table([one], [one], 0.95, ESTIMATE)
    assert "10.0 ±1.0" in output.table([one], [one], 0.95, ESTIMATE)
    assert output.as_json(one, ESTIMATE)["error"] == {"ttft": 0.5, "itl": 0.1, "source": "12 points"}


def test_equal_outcomes_are_one_row(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    results = [result_of(candidate_of(2, batch=batch)) for batch in (32, 64, 128)]
    lines = output.table(results, results[:1], 0.95, ESTIMATE).splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("(and 2 alike)")


@pytest.mark.parametrize(("share", "remedy"), [(0.99, False), (0.5, True)])
def test_slower_steps_are_reported(
    candidate_of: MakeCandidate, result_of: MakeResult, share: float, remedy: bool
) -> None:
    text = output.sureness(result_of(candidate_of(2), share), ESTIMATE, 0.95)
    assert "10 % longer" in text
    assert f"{100 * share:.1f} %" in text
    assert ("use one more engine" in text) is remedy


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_type_of_cached_values_is_an_argument_of_the_engine(candidate_of: MakeCandidate, backend: str) -> None:
    config = replace(CONFIG, backend=backend)
    script = output.launch_commands(config, candidate_of(1, kv_dtype="fp8"))
    assert "fp8" in script
    assert "fp8" not in output.launch_commands(config, candidate_of(1))


@pytest.mark.parametrize(
    ("backend", "flag"),
    [("vllm", "--kv-events-config"), ("sglang", "--kv-events-config"), ("trtllm", "--publish-kv-events")],
)
@pytest.mark.parametrize("prefill", [0, 1])
def test_engines_publish_the_events_that_a_kv_router_follows(
    candidate_of: MakeCandidate, backend: str, flag: str, prefill: int
) -> None:
    config = replace(CONFIG, backend=backend)
    routed = [one for one in output.workers(config, candidate_of(2, prefill)) if not one.name.startswith("decode")]
    assert all(flag in one.command for one in routed)
    if flag == "--kv-events-config":
        ports = {json.loads(one.command[one.command.index(flag) + 1])["endpoint"] for one in routed}
        assert len(ports) == len(routed)
    *_, value = output.graph(spec_of(config), candidate_of(2, prefill))
    kind = "prefill" if prefill else "worker"
    args = [
        one["podTemplate"]["spec"]["containers"][0]["args"]
        for one in value["spec"]["components"]
        if one["type"] == kind
    ]
    assert all(flag in one for one in args)
    plain = output.launch_commands(config, candidate_of(2, router="round_robin"))
    assert flag not in plain
