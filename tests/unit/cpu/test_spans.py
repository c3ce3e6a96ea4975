import numpy as np

from dynamo.cpu.spans import TokenSpan, between, narrowed


def test_spans_slots_between_two_places_may_lie_in_several_runs() -> None:
    runs = [(10, 14), (30, 33), (2, 5)]
    assert between(runs, 0, 10) == runs
    assert between(runs, 2, 8) == [(12, 14), (30, 33), (2, 3)]
    assert between(runs, 4, 7) == [(30, 33)]
    assert between(runs, 3, 3) == []


def test_spans_narrowed_to_wanted_rows_keep_the_order_that_a_batch_has() -> None:
    spans = [
        TokenSpan(0, 1, 9, [(0, 9)]),
        TokenSpan(1, 5, 6, [(20, 23), (40, 43)]),  # Only the token at position 3 is wanted: one row, a shorter context.
        TokenSpan(6, 4, 4, [(60, 64)]),
        TokenSpan(10, 4, 30, [(80, 110)]),  # Two are wanted, with one between them.
    ]
    narrow, rows = narrowed(spans, np.array([13, 3, 0, 11]))
    assert narrow == [
        TokenSpan(0, 1, 4, [(20, 23), (40, 41)]),
        TokenSpan(1, 1, 9, [(0, 9)]),
        TokenSpan(2, 3, 30, [(80, 110)]),
    ]
    assert rows.tolist() == [3, 0, 11, 12, 13]


def test_spans_narrowed_to_nothing_are_empty() -> None:
    narrow, rows = narrowed([TokenSpan(0, 2, 2, [(0, 2)])], np.array([], np.intp))
    assert (narrow, rows.tolist()) == ([], [])
