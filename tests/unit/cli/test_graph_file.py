"""Graph file: components of a DynamoGraphDeployment as processes of one machine."""

from typing import Any

import pytest

from dynamo.cli.graph import FRONTEND, GraphLocation
from dynamo.cli.graph_file import FileGraph, expanded, frontend_arguments, interpreted, translate, with_flags
from dynamo.core.errors import ConfigError
from dynamo.operator.validation.views import components_of


def component(
    name: str, kind: str, *command: str, replicas: int = 1, gpus: int = 0, **container: Any
) -> dict[str, Any]:
    main: dict[str, Any] = {"name": "main", "image": "x", **container}
    if command:
        main["command"] = list(command)
    if gpus:
        main["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": {"spec": {"containers": [main]}}}


FRONT = component("Frontend", "frontend")
WORKER = ("python3", "-m", "dynamo.cpu")


def graph(*components: dict[str, Any], env: Any = (), **variables: str) -> FileGraph:
    place = GraphLocation(discovery="/kv", variables=variables, python="/env/python")
    return translate("g", components_of({"components": list(components)}, is_alpha=False), env, place)


def test_each_replica_is_a_process_of_the_current_interpreter() -> None:
    made = graph(FRONT, component("Worker", "worker", *WORKER, replicas=2, args=["--model-path", "/m"]))
    assert [one.name for one in made.processes] == ["worker-1", "worker-2", FRONTEND]
    assert made.workers[0].command == ("/env/python", "-P", "-m", "dynamo.cpu", "--model-path", "/m")
    assert made.frontend.command == ("/env/python", "-P", "-m", "dynamo.frontend")


def test_shell_command_of_the_file_is_kept() -> None:
    made = graph(FRONT, component("Worker", "worker", "/bin/sh", "-c", args=["exec python3 -m dynamo.cpu"]))
    assert made.workers[0].command == ("/bin/sh", "-c", "exec python3 -m dynamo.cpu")
    assert frontend_arguments(made.workers[0].command) is None


def test_component_variables_override_graph_variables_and_are_expanded() -> None:
    env = [{"name": "MODEL", "value": "/a"}, {"name": "LEVEL", "value": "1"}]
    own = [{"name": "MODEL", "value": "/b"}, {"name": "FILE", "value": "$(MODEL)/x"}]
    made = graph(FRONT, component("W", "worker", *WORKER, "$(FILE)", "$(UNKNOWN)", env=own), env=env)
    (worker,) = made.workers
    assert worker.command[-2:] == ("/b/x", "$(UNKNOWN)")
    assert (worker.variables["MODEL"], worker.variables["LEVEL"]) == ("/b", "1")


def test_cluster_services_are_replaced_by_local_ones() -> None:
    env = [{"name": "ETCD_ENDPOINTS", "value": "http://etcd:2379"}, {"name": "DYN_DISCOVERY_BACKEND", "value": "etcd"}]
    made = graph(FRONT, component("W", "worker", *WORKER), env=env)
    assert made.workers[0].variables["DYN_DISCOVERY_BACKEND"] == "file"
    assert made.workers[0].variables["DYN_FILE_KV"] == "/kv"
    assert "ETCD_ENDPOINTS" not in made.workers[0].variables
    assert any("ETCD_ENDPOINTS is left out" in note for note in made.notes)


def test_variable_from_a_cluster_reference_is_read_from_the_environment_or_noted() -> None:
    secret = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    worker = component("W", "worker", *WORKER, env=secret)
    assert any("HF_TOKEN is not set" in note for note in graph(FRONT, worker).notes)
    assert graph(FRONT, worker, HF_TOKEN="x").notes == ()


def test_gpus_are_assigned_in_order_and_too_few_are_refused() -> None:
    made = graph(FRONT, component("W", "worker", *WORKER, replicas=2, gpus=2))
    placed = made.with_devices(["0", "1", "2", "3"])
    assert [one.variables["CUDA_VISIBLE_DEVICES"] for one in placed.workers] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="g: its workers need 4 GPUs, this machine has 3; --share-gpus"):
        made.with_devices(["0", "1", "2"])


def test_unsupported_cluster_features_are_noted() -> None:
    worker = component("W", "worker", *WORKER, volumeMounts=[{"name": "m", "mountPath": "/models"}])
    worker["podTemplate"]["spec"]["initContainers"] = [{"name": "i"}]
    worker["podTemplate"]["spec"]["containers"].append({"name": "side"})
    notes = "\n".join(graph(FRONT, worker, component("P", "planner")).notes)
    for part in ("not mounted: /models", "not started: side", "initContainers are not run", "type planner is not"):
        assert part in notes


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([FRONT], "no component of type worker"),
        ([component("W", "worker", *WORKER)], "no component of type frontend"),
        ([FRONT, component("W", "worker")], r"components\[1\].*: command or args are required"),
        (
            [FRONT, {**component("W", "worker", *WORKER), "multinode": {"nodeCount": 2}}],
            "multinode: a replica of several",
        ),
        ([FRONT, component("W", "worker", *WORKER, replicas=65)], "65 workers: must be at most 64"),
    ],
)
def test_graph_that_one_machine_cannot_run_is_refused(components: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graph(*components)


def test_system_ports_and_side_channels_of_workers_differ() -> None:
    made = graph(FRONT, component("W", "worker", *WORKER, replicas=2), DYN_SYSTEM_PORT="9090")
    assert [one.variables["DYN_SYSTEM_PORT"] for one in made.processes] == ["9090", "9091", "-1"]
    assert len({one.variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in made.workers}) == 2


def test_frontend_receives_flags_and_keys_in_its_environment() -> None:
    made = graph(
        component("F", "frontend", "python3", "-m", "dynamo.frontend", "--http-port", "1"),
        component("W", "worker", *WORKER),
    )
    changed = with_flags(made.frontend, ["--http-port=2"], {"DYN_API_KEYS": "k"})
    assert changed.command[-2:] == ("dynamo.frontend", "--http-port=2")
    assert changed.variables["DYN_API_KEYS"] == "k"
    assert frontend_arguments(made.frontend.command) == ["--http-port", "1"]


def test_references_are_expanded_as_in_kubernetes() -> None:
    assert expanded("$(A)-$$(A)-$(B)", {"A": "1"}) == "1-$(A)-$(B)"
    assert interpreted(["/usr/bin/python3.12", "x.py"], "py") == ("py", "-P", "x.py")
    assert interpreted(["vllm"], "py") == ("vllm",)
