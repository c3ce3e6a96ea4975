"""Work logs and proposals as files."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.reviews.records import KINDS, proposal, slug, worklog


def test_worklog_grows_by_entries_and_changes_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert worklog(["new", "Router hangs: at start!", "--output", str(tmp_path)]) == 0
    path = tmp_path / "router-hangs-at-start.md"
    assert capsys.readouterr().out == f"{path}\n"
    worklog(["log", str(path), "--hypothesis", "the lock"])
    worklog(["log", str(path), "--test", "py-spy", "--result", "no lock"])
    worklog(["status", str(path), "--status", "root-caused"])
    text = path.read_text()
    assert text.index("- Hypothesis: the lock") < text.index("- Result: no lock") < text.index("## Root Cause")
    assert "\nStatus: root-caused\n" in text
    for section in ("Environment", "Problem", "Reproduction Steps", "Expected vs Actual", "Investigation Log", "Fix"):
        assert f"\n## {section}\n" in text
    with pytest.raises(ConfigError, match="exists already"):
        worklog(["new", "router hangs at start", "--output", str(tmp_path)])


def test_invalid_uses_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("nothing")
    for argv, message in (
        (["log", str(tmp_path / "x.md")], "expected at least one"),
        (["log", str(tmp_path / "x.md"), "--test", "a"], "no section"),
        (["status", str(tmp_path / "x.md"), "--status", "fixed"], "no line Status"),
        (["new"], "SUBJECT: missing"),
        (["other"], "expected one of new, log, status"),
    ):
        with pytest.raises(ConfigError, match=message):
            worklog(argv)


@pytest.mark.parametrize("kind", KINDS)
def test_proposal_has_the_sections_of_its_kind_and_labels(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "new",
        "Faster Router",
        "--kind",
        kind,
        "--number",
        "7",
        "--area",
        "router",
        "--output",
        str(tmp_path),
        "--json",
    ]
    assert proposal(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(tmp_path / "0007-faster-router.md"), "labels": ["area:router", "dep", "dep:draft"]}
    text = Path(found["file"]).read_text()
    assert "**Status**: Draft" in text
    assert "## Summary" in text
    assert ("## Requirements" in text) is (kind in {"full", "plan"})
    assert proposal(["update", found["file"], "--state", "Accepted"]) == 0
    assert "**Status**: Accepted" in Path(found["file"]).read_text()
    assert "dep:approved" in capsys.readouterr().out


def test_names_of_files_come_from_issues_and_titles() -> None:
    assert [slug(one) for one in ("https://github.com/a/b/issues/12", "#12", "A  b!", "!!")] == [
        "issue-12", "issue-12", "a-b", "untitled",
    ]  # fmt: skip
