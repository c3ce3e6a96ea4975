"""vLLM over several nodes: by processes, by Ray, with data parallelism, and with elastic expert parallelism.

Tensor and pipeline parallelism across nodes runs as processes (`mp`) or as Ray actors. Data parallelism runs a server on
each node. Elastic expert parallelism runs one Ray cluster whose workers join when the leader serves, so that the leader
places its first engines on its own GPUs.
"""

import re
from collections.abc import Mapping
from enum import Enum

from dynamo.operator.reconcile.multinode.commands import CommandLine, OptionWord, ShellExpression, shell_script
from dynamo.operator.reconcile.multinode.nodes import NodeGroup
from dynamo.operator.reconcile.names import PREFIX, SYSTEM_PORT
from dynamo.protocols.kubernetes.common import KubeObject

MODULE = "vllm"
MASTER_PORT, RAY_PORT, RPC_PORT = 29500, 6379, 13445
EXECUTOR_ANNOTATION = f"{PREFIX}vllm-distributed-executor-backend"
ORIGIN_ANNOTATION = f"{PREFIX}dynamo-operator-origin-version"
PROCESSES_SINCE = (1, 0, 0)
"""First operator version whose graphs run vLLM as processes; those of older ones continue with Ray."""
EXECUTOR = "--distributed-executor-backend"
TENSOR = ("--tensor-parallel-size", "-tp")
PIPELINE = ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
DATA_LOCAL = ("--data-parallel-size-local", "-dpl")
DATA_BACKEND = ("--data-parallel-backend", "-dpb")
ALIASES = {DATA_LOCAL[0]: DATA_LOCAL[1:], "--data-parallel-hybrid-lb": ("-dph",)}
ELASTIC = "--enable-elastic-ep"
RAY_ATTEMPTS, LIVE_ATTEMPTS = 150, 720
"""Polls of the Ray head every 2 s (5 minutes) and of the leader every 15 s (3 hours, for slow disks)."""


class LaunchMode(Enum):
    """How the nodes of one replica cooperate."""

    PROCESSES = "mp"
    RAY = "ray"
    DATA_PARALLEL = "data-parallel"
    ELASTIC = "elastic"
    INDEPENDENT = "independent"
    """The options fit into one node: the command remains as it is."""


def launch_mode(command: CommandLine, gpus: int, annotations: Mapping[str, str]) -> LaunchMode:
    """Return the mode that the options of a command require with the GPUs of one pod."""
    world = command.number(*TENSOR) * command.number(*PIPELINE)
    if gpus and world > gpus:
        return LaunchMode.PROCESSES if uses_processes(command, annotations) else LaunchMode.RAY
    if command.has(ELASTIC):
        return LaunchMode.ELASTIC
    if gpus and world * command.number(*DATA) > gpus:
        return LaunchMode.DATA_PARALLEL
    return LaunchMode.INDEPENDENT


def uses_processes(command: CommandLine, annotations: Mapping[str, str]) -> bool:
    """Return whether nodes cooperate as processes: by annotation, by option, or by the operator's version at creation."""
    for given in (annotations.get(EXECUTOR_ANNOTATION, "").lower(), command.value(EXECUTOR)):
        if given in {"mp", "ray"}:
            return given == "mp"
    version = re.match(r"v?(\d+)\.(\d+)\.(\d+)", annotations.get(ORIGIN_ANNOTATION, ""))
    return version is not None and tuple(map(int, version.groups())) >= PROCESSES_SINCE


def leader_command(command: CommandLine, mode: LaunchMode, group: NodeGroup, gpus: int) -> CommandLine:
    """Return the command of rank 0."""
    match mode:
        case LaunchMode.PROCESSES:
            return command.with_options([*_process_options(command, group), "0"], MODULE)
        case LaunchMode.RAY:
            options = () if command.value(EXECUTOR) == "ray" else (EXECUTOR, "ray")
            return command.with_options(options, MODULE).after(f"ray start --head --port={RAY_PORT}")
        case LaunchMode.DATA_PARALLEL:
            return command.with_options(_data_options(command, group, gpus, "0"), MODULE)
        case LaunchMode.ELASTIC:
            return command.after(_ray_head(""))
        case LaunchMode.INDEPENDENT:
            return command


