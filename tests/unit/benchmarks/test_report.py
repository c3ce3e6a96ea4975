"""Figures, ratios and tables."""

import math

import pytest
from benchmarks.report import number, ratio, table, write_result


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (1234.5, "1,234"), (-250.0, "-250"), (math.nan, "-")]
)
def test_numbers_have_three_significant_digits(value, text):
    assert number(value) == text


def test_ratio_requires_two_positive_numbers():
    assert ratio(1.0, 4.0) == "**0.25**"
    assert ratio(1.0, None) == ratio(1.0, 0.0) == ratio(1.0, math.nan) == ratio(math.nan, 1.0) == ""
    assert ratio(-0.1, 4.0) == ratio(1.0, -4.0) == ""


def test_table_aligns_words_left_and_numbers_right():
    assert table(["a", "b", "c"], [["x", "y", "1"]], words=2) == "| a | b | c |\n|---|---|---:|\n| x | y | 1 |"


def test_incomplete_result_is_written_to_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_BENCH_CACHE", str(tmp_path))
    path = write_result("something", {"x": 1}, is_whole=False)
    assert path == str(tmp_path / "something.json")
    assert '"x": 1' in (tmp_path / "something.json").read_text()
