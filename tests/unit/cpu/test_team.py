import threading

import numpy as np
import pytest

from dynamo.cpu import blas
from dynamo.cpu.team import Team


@pytest.fixture
def put() -> list[int]:
    """Thread counts that OpenBLAS was given."""
    return []


@pytest.fixture
def team(put: list[int]) -> Team:
    return Team(3, put.append)


def test_team_runs_tasks_in_as_many_threads_at_the_same_time(team: Team) -> None:
    together = threading.Barrier(3, timeout=10)
    threads: set[int] = set()

    def task() -> None:
        together.wait()
        threads.add(threading.get_ident())

    team.run([task] * 3)
    assert len(threads) == 3
    assert threading.get_ident() in threads


def test_team_runs_every_task_once(team: Team) -> None:
    done: list[int] = []
    team.run([lambda number=number: done.append(number) for number in range(100)])
    assert sorted(done) == list(range(100))
    team.run([])


def test_team_of_one_runs_tasks_in_order_and_leaves_blas_alone(put: list[int]) -> None:
    team, done = Team(1, put.append), []
    with team.side_by_side():
        team.run([lambda number=number: done.append(number) for number in range(5)])
    assert (done, put) == ([0, 1, 2, 3, 4], [])


def test_team_limits_blas_to_one_thread_while_its_threads_compute(team: Team, put: list[int]) -> None:
    with team.side_by_side():
        assert put == [1]
    assert put == [1, 3]


def test_team_restores_the_threads_of_blas_after_an_error(team: Team, put: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), team.side_by_side():
        team.run([lambda: 1 / 0])
    assert put == [1, 3]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_team_raises_the_error_of_any_thread(team: Team, failing: int) -> None:
    """The tasks meet before one fails, so that each runs in a thread of its own."""
    together = threading.Barrier(3, timeout=10)

    def task(number: int) -> None:
        together.wait()
        if number == failing:
            raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match=f"task {failing}"):
        team.run([lambda number=number: task(number) for number in range(3)])


def test_team_drops_the_rest_of_the_tasks_after_an_error() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    team = Team(1, print)
    with pytest.raises(ValueError, match="no"):
        team.run([lambda: done.append(1), fail, lambda: done.append(2)])
    team.run([lambda: done.append(3)])
    assert done == [1, 3]


def test_team_has_as_many_threads_as_blas() -> None:
    threads = blas.loaded()
    team = Team.of_blas()
    assert team.size == (1 if threads is None else threads.get())
    with team.side_by_side():
        if threads is not None:
            assert threads.get() == 1
            assert np.ones((300, 300)).dot(np.ones((300, 300)))[0, 0] == 300
    assert threads is None or threads.get() == team.size
