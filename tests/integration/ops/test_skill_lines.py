"""Skills for operators: their documented command lines that need no cluster, run as written except for the names in capitals."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
SKILLS = ROOT / ".agents" / "skills"
BIN = Path(sys.executable).parent
NAMES = {"NAMESPACE": "team", "CLASS": "fast", "TAG": "1.6.1", "NAME": "qwen3-0.6b/vllm/agg"}
GRAPH = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: g}
spec: {components: [{name: Frontend, type: frontend, replicas: 1}]}
"""


def documented(skill: str, beginning: str) -> list[str]:
    """Return the lines of a skill's shell blocks with this beginning, with names in place of capitals."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", (SKILLS / skill / "SKILL.md").read_text())
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(beginning)]
    return [re.sub(r"\b[A-Z]{3,}\b", lambda word: NAMES.get(word[0], word[0]), line) for line in lines]


@pytest.mark.parametrize(
    ("skill", "beginning", "count", "text"),
    [
        ("dynamo-recipe-runner", "scripts/recipe_tool.py list", 2, "llama-3-70b"),
        ("dynamo-recipe-runner", "dynamo recipe patch", 1, ""),
        (
            "dynamo-recipe-runner",
            "dynamo recipe run NAME --namespace NAMESPACE --storage-class CLASS --dry-run",
            1,
            "apply Job",
        ),
        ("dynamo-router-starter", "dynamo router patch", 1, ""),
    ],
)
def test_lines_run_as_documented(tmp_path: Path, skill: str, beginning: str, count: int, text: str) -> None:
    lines = documented(skill, beginning)
    assert len(lines) == count
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(SKILLS / skill / "scripts", tmp_path / "scripts")
    (tmp_path / "graph.yaml").write_text(GRAPH)
    for line in lines:
        done = subprocess.run(
            ["bash", "-euc", line],
            check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60, env={"PATH": f"{BIN}:/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}{done.stdout}"
        assert text in done.stdout + done.stderr
