"""Processes of SGLang: who lives, and who is told that one does not."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.sglang.processes import check_alive, sigquit_handler, state_of


def test_a_process_that_has_ended_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It has ended, and nobody has asked for it yet.
    check_alive([os.getpid()])
    with pytest.raises(RuntimeError, match=str(child.pid)):
        check_alive([os.getpid(), child.pid])
    child.wait()


def test_a_name_with_a_bracket_in_it_hides_no_state(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) R (b) Z 1 2 3")
    assert state_of(7, tmp_path) == "Z"
    assert state_of(8, tmp_path) is None


async def test_a_failed_child_is_told_by_a_signal() -> None:
    told = asyncio.Event()
    with sigquit_handler(asyncio.get_running_loop(), told.set) as listen:
        listen()
        os.kill(os.getpid(), signal.SIGQUIT)
        async with asyncio.timeout(30):
            await told.wait()
