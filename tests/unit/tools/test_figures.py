"""The table and the chart of the documentation come from the committed result files."""

from pathlib import Path

import pytest
from tools import figures, scale_figures


@pytest.mark.parametrize("page", [figures.PAGE, figures.README, scale_figures.PAGE], ids=lambda page: page.name)
def test_figures_of_pages_equal_the_result_files(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == figures.pages()[page], "run: python -m tools.figures"


def test_page_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        figures.written("text", "frontend_cpu", "table")


def test_chart_equals_result_file() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.chart(), "run: python -m tools.figures"
    for path, picture in scale_figures.pictures().items():
        assert path.read_text(encoding="utf-8") == picture, "run: python -m tools.figures"


def test_row_without_a_same_engine_run_is_not_measured() -> None:
    cell = {"frontend_us_per_token": {"median": 2.0, "low": 1.0, "high": 3.0}}
    other = {"frontend_us_per_token": {"median": 8.0, "low": 7.0, "high": 9.0}}
    assert figures.row("paced c=64", {"ours": cell, "theirs": other}) == (
        "| paced, 64 streams | 2.0 (1.0–3.0) | 8.0 (7.0–9.0) | **0.25** | not measured | not measured |"
    )
    assert figures.row("saturated c=1 kv", {"ours": cell, "theirs": other, "ours+peer-mocker": other}).endswith(
        "| 1.00 | not measured |"
    )
    assert figures.row("paced c=64", {"ours": other, "theirs": other, "bare writer": cell}).endswith("| 4.00 |")


def test_cost_of_the_kv_router_is_named_only_where_round_robin_was_measured_too() -> None:
    assert figures.label("paced c=64 on 2 workers") == "paced, 64 streams on 2 workers"
    assert figures.label("saturated c=1") == "saturated, 1 stream"
    assert figures.kv_cost({"paced c=64 kv": {"ours": 1.1}}) == ""
    assert figures.kv_cost({"paced c=64 kv": {"ours": 1.1, "theirs": 1.25}}) == (
        " KV mode over round robin with the same two workers: paced, 64 kv streams 1.10 (released 1.25)."
    )
