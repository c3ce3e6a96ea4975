"""`dynamo pr-review`: gate, steps, and the draft from a diff and captured evidence."""

import json
from pathlib import Path

import pytest
from tests.unit.ops.reviews.test_perf_review import DIFF

from dynamo.core.errors import ConfigError
from dynamo.ops.report import CheckStatus
from dynamo.ops.reviews.pr_review import comments_of, gate_row, pr_review, review_text


@pytest.mark.parametrize(
    ("needed", "present", "status"), [(1, 1, "PASS"), (0, 0, "PASS"), (1, 0, "FAIL"), (2, 8, "FAIL")]
)
def test_gate_requires_one_gpu_at_most(needed: int, present: int, status: str) -> None:
    assert gate_row(needed, present).status is CheckStatus(status)


def test_comments_are_on_added_lines() -> None:
    given = [{"path": "src/dynamo/serving/x.py", "line": line, "body": "why?"} for line in (1, 2)]
    found = comments_of(DIFF, {"comments": given})
    assert [(one["line"], one["side"]) for one in found] == [(2, "RIGHT"), (2, "RIGHT")]
    assert "async blocking" in found[1]["body"]


def test_draft_has_the_sections_of_the_template() -> None:
    text = review_text({"tests": {"unit": "12 passed", "own": "ok"}, "log": "Killed"}, DIFF, [])
    assert text.startswith("## Review Summary\n\n**Verdict:** Request changes\n")
    for part in (
        "| unit | 12 passed |",
        "| load | not run |",
        "| own | ok |",
        "| logs | 1 failure lines |",
        "    Killed",
    ):
        assert part in text
    assert "Performance impact of the added lines: significant" in text


def test_draft_is_kept_with_an_index_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_text(DIFF)
    (tmp_path / "e").write_text(json.dumps({"title": "Add sleep", "verdict": "Comment"}))
    argv = ["https://github.com/a/b/pull/42", "--diff", str(tmp_path / "d"), "--evidence", str(tmp_path / "e")]
    for _ in range(2):
        assert pr_review([*argv, "--output", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.split("}\n{")[-1].join(["{", ""]))
    assert found["event"] == "COMMENT"
    assert (tmp_path / "out" / "42-add-sleep" / "review.md").exists()
    assert (tmp_path / "out" / "INDEX.md").read_text().count("| 42 |") == 1


def test_invalid_evidence_is_named(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('{"verdict": "LGTM"}')
    with pytest.raises(ConfigError, match="verdict 'LGTM': must be Approve, Request changes, Comment"):
        pr_review(["1", "--evidence", str(tmp_path / "e")])
    with pytest.raises(ConfigError, match="PR: missing"):
        pr_review([])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["1", "--run", "--evidence", "e"], "--run and --evidence are mutually exclusive"),
        (["1", "--run", "--requests", "0"], "--requests 0: must be at least 1"),
        (["1", "--", "--dtype", "auto"], "--: arguments of the engine require --run"),
    ],
)
def test_options_that_do_not_fit_are_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pr_review(argv)
