"""Runs in the order of their last use, and runs by first block, in parts."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_router import recent_runs
from dynamo.kv_router.recent_runs import RecentRuns, RootRuns
from dynamo.kv_router.runs import Run, pack


def run_of(number: int) -> Run:
    return Run(None, -1, pack([number]), [number], 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "touch", "remove", "oldest"]), st.integers(0, 30)), max_size=300
    )
)
def test_recent_runs_keep_the_order_of_last_use(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_runs, "SEGMENT_MAX", 4)
        runs, found = [run_of(number) for number in range(31)], RecentRuns()
        expected: OrderedDict[Run, None] = OrderedDict()
        for step, number in steps:
            run = runs[number]
            assert (run in found) == (run in expected)
            if step == "oldest":
                assert not expected or found.oldest() is next(iter(expected))
            elif step == "add" and run not in expected:
                found.add(run)
                expected[run] = None
            elif step == "touch" and run in expected:
                found.touch(run)
                expected.move_to_end(run)
            elif step == "remove" and run in expected:
                found.remove(run)
                del expected[run]
            assert list(found) == list(expected)
            assert len(found) == len(expected)


def test_recent_runs_merge_segments_whose_runs_moved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_runs, "SEGMENT_MAX", 16)
    runs, found = [run_of(number) for number in range(200)], RecentRuns()
    for number, run in enumerate(runs):
        found.add(run)
        if number >= 10:
            found.remove(runs[number - 10])
    for turn in range(400):
        found.touch(runs[190 + turn % 10])
        found.add(runs[0])
        found.remove(runs[0])
    assert len(found) == 10
    assert len(found._segments) <= 8


def test_root_runs_find_the_run_that_begins_with_a_block() -> None:
    roots, runs = RootRuns(), [run_of(number) for number in range(600)]
    for run in runs:
        roots.add(run.blocks, run)
    assert all(roots.get(run.blocks) is run for run in runs)
    roots.remove(runs[7].blocks)
    assert roots.get(runs[7].blocks) is None
    assert roots.get(b"") is None
    with pytest.raises(KeyError):
        roots.remove(runs[7].blocks)
