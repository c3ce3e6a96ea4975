"""The table of the request plane contains the measurements."""

import pytest
from benchmarks.request_plane import Figures, median, show

OURS = Figures(20_000, 30, 20, 200_000, 6, 4)
THEIRS = Figures(4_000, 100, 150, 20_000, 20, 30)


def test_median_is_taken_for_each_figure() -> None:
    low, high = Figures(1, 9, 3, 4, 5, 6), Figures(3, 1, 3, 4, 5, 0)
    assert median([low, high, Figures(2, 2, 2, 2, 2, 2)]) == Figures(2, 2, 3, 4, 5, 2)


def test_ratios_compare_pairs_of_equal_ends(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = show({"ours → ours": OURS, "theirs → theirs": THEIRS})
    assert ratios == {"calls_per_s": 5.0, "cpu_per_call": 0.2, "tokens_per_s": 10.0, "cpu_per_token": 0.2}
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["ours", "→", "ours", "20000", "30", "20", "200000", "6.00", "4.00"]


def test_ratio_is_absent_without_the_peer() -> None:
    assert show({"ours → ours": OURS}) == {}
