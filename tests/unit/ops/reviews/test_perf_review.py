"""`dynamo perf-review` of a diff."""

import json
import subprocess
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.reviews.perf_review import perf_review

DIFF = """\
diff --git a/src/dynamo/serving/x.py b/src/dynamo/serving/x.py
--- a/src/dynamo/serving/x.py
+++ b/src/dynamo/serving/x.py
@@ -1,1 +1,2 @@ async def f():
     x = 1
+    time.sleep(1)
"""


def test_review_has_checklist_hot_paths_findings_and_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d"
    path.write_text(DIFF)
    assert perf_review([str(path)]) == 0
    text = capsys.readouterr().out
    assert "src/dynamo/serving/x.py:2  async blocking (significant)" in text
    assert text.endswith("Overall impact: significant; change it before merging\n")
    assert perf_review([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hot_paths"] == {"request path": ["src/dynamo/serving/x.py"]}
    rows = {row["check"]: row["status"] for row in found["rows"]}
    assert (rows["async blocking"], rows["copy"], rows["benchmark"]) == ("WARN", "PASS", "WARN")


def test_change_without_performance_patterns_has_negligible_impact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d"
    path.write_text(DIFF.replace("time.sleep(1)", "await asyncio.sleep(1)"))
    assert perf_review([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["impact"] == "negligible"


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="DIFF /absent: no such file; as a commit: "):
        perf_review(["/absent"])


def test_commit_is_compared_with_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="DIFF HEAD: no such file; as a commit: not a git repository"):
        perf_review(["HEAD"])
    path = tmp_path / "src" / "dynamo" / "serving" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("async def f():\n    x = 1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--no-verify", "--message", "first")
    path.write_text("async def f():\n    x = 1\n    time.sleep(1)\n")
    assert perf_review(["HEAD"]) == 0
    assert "src/dynamo/serving/x.py:3  async blocking (significant)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--base absent: no such branch or commit"):
        perf_review(["--base", "absent"])
