"""`dynamo-run` with a file of prompts: it starts a server, answers each line, and ends all processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.processes import DEADLINE_S

pytestmark = pytest.mark.integration


def run(tmp_path: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dynamo.cli.dynamo_run", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "TMPDIR": str(tmp_path), "DYN_FILE_KV": ""},
    )


def test_batch_completes_and_the_server_ends(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"text": "What is Dynamo?"}\n{"text": "2 + 3"}\n')
    done = run(tmp_path, f"in=batch:{prompts}", "out=cpu")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert [bool(one["response"]) for one in answers] == [True, True]
    assert list(tmp_path.glob("dynamo-serve-*")) == []


def test_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "in=text", "out=cpu", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "no such directory" in done.stderr
    assert "dynamo serve ended with status 2 before it was ready" in done.stderr
