"""Restarts: order, parallel, superseded, repeated."""

import pytest

from dynamo.operator.reconcile.restart import marked, next_restart
from dynamo.protocols.kubernetes.common import Restart, RestartStatus, RestartStrategy

COMPONENTS = ["front", "decode", "prefill"]
SEQUENTIAL = Restart("r2", RestartStrategy("Sequential", ["prefill", "decode", "front"]))
PARALLEL = Restart("r2", RestartStrategy("Parallel"))


def step(
    wanted: Restart | None, status: RestartStatus | None, restarted: tuple[str, ...] = (), *, is_rolling: bool = False
) -> RestartStatus | None:
    return next_restart(wanted, status, COMPONENTS, is_rolling=is_rolling, has_restarted=lambda name: name in restarted)


def restarting(*names: str, id: str = "r2") -> RestartStatus:
    return RestartStatus(id, "Restarting", list(names))


def test_graph_without_a_restart_has_no_restart_status() -> None:
    assert step(None, None) is None


def test_completed_restart_status_is_kept_and_a_withdrawn_one_is_cleared() -> None:
    ended = RestartStatus("r1", "Completed")
    assert step(None, ended) == ended
    assert step(None, restarting("front", id="r1")) is None


def test_sequential_restart_starts_with_the_first_component_of_its_order() -> None:
    assert step(SEQUENTIAL, None) == restarting("prefill")


def test_restart_without_an_order_is_sorted_by_name() -> None:
    assert step(Restart("r2"), None) == restarting("decode")


def test_sequential_restart_continues_after_each_component_is_ready() -> None:
    assert step(SEQUENTIAL, restarting("prefill")) == restarting("prefill")
    assert step(SEQUENTIAL, restarting("prefill"), ("prefill",)) == restarting("decode")
    assert step(SEQUENTIAL, restarting("front"), ("front",)) == RestartStatus("r2", "Completed")


def test_parallel_restart_waits_for_all_components() -> None:
    assert step(PARALLEL, None) == restarting("decode", "front", "prefill")
    assert step(PARALLEL, restarting("decode", "front"), ("front",)) == restarting("decode")
    assert step(PARALLEL, restarting("decode"), ("decode",)) == RestartStatus("r2", "Completed")


@pytest.mark.parametrize("phase", ["Completed", "Failed", "Superseded"])
def test_ended_restart_is_not_repeated(phase: str) -> None:
    ended = RestartStatus("r2", phase)  # type: ignore[arg-type]
    assert step(SEQUENTIAL, ended) == ended


def test_new_restart_id_replaces_a_running_restart() -> None:
    assert step(SEQUENTIAL, restarting("front", id="r1")) == restarting("prefill")


def test_rolling_update_sets_a_restart_to_superseded() -> None:
    assert step(SEQUENTIAL, restarting("prefill"), is_rolling=True) == RestartStatus("r2", "Superseded")


def test_restarting_and_restarted_components_have_the_restart_id() -> None:
    assert marked(SEQUENTIAL, restarting("decode"), COMPONENTS) == {"prefill", "decode"}
    assert marked(PARALLEL, restarting("decode"), COMPONENTS) == set(COMPONENTS)
    assert marked(SEQUENTIAL, RestartStatus("r2", "Completed"), COMPONENTS) == set(COMPONENTS)


def test_superseded_or_other_restart_marks_no_component() -> None:
    assert marked(SEQUENTIAL, RestartStatus("r2", "Superseded"), COMPONENTS) == frozenset()
    assert marked(SEQUENTIAL, restarting("front", id="r1"), COMPONENTS) == frozenset()
    assert marked(None, None, COMPONENTS) == frozenset()
