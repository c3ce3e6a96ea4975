"""Commands of vLLM over several nodes."""

import pytest
from tests.kubelet import programs

from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import grove_nodes, leader_worker_set_nodes
from dynamo.operator.reconcile.multinode.vllm import (
    LaunchMode,
    add_single_node_head,
    launch_mode,
    leader_command,
    uses_processes,
    worker_command,
)

LWS = leader_worker_set_nodes(2)
GROVE = grove_nodes("decode", 4)
ORIGIN = "nvidia.com/dynamo-operator-origin-version"
EXECUTOR = "nvidia.com/vllm-distributed-executor-backend"
POD = {"LWS_LEADER_ADDRESS": "l.s.n", "LWS_WORKER_INDEX": "1"}
GROVE_POD = {
    "GROVE_PCSG_NAME": "g-0-decode",
    "GROVE_PCSG_INDEX": "0",
    "GROVE_HEADLESS_SERVICE": "s",
    "GROVE_PCLQ_POD_INDEX": "2",
}


def line(*args: str) -> CommandLine:
    return CommandLine.of({"command": ["python3", "-m", "dynamo.vllm"], "args": ["--model", "m", *args]})


def started(command: CommandLine, folder, variables=POD) -> list[list[str]]:
    container: dict[str, list[str]] = {}
    command.write_to(container)
    return programs(container, folder, variables=variables, names=("python3", "ray"))


@pytest.mark.parametrize(
    ("args", "gpus", "annotations", "mode"),
    [
        (["-tp", "16"], 8, {ORIGIN: "1.6.1"}, LaunchMode.PROCESSES),
        (["-tp", "8", "-pp", "2"], 8, {ORIGIN: "1.0.0-rc1"}, LaunchMode.PROCESSES),
        (["-tp", "16"], 8, {ORIGIN: "0.9.1"}, LaunchMode.RAY),
        (["-tp", "16"], 8, {}, LaunchMode.RAY),
        (["-tp", "16"], 8, {ORIGIN: "1.6.1", EXECUTOR: "ray"}, LaunchMode.RAY),
        (["-tp", "16"], 8, {EXECUTOR: "MP"}, LaunchMode.PROCESSES),
        (["-tp", "16", "--distributed-executor-backend", "mp"], 8, {}, LaunchMode.PROCESSES),
        (["-tp", "16"], 0, {ORIGIN: "1.6.1"}, LaunchMode.INDEPENDENT),
        (["-tp", "8"], 8, {}, LaunchMode.INDEPENDENT),
        (["-dp", "16"], 8, {}, LaunchMode.DATA_PARALLEL),
        (["-tp", "4", "-dp", "4"], 8, {}, LaunchMode.DATA_PARALLEL),
        (["-dp", "16", "--enable-elastic-ep"], 8, {}, LaunchMode.ELASTIC),
        (["-tp", "16", "--enable-elastic-ep"], 8, {}, LaunchMode.RAY),
    ],
)
def test_vllm_launch_mode_is_selected_by_options_and_version(
    args: list[str], gpus: int, annotations: dict[str, str], mode: LaunchMode
) -> None:
    assert launch_mode(line(*args), gpus, annotations) is mode


def test_annotation_precedes_option_and_version() -> None:
    command = line("--distributed-executor-backend", "mp")
    assert not uses_processes(command, {EXECUTOR: "ray", ORIGIN: "1.6.1"})
    assert uses_processes(line(), {EXECUTOR: "other", ORIGIN: "1.6.1"})
    assert not uses_processes(line(), {ORIGIN: "unknown"})


def test_vllm_process_mode_starts_one_process_per_node(tmp_path) -> None:
    common = ["--distributed-executor-backend", "mp", "--nnodes", "4", "--master-port", "29500"]
    command = line("-tp", "32")
    [leader] = started(leader_command(command, LaunchMode.PROCESSES, GROVE, 8), tmp_path, GROVE_POD)
    [worker] = started(worker_command(command, LaunchMode.PROCESSES, GROVE, 8), tmp_path, GROVE_POD)
    address = "g-0-decode-0-decode-ldr-0.s"
    for words, rank in ((leader, "0"), (worker, "3")):
        assert words[:7] == ["python3", "-m", "dynamo.vllm", "--model", "m", "-tp", "32"]
        assert words[words.index("--node-rank") + 1] == rank
        assert words[words.index("--master-addr") + 1] == address
        assert set(common) < set(words)
    assert "--headless" in worker
    assert "--headless" not in leader


