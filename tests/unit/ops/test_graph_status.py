"""Status of graphs: from records, processes and the frontend's answer."""

from pathlib import Path

from dynamo.ops.graph_status import GraphHealth, LocalGraphStatus, as_lines, duration, reachable
from dynamo.ops.graphs import FoundGraph, GraphRecord, GraphState, RecordedProcess
from dynamo.ops.report import CheckStatus

PROCESSES = [
    RecordedProcess(name=name, pid=pid, ticks=1, module=f"dynamo.{name}", gpus=gpus)
    for name, pid, gpus in (("cpu", 7, "0,1"), ("frontend", 8, ""))
]
SERVED = GraphHealth(models=("m",), instances=1)


def status(
    *alive: bool,
    health: GraphHealth = SERVED,
    state: GraphState = GraphState.SERVING,
    is_running: bool = True,
    end: str = "",
) -> LocalGraphStatus:
    record = GraphRecord(
        name="g",
        state=state,
        pid=5,
        ticks=1,
        url="http://localhost:1",
        engine="cpu",
        started=100.0,
        end=end,
        processes=PROCESSES,
    )
    graph = FoundGraph(directory=Path("/d"), is_running=is_running, record=record)
    return LocalGraphStatus(graph=graph, alive=alive or (True, True), health=health)


def test_graph_whose_processes_run_and_whose_model_is_served_is_healthy() -> None:
    found = status()
    assert (found.status, found.state) == (CheckStatus.PASS, "serving")
    text = "\n".join(as_lines([found], now=160.0))
    assert "PASS  g  serving, up 60 s" in text
    assert "GPUs 0,1" in text


def test_lost_process_and_silent_frontend_are_failures() -> None:
    assert (status(False, True).status, status(False, True).state) == (CheckStatus.FAIL, "not running: cpu")
    silent = status(health=GraphHealth(error="the frontend does not answer: refused"))
    assert (silent.status, silent.state) == (CheckStatus.FAIL, "the frontend does not answer: refused")
    assert status(health=GraphHealth()).state == "no model is served"


def test_starting_or_ended_graph_is_not_a_failure() -> None:
    assert status(state=GraphState.STARTING, health=GraphHealth()).status is CheckStatus.WARN
    ended = status(is_running=False, end="Ctrl-C")
    assert (ended.status, ended.state, ended.value(1.0)["uptime_s"]) == (CheckStatus.SKIP, "ended: Ctrl-C", None)


def test_durations_are_readable() -> None:
    assert [duration(one) for one in (5.9, 150, 12000)] == ["5 s", "2 min", "3 h 20 min"]


def test_graph_with_a_worker_that_is_not_ready_is_a_warning() -> None:
    loading = status(health=GraphHealth(models=("m",), instances=0))
    assert (loading.status, loading.state) == (CheckStatus.WARN, "serving, 0 of 1 workers ready")
    unknown = status(health=GraphHealth(models=("m",)))
    assert (unknown.status, unknown.state) == (CheckStatus.PASS, "serving")


def test_stopped_process_is_a_failure_with_its_remedy() -> None:
    found = status()
    stopped = LocalGraphStatus(graph=found.graph, alive=found.alive, health=found.health, stopped=("cpu",))
    assert stopped.status is CheckStatus.FAIL
    assert stopped.state == "stopped by a signal or a debugger: cpu; kill -CONT PID continues it"
    assert "cpu             7  stopped" in "\n".join(as_lines([stopped], now=160.0))


def test_worker_whose_port_is_closed_is_not_counted() -> None:
    def instance(address: str, endpoint: str = "generate") -> dict[str, object]:
        return {"endpoint": endpoint, "transport": {"tcp": address}}

    instances = [instance("127.0.0.1:7000/a/d/b/generate"), instance("127.0.0.1:7001/b/d/b/generate")]
    others = [instance("127.0.0.1:7000/a/d/b/control", "control"), {"endpoint": "generate", "transport": "nats"}]
    assert reachable([*instances, *others], {7000}) == 2
    assert reachable([*instances, *others], None) == 3
