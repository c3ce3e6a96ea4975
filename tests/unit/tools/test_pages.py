"""Pages are rewritten, or compared with `--check`."""

import sys
from pathlib import Path

import pytest
from tools import pages


def test_check_reports_a_page_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "reference" / "page.md"
    assert pages.write(page, "text") == 0
    monkeypatch.setattr(sys, "argv", ["tool", "--check"])
    assert pages.write(page, "text") == 0
    assert pages.write(page, "other") == 1
    assert page.read_text(encoding="utf-8") == "text"


def test_table_cells_are_one_line_without_bars() -> None:
    assert (
        pages.table(("a", "b"), [(pages.code("x|y"), pages.cell("two\nlines"))]).splitlines()[2]
        == "| `x\\|y` | two lines |"
    )
