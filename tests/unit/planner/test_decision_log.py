"""Decision log: files that replay by themselves, bounded memory and bounded files."""

from pathlib import Path

import pytest

from dynamo.planner import decision_log
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.record import Start, recorded, replay
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.decision_log import DecisionLog, DecisionSummary
from dynamo.planner.start import prepare_start
from dynamo.protocols.planner import EngineCapabilities, ScalingDecision, TickInput, WorkerCounts

CONFIG = parse({"environment": "virtual", "mode": "agg", "load_adjustment_interval": 1})


def start() -> Start:
    return prepare_start(CONFIG, WorkerCapabilities(decode=EngineCapabilities(num_gpu=1)))


def run(log: DecisionLog, ticks: int) -> None:
    began = start()
    core = began.planner()
    scheduled = core.first_tick(0.0)
    log.begin(began)
    for number in range(ticks):
        if log.is_full:
            log.begin(Start.of(core))
        seen = TickInput(now_s=scheduled.at_s, worker_counts=WorkerCounts(ready_num_decode=1, expected_num_decode=1))
        recording = recorded(core, scheduled, seen)
        log.add(DecisionSummary(tick=number, time="", action="apply"), recording.tick)
        scheduled = core.next_tick(scheduled, scheduled.at_s)


def test_every_file_replays_to_the_same_decisions(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path / "new"), file_bytes=8000)
    run(log, 30)
    files = sorted((tmp_path / "new").glob("planner-ticks-*.jsonl"))
    assert len(files) > 2
    assert log.path == files[-1]
    replayed = [list(replay(file.read_bytes().splitlines())) for file in files]
    assert sum(map(len, replayed)) == 30
    assert all(bytes(tick.decision) == decision for file in replayed for tick, decision in file)


def test_oldest_files_of_a_run_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "FILES_MAX", 2)
    run(DecisionLog(str(tmp_path), file_bytes=1), 5)
    assert [file.name[-10:] for file in sorted(tmp_path.iterdir())] == ["0004.jsonl", "0005.jsonl"]


def test_last_decisions_are_kept_in_memory_only() -> None:
    log = DecisionLog(kept=3)
    run(log, 10)
    assert [one.tick for one in log.recent()] == [7, 8, 9]
    assert [one.tick for one in log.recent(1)] == [9]
    assert log.path is None


def test_directory_that_cannot_be_written_ends_the_file_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    log = DecisionLog(str(tmp_path / "file"))
    run(log, 3)
    assert log.path is None
    assert len([one for one in caplog.records if "decision log ends" in one.message]) == 1


def test_summary_is_one_line() -> None:
    summary = DecisionSummary(
        tick=3, time="", action="apply", load_reason="scale_up", throughput_reason="disabled",
        scale_to=ScalingDecision(num_decode=2), outcome="held", message="decision 1 is pending", unknown=["traffic: x"],
    )  # fmt: skip
    assert summary.line == (
        "tick 3: decode 2 (load scale_up, throughput disabled); held: decision 1 is pending; unknown: traffic: x"
    )
