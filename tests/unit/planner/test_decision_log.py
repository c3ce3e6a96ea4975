"""Decision log: decisions in memory, segments of files, and failures to write."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dynamo.planner import decision_log
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore
from dynamo.planner.core.record import Start, Tick, recorded, replay
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.decision_log import DecisionLog, DecisionSummary
from dynamo.protocols.planner import ScalingDecision, TickInput

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def summary(number: int, **more: object) -> DecisionSummary:
    return DecisionSummary(tick=number, time="2026-01-02T03:04:05Z", action="none", **more)  # type: ignore[arg-type]


def start() -> Start:
    return Start(config=parse({}).as_json(), capabilities=WorkerCapabilities())


def ticks(count: int) -> list[Tick]:
    core = start().planner()
    return [tick_of(core, number * 5.0) for number in range(1, count + 1)]


def tick_of(core: PlannerCore, now_s: float) -> Tick:
    return recorded(core, core.first_tick(now_s - 5.0), TickInput(now_s=now_s)).tick


def test_recent_decisions_are_bounded_and_the_newest_is_last() -> None:
    log = DecisionLog(kept=3)
    for number in range(5):
        log.add(summary(number), None)
    assert [one.tick for one in log.recent()] == [2, 3, 4]
    assert [one.tick for one in log.recent(2)] == [3, 4]
    assert log.recent(0) == []
    assert log.path is None


def test_files_of_a_run_replay_to_the_same_decisions(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path / "new"), segment_bytes=1500)
    log.begin(start(), BEGAN)
    written = ticks(3)
    for number, tick in enumerate(written):
        log.add(summary(number), tick)
    files = sorted((tmp_path / "new").iterdir())
    assert files[0].name == "planner-ticks-20260102T030405.000000Z-000.jsonl"
    assert len(files) > 1 and log.path == files[-1]
    lines = b"".join(file.read_bytes() for file in files).splitlines()
    assert [found for _, found in replay(lines)] == [bytes(tick.decision) for tick in written]


def test_log_ends_after_the_last_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "SEGMENTS_MAX", 2)
    log = DecisionLog(str(tmp_path), segment_bytes=1)
    log.begin(start(), BEGAN)
    for number, tick in enumerate(ticks(3)):
        log.add(summary(number), tick)
    assert len(list(tmp_path.iterdir())) == 2
    assert log.path is None and len(log.recent()) == 3


def test_directory_that_cannot_be_written_ends_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = DecisionLog(str(tmp_path / "file"))
    log.begin(start(), BEGAN)
    log.add(summary(1), ticks(1)[0])
    assert log.path is None and len(log.recent()) == 1


def test_line_names_the_target_the_outcome_and_what_is_unknown() -> None:
    held = summary(4, load_reason="a", throughput_reason="b")
    assert held.line == "tick 4: no change (load a, throughput b)"
    scale_to = ScalingDecision(num_decode=2)
    scaled = summary(5, load_reason="a", throughput_reason="b", scale_to=scale_to, outcome="held", message="why")
    assert scaled.line == "tick 5: decode 2 (load a, throughput b); held: why"
    assert summary(6, unknown=["steps: x"]).line.endswith("; unknown: steps: x")
