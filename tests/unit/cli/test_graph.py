"""Graph: the arguments and variables of each process of a `dynamo serve`."""

import pytest

from dynamo.cli.graph import FRONTEND, GRACE_VARIABLE, LOOPBACK, GraphLocation, plan


def place(**variables: str) -> GraphLocation:
    return GraphLocation(discovery="/kv", variables=variables, python="python3")


def test_process_commands_are_plain_module_invocations() -> None:
    graph = plan(place(), engine="cpu", workers=2, frontend_flags=["--http-port=1"], engine_flags=["--model-path=m"])
    assert graph.frontend.command == ("python3", "-P", "-m", "dynamo.frontend", "--http-port=1")
    assert {worker.command for worker in graph.workers} == {("python3", "-P", "-m", "dynamo.cpu", "--model-path=m")}


def test_processes_have_distinct_names_and_workers_start_first() -> None:
    graph = plan(place(), engine="mocker", workers=2)
    assert [process.name for process in graph.processes] == ["worker-1", "worker-2", FRONTEND]


def test_all_processes_use_the_same_discovery_directory_and_planes() -> None:
    for process in plan(place(), engine="cpu", workers=3).processes:
        assert process.variables["DYN_FILE_KV"] == "/kv"
        assert process.variables["DYN_DISCOVERY_BACKEND"] == "file"
        assert process.variables["DYN_REQUEST_PLANE"] == "tcp"
        assert process.variables["DYN_EVENT_PLANE"] == "zmq"


def test_workers_in_a_private_directory_listen_on_loopback() -> None:
    for process in plan(place(DYN_TCP_RPC_HOST="10.0.0.1"), engine="cpu", workers=1).processes:
        assert {name: process.variables[name] for name in LOOPBACK} == LOOPBACK | {"DYN_TCP_RPC_HOST": "10.0.0.1"}


def test_workers_in_a_shared_directory_do_not_listen_on_loopback() -> None:
    shared = GraphLocation(discovery="/kv", is_private=False, variables={}, python="python3")
    for process in plan(shared, engine="cpu", workers=1).processes:
        assert not LOOPBACK.keys() & process.variables.keys()


@pytest.mark.parametrize(
    ("variables", "verbose", "level"),
    [({}, False, "warn"), ({}, True, "info"), ({"DYN_LOG": "debug"}, False, "debug"), ({"DYN_LOG": ""}, False, "warn")],
)
def test_children_log_level_follows_verbose_and_the_environment(
    variables: dict[str, str], verbose: bool, level: str
) -> None:
    for process in plan(place(**variables), engine="cpu", workers=1, verbose=verbose).processes:
        assert process.variables["DYN_LOG"] == level


def test_workers_have_distinct_system_ports() -> None:
    graph = plan(place(DYN_SYSTEM_PORT="9000"), engine="cpu", workers=3)
    assert [worker.variables["DYN_SYSTEM_PORT"] for worker in graph.workers] == ["9000", "9001", "9002"]
    assert graph.frontend.variables["DYN_SYSTEM_PORT"] == "-1"


@pytest.mark.parametrize("port", ["-1", "0", ""])
def test_disabled_or_ephemeral_system_port_is_inherited_unchanged(port: str) -> None:
    (worker,) = plan(place(DYN_SYSTEM_PORT=port), engine="cpu", workers=1).workers
    assert "DYN_SYSTEM_PORT" not in worker.variables


def test_workers_have_no_grace_period_unless_configured() -> None:
    (worker,) = plan(place(), engine="cpu", workers=1).workers
    assert worker.variables[GRACE_VARIABLE] == "0"
    (worker,) = plan(place(**{GRACE_VARIABLE: "3"}), engine="cpu", workers=1).workers
    assert worker.variables[GRACE_VARIABLE] == "3"


def test_disaggregated_plan_has_prefill_and_decode_workers() -> None:
    graph = plan(
        place(DYN_SYSTEM_PORT="9000"), engine="cpu", workers=2, prefill_workers=1, engine_flags=["--threads=1"]
    )
    assert [(worker.name, worker.command[-1]) for worker in graph.workers] == [
        ("worker-1", "--disaggregation-mode=decode"),
        ("worker-2", "--disaggregation-mode=decode"),
        ("prefill-1", "--disaggregation-mode=prefill"),
    ]
    assert [worker.variables["DYN_SYSTEM_PORT"] for worker in graph.workers] == ["9000", "9001", "9002"]
    assert all("--threads=1" in worker.command for worker in graph.workers)


def test_frontend_receives_keys_in_its_environment_and_workers_only_admin_keys() -> None:
    keys = {"DYN_API_KEYS": '["sk-secret"]', "DYN_ADMIN_API_KEYS": '["sk-admin"]'}
    graph = plan(place(), engine="cpu", workers=1, key_variables=keys)
    assert {name: graph.frontend.variables[name] for name in keys} == keys
    (worker,) = graph.workers
    assert worker.variables["DYN_API_KEYS"] is None
    assert worker.variables["DYN_ADMIN_API_KEYS"] == '["sk-admin"]'
    assert not [word for process in graph.processes for word in process.command if "sk-" in word]
