"""Table of block marks, in Python and compiled: equal to a dictionary."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.mocker.simulation.marks import IS_COMPILED, BlockMarks, Marks, PythonMarks

tables = pytest.mark.parametrize("table", [PythonMarks, BlockMarks] if IS_COMPILED else [PythonMarks])
edges = [-(2**64), -(2**63) - 1, -(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1]
hashes = st.lists(st.integers(0, 90) | st.sampled_from(edges), max_size=40)


@tables
@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(["put", "set", "drop"]), hashes, st.integers(-(2**31), 2**31 - 1)), max_size=40
    )
)
def test_marks_behave_like_a_dictionary(table: type[Marks], changes: list[tuple[str, list[int], int]]) -> None:
    marks, truth = table(), dict[int, int]()
    for act, some, mark in changes:
        if act == "put":
            marks.put_all(some, mark)
            truth.update(dict.fromkeys(some, mark))
        elif act == "set":
            for block_hash in some[:1]:
                marks[block_hash] = truth[block_hash] = mark
        else:
            gone = [block_hash for block_hash in dict.fromkeys(some) if block_hash in truth]
            assert marks.drop(gone) == [block_hash for block_hash in gone if block_hash >= 0]
            for block_hash in gone:
                del truth[block_hash]
        assert len(marks) == len(truth)
        assert sorted(marks.items()) == sorted(truth.items())
        assert marks.marked(some, mark) == [block_hash for block_hash in some if truth.get(block_hash) == mark]
        for block_hash in {*some, *truth, 7}:
            assert marks.get(block_hash) == truth.get(block_hash)
            assert (block_hash in marks) == (block_hash in truth)


@tables
@given(held=st.integers(0, 50), idle=st.integers(0, 50), unknown=st.integers(0, 50))
def test_leading_hashes_are_counted(table: type[Marks], held: int, idle: int, unknown: int) -> None:
    marks, some = table(), list(range(held + idle + unknown))
    for block_hash in some[:held]:
        marks[block_hash] = 2
    marks.put_all(some[held : held + idle], 1)
    assert marks.known(some) == held + idle
    assert marks.shared(some[: held + idle]) == held
    marks.put_all(some[held : held + idle], -3)
    assert marks.held(some[: held + idle]) == held


@tables
@pytest.mark.parametrize(
    "use",
    [
        lambda marks: marks.drop([1, 5]), lambda marks: marks.held([5]), lambda marks: marks.shared([5]), lambda marks: marks[5],
    ],
)  # fmt: skip
def test_unknown_hash_is_an_error(table: type[Marks], use: Callable[[Marks], object]) -> None:
    marks = table()
    marks.put_all([1, 2], 1)
    with pytest.raises(KeyError, match="5"):
        use(marks)


@pytest.mark.skipif(not IS_COMPILED, reason="built where a compiler is available")
@pytest.mark.parametrize("mark", [2**31, -(2**31) - 1])
def test_compiled_marks_refuse_a_mark_of_more_than_32_bits(mark: int) -> None:
    marks = BlockMarks()
    with pytest.raises(OverflowError, match="32 bits"):
        marks[1] = mark
    with pytest.raises(OverflowError, match="32 bits"):
        marks.put_all([1], mark)
    assert 1 not in marks


@tables
def test_marks_hold_many_blocks_of_which_most_are_removed_again(table: type[Marks]) -> None:
    marks, some = table(), [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(50_000)]
    marks.put_all(some, 1)
    assert marks.drop(some[100:]) == some[100:]
    assert sorted(marks.items()) == sorted((block_hash, 1) for block_hash in some[:100])
