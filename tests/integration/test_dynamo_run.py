"""`dynamo-run` with a file of prompts: it starts a server, answers each line, and ends all processes."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.processes import DEADLINE_S, ProcessGroup, wait_until

pytestmark = pytest.mark.integration


def run(tmp_path: Path, *argv: str, prompt: str = "", kv: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dynamo.cli.dynamo_run", *argv],
        check=False,
        input=prompt,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "TMPDIR": str(tmp_path), "DYN_FILE_KV": kv},
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


def test_standard_input_is_one_prompt_and_the_simulated_engine_has_a_limit(tmp_path: Path) -> None:
    done = run(tmp_path, "in=stdin", "out=mocker", "--speedup-ratio", "0", prompt="one line\n/and another\n")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True)
    assert done.stderr in ("", "starting mocker\n"), "a start of more than two seconds is reported"


def test_chat_with_workers_of_other_processes(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path)
    group.start(
        "worker", [sys.executable, "-m", "dynamo.cli.dynamo_run", "in=dyn://dynamo.backend.generate", "out=cpu"]
    )
    try:
        done = run(tmp_path, "out=auto", prompt="What is Dynamo?\n", kv=str(tmp_path / "kv"))
    finally:
        group.stop()
    assert done.returncode == 0, done.stderr
    assert "serving large language models" in done.stdout


class Chat:
    """`dynamo-run` in a pseudo terminal."""

    def __init__(self, tmp_path: Path, *argv: str) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            variables = {**os.environ, "TMPDIR": str(tmp_path), "DYN_FILE_KV": ""}
            os.execve(sys.executable, [sys.executable, "-m", "dynamo.cli.dynamo_run", *argv], variables)
        self.output = b""

    def until(self, words: bytes, after: int = 0) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.output[after:]:
            assert time.monotonic() < deadline, self.output
            ready, _, _ = select.select([self.terminal], [], [], 1.0)
            if ready:
                self.output += os.read(self.terminal, 65536)

    def ends(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        with contextlib.suppress(OSError):  # The terminal is closed with its process.
            while time.monotonic() < deadline:
                if select.select([self.terminal], [], [], 1.0)[0]:
                    self.output += os.read(self.terminal, 65536)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_during_the_start_ends_it(tmp_path: Path) -> None:
    chat = Chat(tmp_path, "out=auto")
    chat.until(b"waiting for a worker")
    os.write(chat.terminal, b"\x03")
    assert chat.ends() == 130
    assert b"Traceback" not in chat.output


def test_killed_command_leaves_no_server(tmp_path: Path) -> None:
    chat = Chat(tmp_path, "out=mocker")
    chat.until(b"> ")
    [directory] = tmp_path.glob("dynamo-serve-*")
    os.kill(chat.pid, signal.SIGKILL)
    os.waitpid(chat.pid, 0)
    os.close(chat.terminal)
    wait_until(lambda: not directory.exists(), "the server runs on")
