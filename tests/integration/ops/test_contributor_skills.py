"""Skills for contributors: their documented command lines, run as written, in the order of the workflow."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SKILLS = Path(__file__).resolve().parents[3] / ".agents" / "contributor-skills"
BIN = Path(sys.executable).parent


def run_blocks(skill: str, folder: Path) -> str:
    """Run the shell blocks of a skill in a directory and return their output."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", (SKILLS / skill / "SKILL.md").read_text())
    assert blocks
    done = subprocess.run(
        ["bash", "-euc", "\n".join(blocks)],
        check=False, capture_output=True, text=True, cwd=folder, timeout=60, env={"PATH": f"{BIN}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_session_is_recorded_from_hypothesis_to_root_cause(tmp_path: Path) -> None:
    run_blocks("debug-session", tmp_path)
    text = (tmp_path / "notes" / "router-hangs-at-start.md").read_text()
    assert "Status: root-caused" in text
    log = text.partition("## Investigation Log")[2].partition("## Root Cause")[0]
    assert [line.partition(":")[0] for line in log.splitlines() if line.startswith("- ")] == [
        "- Hypothesis",
        "- Test",
        "- Result",
    ]


def test_proposal_is_written_and_moves_to_review_with_its_labels(tmp_path: Path) -> None:
    assert "labels: area:router,dep,dep:draft" in run_blocks("dep-create", tmp_path)
    assert "labels: area:router,dep,dep:under-review" in run_blocks("dep-update", tmp_path)
    text = (tmp_path / "deps" / "0000-faster-router.md").read_text()
    assert "**Status**: Under Review" in text
    assert "## Requirements" in text
