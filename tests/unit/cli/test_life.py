"""Life of a graph: which deaths it survives."""

import signal

from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.graph import FRONTEND, PLANNER
from dynamo.cli.life import (
    LISTING_S_MAX,
    PLANNER_DELAY_S,
    RESTART_DELAYS_S,
    RESTART_WINDOW_S,
    RESTARTS_MAX,
    EndGraph,
    GraphLife,
    Phase,
    RestartProcess,
    describe_exit,
)


def serving() -> GraphLife:
    life = GraphLife()
    assert life.progressed(workers_left=0, is_listed=True, now=0.0) is None
    assert life.phase is Phase.SERVING
    return life


def test_process_exit_before_readiness_ends_the_graph() -> None:
    for name in (FRONTEND, "worker-1"):
        assert GraphLife().exited(name, -9, 0.0) == EndGraph(
            1, f"{name} was killed by SIGKILL before it was ready", name
        )


def test_worker_loading_time_is_unlimited() -> None:
    life = GraphLife()
    assert life.progressed(workers_left=1, is_listed=False, now=0.0) is None
    assert life.progressed(workers_left=1, is_listed=True, now=100_000.0) is None
    assert life.phase is Phase.STARTING


def test_frontend_that_does_not_list_the_model_ends_the_graph() -> None:
    life = GraphLife()
    assert life.progressed(workers_left=0, is_listed=False, now=10.0) is None
    assert life.progressed(workers_left=0, is_listed=False, now=10.0 + LISTING_S_MAX) is None
    end = life.progressed(workers_left=0, is_listed=False, now=11.0 + LISTING_S_MAX)
    assert isinstance(end, EndGraph)
    assert (end.status, end.culprit) == (1, FRONTEND)


def test_worker_restart_resets_the_model_listing_timeout() -> None:
    life = GraphLife()
    for now, left in ((0.0, 0), (50.0, 1), (60.0, 0), (100.0, 0)):
        assert life.progressed(workers_left=left, is_listed=False, now=now) is None


def test_process_with_an_invalid_option_ends_the_graph_with_its_status() -> None:
    end = GraphLife().exited("worker-1", 2, 0.0)
    assert isinstance(end, EndGraph)
    assert end.status == 2


def test_worker_that_exits_while_serving_is_restarted() -> None:
    assert serving().exited("worker-1", -11, 5.0) == RestartProcess("worker-1", "worker-1 was killed by SIGSEGV")


def test_worker_that_exits_too_often_ends_the_graph() -> None:
    life = serving()
    for number in range(RESTARTS_MAX):
        assert isinstance(life.exited("worker-1", 1, float(number)), RestartProcess)
    end = life.exited("worker-1", 1, 10.0)
    assert isinstance(end, EndGraph)
    assert (end.status, end.culprit, life.phase) == (1, "worker-1", Phase.ENDING)


def test_exits_of_one_worker_do_not_count_for_another() -> None:
    life = serving()
    for number in range(RESTARTS_MAX):
        life.exited("worker-1", 1, float(number))
    assert isinstance(life.exited("worker-2", 1, 10.0), RestartProcess)


def test_old_exits_are_not_counted() -> None:
    life = serving()
    for number in range(10):
        assert isinstance(life.exited("worker-1", 1, number * (RESTART_WINDOW_S + 1)), RestartProcess)


def test_frontend_that_exits_while_serving_is_restarted_within_the_budget_of_a_worker() -> None:
    life = serving()
    restarts = [life.exited(FRONTEND, -9, 0.0) for _ in range(RESTARTS_MAX)]
    assert restarts == [RestartProcess(FRONTEND, "frontend was killed by SIGKILL", delay) for delay in RESTART_DELAYS_S]
    end = life.exited(FRONTEND, -9, 1.0)
    assert isinstance(end, EndGraph)
    assert (end.status, end.culprit, life.phase) == (1, FRONTEND, Phase.ENDING)


def test_restart_is_immediate_again_after_the_window() -> None:
    life = serving()
    for now, delay in ((0.0, 0.0), (1.0, RESTART_DELAYS_S[1]), (2 * RESTART_WINDOW_S, 0.0)):
        outcome = life.exited("worker-1", 1, now)
        assert isinstance(outcome, RestartProcess)
        assert outcome.delay_s == delay


def test_exits_after_stop_are_no_failures() -> None:
    for life in (GraphLife(), serving()):
        assert life.stop("Ctrl-C") == EndGraph(0, "Ctrl-C")
        assert life.exited("worker-1", -15, 0.0) is None
        assert life.exited(FRONTEND, 0, 0.0) is None


@given(st.lists(st.tuples(st.sampled_from([FRONTEND, "worker-2"]), st.floats(0, 100)), max_size=60))
def test_no_process_is_restarted_more_often_than_the_window_allows(deaths: list[tuple[str, float]]) -> None:
    life, now = serving(), 0.0
    restarts: dict[str, list[float]] = {FRONTEND: [], "worker-2": []}
    for name, later in deaths:
        now += later
        outcome = life.exited(name, 1, now)
        if isinstance(outcome, RestartProcess):
            restarts[name].append(now)
            assert sum(now - then <= RESTART_WINDOW_S for then in restarts[name]) <= RESTARTS_MAX
        if isinstance(outcome, EndGraph):
            assert life.phase is Phase.ENDING
            break


def test_process_exit_message_names_status_or_signal() -> None:
    assert describe_exit("frontend", 3) == "frontend ended with status 3"
    assert describe_exit("worker-1", -signal.SIGKILL) == "worker-1 was killed by SIGKILL"
    assert describe_exit("worker-1", -200) == "worker-1 was killed by signal 200"


def test_crashing_planner_is_restarted_with_delays_and_never_ends_the_graph() -> None:
    life = serving()
    outcomes = [life.exited(PLANNER, 1, float(now)) for now in range(10)]
    assert all(isinstance(one, RestartProcess) for one in outcomes)
    delays = [one.delay_s for one in outcomes if isinstance(one, RestartProcess)]
    assert delays == [*RESTART_DELAYS_S, *[PLANNER_DELAY_S] * (10 - RESTARTS_MAX)]
    assert life.phase is Phase.SERVING
