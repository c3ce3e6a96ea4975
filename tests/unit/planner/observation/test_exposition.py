"""Samples of an exposition: names, labels, and lines that cannot be read."""

from dynamo.planner.observation.exposition import SeriesKey, samples_of

TEXT = """# HELP wanted_total Requests
# TYPE wanted_total counter
wanted_total{model="a \\"b\\"\\n",endpoint="chat"} 3
wanted_total 4 1700000000
other_total{model="a"} 7
gauge NaN
gauge{model="x"} +Inf
broken{ 1
gauge{model="y"} one
"""


def test_only_wanted_metrics_are_returned_with_unescaped_labels() -> None:
    found = samples_of(TEXT, {"wanted_total"})
    assert found == {
        SeriesKey("wanted_total", (("endpoint", "chat"), ("model", 'a "b"\n'))): 3.0,
        SeriesKey("wanted_total", ()): 4.0,
    }
    assert [key.label("model") for key in found] == ['a "b"\n', None]


def test_values_that_are_not_finite_numbers_are_left_out() -> None:
    assert samples_of(TEXT, {"gauge", "broken"}) == {}
