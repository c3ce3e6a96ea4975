"""`clone_inventory.py` with the invocations that its skill documents."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
SKILL = ROOT / ".agents" / "contributor-skills" / "dynamo-clone-hotpath-audit"
SOURCES = {
    "lib/llm/src/backend.rs": "fn process() { for a in b { g(&a.name.clone()); } }\n",
    "lib/llm/src/backend/x.rs": "fn f() { g(self.sender.clone()); }\n",
    "lib/kv-router/src/scheduling/q.rs": "fn select() { let k = key.clone(); use_it(k); }\n",
    "src/dynamo/serving/x.py": "def step(y):\n    return list(y)\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(SKILL, tmp_path / SKILL.relative_to(ROOT))
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(tree: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    script = SKILL / "scripts" / "clone_inventory.py"
    return subprocess.run([sys.executable, script, *argv], check=False, capture_output=True, text=True, cwd=tree)


def test_documented_invocations_print_ranked_rows_and_totals(tree: Path) -> None:
    (block,) = re.findall(r"(?s)```sh\n(.*?)```", (SKILL / "SKILL.md").read_text())
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for line in block.splitlines():
        command = ["bash", "-euc", line]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tree, env={"PATH": path})
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("RANK")
        assert "by bucket: removable" in done.stdout


def test_rows_have_the_documented_columns_and_skip_required_clones(tree: Path) -> None:
    found = json.loads(run(tree, "--only-actionable", "--format", "json").stdout)
    assert [one["site"] for one in found["sites"]] == [
        "lib/llm/src/backend.rs:1",
        "lib/kv-router/src/scheduling/q.rs:1",
    ]
    assert list(found["sites"][0]) == ["rank", "score", "site", "area", "bucket", "snippet", "hint"]
    everything = json.loads(run(tree, "--format", "json").stdout)
    assert everything["buckets"]["required shared ownership"] == 1
    assert run(tree, "--limit", "1", "--format", "markdown").stdout.count("\n| ") == 1


def test_wrong_paths_and_missing_hot_directories_are_named(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "--paths absent: no such file or directory" in run(tree, "--paths", "absent").stderr
    done = run(tmp_path_factory.mktemp("empty"))
    assert (done.returncode, "none of the hot directories exists here" in done.stderr) == (2, True)
