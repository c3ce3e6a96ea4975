"""`dynamo pr-review --run` as a process: it launches a graph, tests it, loads it and writes a draft."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.integration.clients import environments
from tests.integration.clients.test_clients import in_its_own

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

DYNAMO = [sys.executable, "-m", "dynamo.cli"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git working tree without modifications."""
    for words in (["init", "-q", "-b", "change"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def review(folder: Path, *argv: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit status, the rows by check, and the draft."""
    ports = ["--http-port", str(free_port()), "--system-port", str(free_port())]
    command = [*DYNAMO, "pr-review", "7", "--run", "--gpus", "0", "--json", *ports, *argv]
    environment = {**os.environ, "TMPDIR": str(folder), "DYN_FILE_KV": "", **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)["rows"]}
    drafts = list((folder / "dynamo-pr-reviews").glob("7-*/review.md"))
    return done.returncode, rows, drafts[0].read_text() if drafts else ""


def test_run_of_a_graph_that_serves_passes_and_its_draft_has_the_results(checkout: Path) -> None:
    status, rows, draft = review(
        checkout, "--engine", "cpu", "--model", "", "--aiperf", "no-such-aiperf", "--repeats", "1"
    )
    assert status == 0, rows
    assert rows["checkout"]["evidence"].startswith("change ")
    for check in ("readiness", "structure", "streaming", "normal request", "frontend metrics", "worker metrics", "log"):
        assert rows[check]["status"] == "PASS", rows[check]
    assert rows["load"]["status"] == "SKIP"
    assert "**Verdict:** Comment" in draft
    assert "| E2E streaming | PASS: " in draft
    assert "| 7 |" in (checkout / "dynamo-pr-reviews" / "INDEX.md").read_text()
    assert (checkout / "dynamo-pr-reviews" / "7-artifacts" / "serve.log").exists()


def test_run_stops_at_a_failure_of_the_launch_and_at_a_modified_checkout(checkout: Path) -> None:
    status, rows, draft = review(checkout, "--engine", "mocker", "--model", "/nonexistent/model")
    assert (status, rows["readiness"]["evidence"]) == (1, "error: model /nonexistent/model: no such directory")
    assert "structure" not in rows
    assert "**Verdict:** Request changes" in draft
    (checkout / "file").write_text("a")
    subprocess.run(["git", "add", "file"], cwd=checkout, check=True, timeout=30)
    status, rows, _ = review(checkout, "--engine", "mocker", "--model", "")
    assert (status, rows["checkout"]["evidence"]) == (1, "tracked files are modified: file")
    assert "readiness" not in rows


@pytest.mark.clients
@in_its_own("aiperf")
def test_load_of_a_run_is_measured_by_aiperf(checkout: Path) -> None:
    aiperf = str(environments.HOME / "aiperf" / "bin" / "aiperf")
    with tempfile.TemporaryDirectory(
        prefix="pr-"
    ) as short:  # aiperf's sockets are in it; the length of their paths is limited.
        status, rows, draft = review(
            checkout, "--engine", "cpu", "--model", DEMO_MODEL, "--aiperf", aiperf, "--tokenizer", DEMO_MODEL,
            "--requests", "24", "--concurrency", "4", "--repeats", "1", TMPDIR=short,
        )  # fmt: skip
    assert status == 0, rows
    assert rows["load"]["evidence"].startswith("24 requests, ")
    assert "| load | PASS: 24 requests" in draft
