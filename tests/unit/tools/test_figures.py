"""The table and the chart of the documentation come from the committed result files."""

from tools import figures


def test_table_equals_result_file() -> None:
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.written(text) == text, "run: python tools/figures.py"


def test_chart_equals_result_file() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.chart(), "run: python tools/figures.py"


def test_row_without_a_same_engine_run_is_not_measured() -> None:
    cell = {"frontend_us_per_token": {"median": 2.0, "low": 1.0, "high": 3.0}}
    other = {"frontend_us_per_token": {"median": 8.0, "low": 7.0, "high": 9.0}}
    assert figures.row("paced c=64", {"ours": cell, "theirs": other}) == (
        "| paced, 64 streams | 2.0 (1.0–3.0) | 8.0 (7.0–9.0) | **0.25** | not measured |"
    )
    assert figures.row("saturated c=1 kv", {"ours": cell, "theirs": other, "ours+peer-mocker": other}).endswith(
        "| 1.00 |"
    )
