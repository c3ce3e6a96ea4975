"""Table of interned names, in Python and compiled: equal to a dictionary, without leaked entries."""

import gc
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.kv_router.names import IS_COMPILED, CommonNames, Names, PythonNames
from dynamo.kv_router.runs import Run

tables = pytest.mark.parametrize("table", [PythonNames, CommonNames] if IS_COMPILED else [PythonNames])
keys = st.lists(st.integers(0, 40) | st.integers(2**64 - 9, 2**64 - 1), max_size=40)


def run() -> Run:
    return Run(None, -1, b"", [], 0)


@tables
@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.booleans(), keys), max_size=40))
def test_name_table_behaves_like_a_dictionary(table: type[Names], changes: list[tuple[bool, list[int]]]) -> None:
    names, truth = table(), dict[int, Run]()
    for is_claim, some in changes:
        if is_claim:
            one = run()
            is_free = len(set(some)) == len(some) and truth.keys().isdisjoint(some)
            assert names.claim(some, one) == is_free
            if is_free:
                truth.update(dict.fromkeys(some, one))
        else:
            given_away = [key for key in dict.fromkeys(some) if key in truth]
            names.release(given_away)
            for key in given_away:
                del truth[key]
        assert len(names) == len(truth)
        for key in {*some, *truth, 7}:
            assert names.get(key) is truth.get(key)


@tables
def test_name_table_release_of_an_unknown_key_is_an_error(table: type[Names]) -> None:
    names = table()
    names.claim([1, 2], run())
    with pytest.raises(KeyError, match="3"):
        names.release([1, 3])
    assert names.get(1) is None
    assert names.get(2) is not None


@tables
def test_name_table_supports_many_insertions_and_removals(table: type[Names]) -> None:
    names, one, other = table(), run(), run()
    some, more = list(range(0, 200_000, 2)), list(range(1, 100_000, 2))
    assert names.claim(some, one)
    assert names.claim(more, other)
    assert not names.claim([200_001, 400], other)
    assert names.get(200_001) is None, "where one is taken, none is given"
    names.release(some[::-1])
    assert len(names) == len(more)
    assert all(names.get(key) is other for key in more)
    assert not any(names.get(key) for key in some)


@tables
def test_name_table_keeps_a_run_while_it_has_a_key(table: type[Names]) -> None:
    names, one = table(), run()
    before = sys.getrefcount(one)
    names.claim([1, 2, 3], one)
    assert sys.getrefcount(one) == before + 3
    names.release([2])
    assert not names.claim([5, 6, 1], one)
    assert sys.getrefcount(one) == before + 2
    del names
    gc.collect()
    assert sys.getrefcount(one) == before


@pytest.mark.skipif(not IS_COMPILED, reason="there was no compiler")
def test_compiled_name_table_refuses_values_that_are_not_lists_of_numbers() -> None:
    names = CommonNames()
    with pytest.raises(TypeError):
        names.claim((1, 2), run())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        names.claim([1, "2"], run())  # type: ignore[list-item]
    with pytest.raises(TypeError):
        names.get("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        names.release(None)  # type: ignore[arg-type]
    assert len(names) == 0
    assert names.get(1) is None
