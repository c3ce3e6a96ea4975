"""Graphs of this machine: records are those of this user alone, and a signal reaches no other process."""

import fcntl
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops import graphs
from dynamo.ops.graphs import (
    DEFAULT_URL,
    RECORD,
    RECORD_BYTES_MAX,
    GraphRecord,
    GraphState,
    RecordedProcess,
    find_graphs,
    forget_failed_start,
    is_alive,
    record_failed_start,
    select,
    send_stop,
    server_url,
    start_ticks,
    write_record,
)


def record(name: str = "g", **fields: object) -> GraphRecord:
    values = {
        "name": name,
        "state": GraphState.SERVING,
        "pid": os.getpid(),
        "ticks": start_ticks(os.getpid()),
        "url": "http://localhost:8000",
        "engine": "cpu",
        "started": 1.0,
        "processes": [RecordedProcess(name="worker-1", pid=os.getpid(), ticks=0, module="dynamo.cpu")],
        **fields,
    }
    return GraphRecord(**values)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The directory of a graph that runs."""
    made = tmp_path / "dynamo-serve-a"
    (made / "logs").mkdir(parents=True)
    made.chmod(0o700)
    with open(made / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield made


def test_graph_that_runs_is_found_with_its_record(home: Path, tmp_path: Path) -> None:
    write_record(home / "logs", record())
    (found,) = find_graphs(str(tmp_path))
    assert found.is_running
    assert found.record == record()
    assert (home / "logs" / RECORD).stat().st_mode & 0o077 == 0


def test_graph_without_its_lock_or_its_process_has_ended(tmp_path: Path) -> None:
    ended = tmp_path / "dynamo-serve-b"
    (ended / "logs").mkdir(parents=True)
    ended.chmod(0o700)
    (ended / "lock").touch()
    write_record(ended / "logs", record())
    (found,) = find_graphs(str(tmp_path))
    assert not found.is_running


@pytest.mark.parametrize("fault", ["others can enter", "link", "too long", "not JSON", "fifo"])
def test_record_writable_by_others_is_ignored(home: Path, tmp_path: Path, fault: str) -> None:
    write_record(home / "logs", record())
    path = home / "logs" / RECORD
    if fault == "others can enter":
        home.chmod(0o755)
    elif fault == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif fault == "too long":
        path.write_bytes(b" " * (RECORD_BYTES_MAX + 1))
    elif fault == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_text("{")
    assert find_graphs(str(tmp_path)) == []


def test_graph_is_selected_by_name_port_or_directory(home: Path, tmp_path: Path) -> None:
    write_record(home / "logs", record("one"))
    graphs = find_graphs(str(tmp_path))
    for name in (None, "one", "8000", home.name, str(home)):
        assert select(graphs, name) is graphs[0]
    with pytest.raises(ConfigError, match="two: no such graph of dynamo serve on this machine; known: one"):
        select(graphs, "two")
    with pytest.raises(ConfigError, match=r"NAME is missing: expected one of one \(port 8000\), one"):
        select(graphs * 2, None)
    with pytest.raises(ConfigError, match="one: 2 graphs run with this name; give the port instead: 8000, 8000"):
        select(graphs * 2, "one")


def test_running_graph_is_selected_before_those_that_ended_with_its_name(home: Path, tmp_path: Path) -> None:
    write_record(home / "logs", record("one"))
    (running,) = find_graphs(str(tmp_path))
    assert running.is_running
    ended = msgspec.structs.replace(running, is_running=False)
    older = msgspec.structs.replace(running, is_running=False)
    for name in ("one", "8000", None):
        assert select([ended, running, older], name) is running
    assert select([ended, older], "one") is ended
    with pytest.raises(ConfigError, match=r"NAME is missing: expected one of one \(port 8000\), one"):
        select([ended, older], None)


def test_without_a_server_at_the_default_url_the_only_graph_is_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(graphs, "_is_listening", lambda url: False)
    assert server_url(DEFAULT_URL) == DEFAULT_URL
    write_record(home / "logs", record(url="http://localhost:9"))
    assert server_url(DEFAULT_URL) == "http://localhost:9"
    assert capsys.readouterr().err == f"no server at {DEFAULT_URL}; using the graph at http://localhost:9\n"
    assert server_url("http://other:1") == "http://other:1"
    other = tmp_path / "dynamo-serve-b"
    (other / "logs").mkdir(parents=True)
    other.chmod(0o700)
    with open(other / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_record(other / "logs", record(url="http://localhost:7"))
        with pytest.raises(ConfigError, match="2 graphs run: name one of http://localhost:7, http://localhost:9"):
            server_url(DEFAULT_URL)
        monkeypatch.setattr(graphs, "_is_listening", lambda url: True)
        assert server_url(DEFAULT_URL) == DEFAULT_URL


def test_process_is_identified_by_its_start_time() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks > 0
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks + 1)
    assert start_ticks(2**30) == 0


def test_signal_is_not_sent_to_a_process_that_took_the_id() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        assert not send_stop(record(ticks=start_ticks(os.getpid()) + 1), signal.SIGUSR1)
        assert received == []
        assert send_stop(record(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not send_stop(record(pid=2**22 - 1, ticks=5))


def test_failed_start_is_kept_without_secrets_until_a_graph_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record_failed_start("dynamo serve x --api-key secret-1", "model x: no such directory")
    (log,) = tmp_path.glob("dynamo-failed-*/logs/dynamo-serve.log")
    assert log.read_text().splitlines()[1] == "error: model x: no such directory"
    assert "secret-1" not in log.read_text()
    assert [log.stat().st_mode & 0o077, log.parents[1].stat().st_mode & 0o077] == [0, 0]
    forget_failed_start()
    assert list(tmp_path.iterdir()) == []


def test_failed_start_on_a_machine_without_space_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    record_failed_start("dynamo serve", "full")
    forget_failed_start()
    assert list(tmp_path.iterdir()) == []
