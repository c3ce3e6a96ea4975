"""Order of eviction, compared with an ordered dictionary."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.mocker.simulation import eviction
from dynamo.mocker.simulation.eviction import LastUsed, LongestIdle
from dynamo.mocker.simulation.marks import BlockMarks

Acts = st.lists(st.tuples(st.sampled_from(["idle", "use", "take"]), st.lists(st.integers(0, 40), unique=True)))


@given(acts=Acts, stale_max=st.sampled_from([0, 3, 4096]))
def test_longest_idle_block_is_evicted_first(acts: list[tuple[str, list[int]]], stale_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "STALE_MAX", stale_max)
        marks, model = BlockMarks(), OrderedDict[int, None]()
        idle = LongestIdle(marks)
        for act, hashes in acts:
            if act == "idle":
                new = [block_hash for block_hash in hashes if block_hash not in model]
                model.update(dict.fromkeys(new[::-1]))
                marks.put_all(new, idle.add_all(list(new)))
            elif act == "use":
                used = list(model.keys() & set(hashes))
                idle.remove(used)
                marks.put_all(used, 1)
                for block_hash in used:
                    del model[block_hash]
            else:
                taken = idle.take(min(len(hashes), len(model)))
                assert taken == [model.popitem(last=False)[0] for _ in taken]
                assert len(taken) == min(len(hashes), len(model) + len(taken))
                marks.drop(taken)
            assert len(idle) == len(model)


def test_blocks_in_use_again_are_not_listed_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "STALE_MAX", 10)
    marks = BlockMarks()
    idle = LongestIdle(marks)
    for _ in range(1000):
        marks.put_all([1, 2, 3], idle.add_all([1, 2, 3]))
        marks.drop([1, 2, 3])
    marks[4] = idle.add_all([4])
    assert sum(len(hashes) for _, hashes in idle._batches) <= 17
    assert idle.take(1) == [4]


def test_last_use_decides_and_entries_of_blocks_in_use_again_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "STALE_MAX", 10)
    idle = LastUsed()
    for time in range(1000):
        idle.use([1, 2, 3], time)
        idle.add_all([1, 2, 3])
        idle.remove([1, 2, 3])
    assert len(idle._heap) <= 16
    idle.use([4], 5.0)
    idle.add_all([1, 2, 3, 4])
    assert idle.take(1) == [4]
