"""Reports of a directory: listed with their numbers; nothing outside of the directory is read."""

import json
from pathlib import Path

import pytest

from dynamo.console.reports import ReportFolder


def test_reports_are_listed_newest_first_with_their_numbers(tmp_path: Path) -> None:
    import os

    (tmp_path / "a.json").write_text(json.dumps({"summary": {"mean_ttft_ms": 12.5, "name": "x"}}))
    (tmp_path / "b.html").write_text("<p>")
    (tmp_path / "c.txt").write_text("ignored")
    (tmp_path / ".hidden.json").write_text("{}")
    os.utime(tmp_path / "a.json", (1, 1))
    found = ReportFolder(str(tmp_path)).entries()
    assert [(one.name, one.kind, one.summary) for one in found] == [
        ("b.html", "page", {}),
        ("a.json", "replay", {"mean_ttft_ms": 12.5}),
    ]


@pytest.mark.parametrize("content", ["no json", "[1]", '{"summary": {"mean_ttft_ms": true}}', "[" * 100_000])
def test_file_that_is_not_a_report_has_no_summary(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert ReportFolder(str(tmp_path)).entries()[0].summary == {}


def test_report_is_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert ReportFolder(str(tmp_path)).read("a.json") == (b"{}", "application/json")


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", ".a.json", "a.txt", "", "missing.json", "x/y.json"])
def test_other_file_names_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "a.txt").write_text("x")
    assert ReportFolder(str(folder)).read(name) is None


def test_missing_report_directory_has_no_reports(tmp_path: Path) -> None:
    for folder in (ReportFolder(""), ReportFolder(str(tmp_path / "missing"))):
        assert folder.entries() == []
    assert ReportFolder("").is_set is False