def worker_command(command: CommandLine, mode: LaunchMode, group: NodeGroup, gpus: int) -> CommandLine:
    """Return the command of the other ranks."""
    join = f"ray start --address={group.leader}:{RAY_PORT} --block"
    match mode:
        case LaunchMode.PROCESSES:
            return command.with_options([*_process_options(command, group), group.rank, "--headless"], MODULE)
        case LaunchMode.RAY:
            return shell_script(join, command.variables)
        case LaunchMode.DATA_PARALLEL:
            start = ShellExpression(f"$(({_local_ranks(command, gpus)} * {group.rank_arithmetic}))")
            return command.with_options(_data_options(command, group, gpus, start), MODULE)
        case LaunchMode.ELASTIC:
            return shell_script(f"{_wait_until_live(group.leader)} && {join}", command.variables)
        case LaunchMode.INDEPENDENT:
            return command


def add_single_node_head(main: KubeObject) -> None:
    """Start a Ray head in a component of one node with elastic expert parallelism, so that pods can join later.

    vLLM looks for the Ray node of the data-parallel master by address: both are the pod's.
    """
    command = CommandLine.of(main)
    if main.get("command") and command.has(ELASTIC) and command.value(*DATA_BACKEND) == "ray":
        command.after(_ray_head(' --node-ip-address="$POD_IP"')).write_to(main)
        add_address(main, "POD_IP")
        add_address(main, "VLLM_DP_MASTER_IP")


def add_address(main: KubeObject, variable: str) -> None:
    """Set an environment variable to the pod's address, unless the container sets it."""
    env: list[KubeObject] = main.setdefault("env", [])
    if all(one["name"] != variable for one in env):
        env.append({"name": variable, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})


def _process_options(command: CommandLine, group: NodeGroup) -> list[OptionWord]:
    executor = [] if command.value(EXECUTOR) == "mp" else [EXECUTOR, "mp"]
    master = ["--master-addr", group.leader, "--master-port", str(MASTER_PORT)]
    return [*executor, "--nnodes", str(group.size), *master, "--node-rank"]


def _data_options(command: CommandLine, group: NodeGroup, gpus: int, start: OptionWord) -> list[OptionWord]:
    """Return the options by which the servers of all nodes form one data-parallel group, and each balances its own ranks.

    Sizes and ports that the command gives remain.
    """
    options: list[OptionWord] = []
    for name, value in {
        "--data-parallel-hybrid-lb": None,
        "--data-parallel-size-local": str(_local_ranks(command, gpus)),
        "--data-parallel-start-rank": start,
        "--data-parallel-address": group.leader,
        "--data-parallel-rpc-port": str(RPC_PORT),
    }.items():
        if name == "--data-parallel-start-rank" or not command.has(name, *ALIASES.get(name, ())):
            options += [name] if value is None else [name, value]
    return options


def _local_ranks(command: CommandLine, gpus: int) -> int:
    """Return the data-parallel ranks of one node."""
    given = command.number(*DATA_LOCAL) if command.has(*DATA_LOCAL) else 0
    return given or max(gpus // (command.number(*TENSOR) * command.number(*PIPELINE)), 1)


def _ray_head(options: str) -> str:
    probe = f"import socket; socket.create_connection(('127.0.0.1', {RAY_PORT}), timeout=1).close()"
    wait = _poll(probe, RAY_ATTEMPTS, 2, "the Ray head does not accept connections")
    return f"ray start --head --port={RAY_PORT}{options} --block & {wait}"


def _wait_until_live(leader: str) -> str:
    probe = f"import urllib.request as r; r.urlopen('http://{leader}:{SYSTEM_PORT}/live', timeout=5)"
    return _poll(probe, LIVE_ATTEMPTS, 15, "the leader is not live")


def _poll(probe: str, attempts: int, interval_s: int, failure: str) -> str:
    message = f"{failure} after {attempts * interval_s} s"
    return (
        f'i=0; until python3 -c "{probe}" 2>/dev/null; do i=$((i + 1)); '
        f'[ "$i" -ge {attempts} ] && {{ echo "{message}" >&2; exit 1; }}; sleep {interval_s}; done'
    )
