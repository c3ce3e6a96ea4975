"""Commands of TensorRT-LLM over several nodes."""

import subprocess
from itertools import pairwise

from tests.kubelet import programs

from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import grove_nodes, leader_worker_set_nodes
from dynamo.operator.reconcile.multinode.trtllm import CLIENT, SERVER, add_keys, leader_command, worker_command

LINE = CommandLine.of(
    {
        "command": ["python3", "-m", "dynamo.trtllm"],
        "args": ["--override-engine-args", '{"a": "it\'s"}', "$(MODEL)"],
        "env": [{"name": "MODEL", "value": "x y"}],
    }
)
POD = {
    "GROVE_PCSG_NAME": "g-0-d",
    "GROVE_PCSG_INDEX": "0",
    "GROVE_HEADLESS_SERVICE": "s",
    "MODEL": "x y",
    "HOME": "/home/user",
}


def test_leader_starts_a_process_for_each_gpu_of_all_nodes(tmp_path) -> None:
    script = leader_command(LINE, grove_nodes("d", 2), 8).words[-1]
    assert script.startswith(CLIENT)
    run = script.removeprefix(CLIENT)
    [words] = programs({"command": ["sh", "-c", run]}, tmp_path, variables=POD, names=("mpirun",))
    assert words[words.index("-n") + 1] == "16"
    assert words[words.index("-H") + 1] == "g-0-d-0-d-ldr-0.s,g-0-d-0-d-wkr-0.s"
    assert words[words.index("plm_rsh_args") + 1] == "-p 2222 -o StrictHostKeyChecking=no -i /home/user/.ssh/id_rsa"
    exported = {name for flag, name in pairwise(words) if flag == "-x"}
    assert {"MODEL", "HF_TOKEN", "LD_LIBRARY_PATH"} <= exported
    inner = {"command": words[words.index("bash") :]}
    assert programs(inner, tmp_path, variables=POD, names=("trtllm-llmapi-launch",)) == [
        ["trtllm-llmapi-launch", "python3", "-m", "dynamo.trtllm", "--override-engine-args", '{"a": "it\'s"}', "x y"]
    ]


def test_leader_waits_for_the_names_of_a_leader_worker_set(tmp_path) -> None:
    script = leader_command(LINE, leader_worker_set_nodes(3), 1).words[-1].removeprefix(CLIENT)
    pod = {"LWS_LEADER_ADDRESS": "g-0.s.n", "MODEL": "m"}
    found = programs({"command": ["sh", "-c", script]}, tmp_path, variables=pod, names=("getent", "mpirun"))
    assert found[:2] == [["getent", "hosts", "g-0-1.s.n"], ["getent", "hosts", "g-0-2.s.n"]]
    assert found[-1][found[-1].index("-H") + 1] == "g-0.s.n,g-0-1.s.n,g-0-2.s.n"


def test_worker_runs_an_ssh_server() -> None:
    assert worker_command(LINE).words == ("/bin/sh", "-c", CLIENT + SERVER)


def test_scripts_are_valid_for_a_shell() -> None:
    for command in (worker_command(LINE), leader_command(LINE, leader_worker_set_nodes(2), 8)):
        subprocess.run(["/bin/sh", "-n", "-c", command.words[-1]], check=True, timeout=20)


def test_keys_are_mounted_from_the_secret() -> None:
    main: dict = {"name": "main"}
    spec: dict = {"containers": [main]}
    add_keys(spec, main, "keys")
    assert main["volumeMounts"] == [{"name": "keys", "mountPath": "/ssh-pk", "readOnly": True}]
    assert spec["volumes"] == [{"name": "keys", "secret": {"secretName": "keys", "defaultMode": 420}}]