def test_process_mode_requires_no_shell_in_a_leader_worker_set() -> None:
    worker = worker_command(line("-tp", "16"), LaunchMode.PROCESSES, LWS, 8)
    assert worker.words[:2] == ("python3", "-m")
    assert worker.words[-3:] == ("--node-rank", "$(LWS_WORKER_INDEX)", "--headless")


def test_vllm_ray_mode_starts_a_head_and_workers(tmp_path) -> None:
    command = line("-tp", "16")
    assert started(leader_command(command, LaunchMode.RAY, LWS, 8), tmp_path) == [
        ["ray", "start", "--head", "--port=6379"],
        ["python3", *command.words[1:], "--distributed-executor-backend", "ray"],
    ]
    assert started(worker_command(command, LaunchMode.RAY, LWS, 8), tmp_path) == [
        ["ray", "start", "--address=l.s.n:6379", "--block"]
    ]


@pytest.mark.parametrize(("group", "variables", "start"), [(LWS, POD, "8"), (GROVE, GROVE_POD, "24")])
def test_data_parallel_ranks_start_after_those_of_previous_nodes(group, variables, start, tmp_path) -> None:
    command = line("-tp", "1", "-dp", "32")
    [leader] = started(leader_command(command, LaunchMode.DATA_PARALLEL, group, 8), tmp_path, variables)
    [worker] = started(worker_command(command, LaunchMode.DATA_PARALLEL, group, 8), tmp_path, variables)
    for words, first in ((leader, "0"), (worker, start)):
        assert "--data-parallel-hybrid-lb" in words
        assert words[words.index("--data-parallel-size-local") + 1] == "8"
        assert words[words.index("--data-parallel-start-rank") + 1] == first
        assert words[words.index("--data-parallel-rpc-port") + 1] == "13445"
        assert words.count("-dp") == 1


def test_data_parallel_options_of_the_command_remain(tmp_path) -> None:
    own = ["-dp", "32", "-dpl", "4", "--data-parallel-hybrid-lb", "--data-parallel-rpc-port", "29500"]
    command = line(*own)
    [words] = started(worker_command(command, LaunchMode.DATA_PARALLEL, LWS, 8), tmp_path)
    assert words[1:] == [
        *command.words[1:],
        *("--data-parallel-start-rank", "4"),
        *("--data-parallel-address", "l.s.n"),
    ]


def test_elastic_leader_starts_a_ray_head_first(tmp_path) -> None:
    command = line("--enable-elastic-ep", "-dpb", "ray")
    found = started(leader_command(command, LaunchMode.ELASTIC, LWS, 8), tmp_path)
    assert ["python3", *command.words[1:]] in found
    script = leader_command(command, LaunchMode.ELASTIC, LWS, 8).words[-1]
    assert script.startswith("ray start --head --port=6379 --block & ")  # In the background: recorded at any time.


def test_elastic_worker_joins_when_the_leader_is_healthy(tmp_path) -> None:
    found = started(worker_command(line(), LaunchMode.ELASTIC, LWS, 8), tmp_path)
    assert [words[0] for words in found] == ["python3", "ray"]
    assert "'http://l.s.n:9090/live'" in found[0][2]
    assert found[1] == ["ray", "start", "--address=l.s.n:6379", "--block"]


def test_single_node_with_elastic_parallelism_starts_a_ray_head(tmp_path) -> None:
    args = ["--enable-elastic-ep", "--data-parallel-backend=ray", "x y"]
    main = {"command": ["python3", "-m", "dynamo.vllm"], "args": list(args), "env": [{"name": "A", "value": "1"}]}
    add_single_node_head(main)
    assert [one["name"] for one in main["env"]] == ["A", "POD_IP", "VLLM_DP_MASTER_IP"]
    found = programs(main, tmp_path, variables={"POD_IP": "10.0.0.1"}, names=("python3", "ray"))
    assert main["args"][0].startswith('ray start --head --port=6379 --node-ip-address="$POD_IP" --block & ')
    assert ["python3", "-m", "dynamo.vllm", *args] in found


@pytest.mark.parametrize("args", [[], ["--enable-elastic-ep"], ["-dpb", "ray"]])
def test_single_node_without_elastic_ray_is_unchanged(args: list[str]) -> None:
    main = {"command": ["python3", "-m", "dynamo.vllm"], "args": list(args)}
    add_single_node_head(main)
    assert main == {"command": ["python3", "-m", "dynamo.vllm"], "args": args}
