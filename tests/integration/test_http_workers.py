"""Processes that share a port, started and ended by one."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dynamo.frontend.workers import HttpWorkers

pytestmark = pytest.mark.integration

LIVE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"


def script(tmp_path: Path, text: str) -> list[str]:
    """Return a script that records its start in a file, then executes its arguments."""
    log = tmp_path / "log"
    head = f"import os; open({str(log)!r}, 'a').write(os.environ['DYN_HTTP_WORKER_INDEX'] + os.linesep);"
    return [sys.executable, "-c", head + text]


def stop_after_starts(tmp_path: Path, count: int) -> threading.Thread:
    """Send this process a stop signal once workers have started that many times."""
    log = tmp_path / "log"

    def run() -> None:
        deadline_s = time.monotonic() + 60
        while (not log.exists() or len(log.read_text().split()) < count) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def starts(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "log").read_text().split())


def test_all_workers_are_started_and_end_on_a_stop_signal(tmp_path: Path) -> None:
    workers = HttpWorkers(script(tmp_path, LIVE), 2, drain_s=30)
    folder = workers._folder.path
    stopping = stop_after_starts(tmp_path, 2)
    assert workers.run() == 0
    stopping.join()
    assert starts(tmp_path) == ["0", "1"]
    assert [workers._supervisor.pid(name) for name in ("0", "1")] == [None, None]
    assert os.path.basename(folder) not in os.listdir(os.path.dirname(folder))


def test_worker_that_ends_is_restarted(tmp_path: Path) -> None:
    stopping = stop_after_starts(tmp_path, 2)
    assert HttpWorkers(script(tmp_path, "os._exit(1)"), 1, drain_s=30).run() == 0
    stopping.join()
    assert starts(tmp_path)[:2] == ["0", "0"]


def test_invalid_configuration_of_a_worker_ends_all_with_its_status(tmp_path: Path) -> None:
    assert HttpWorkers(script(tmp_path, "os._exit(2)"), 2, drain_s=30).run() == 2
