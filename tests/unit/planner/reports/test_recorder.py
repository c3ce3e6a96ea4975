"""Report recorder: cadence, files, and the live page."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.asgi import request

from dynamo.planner.config.planner_config import parse
from dynamo.planner.reports import recorder as module
from dynamo.planner.reports.recorder import ReportRecorder, log_path
from dynamo.planner.reports.snapshots import TickSnapshot

START_S = 1_790_000_000.0


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the number of snapshots only: the test requires no extra."""
    monkeypatch.setattr(module, "page", lambda snapshots, *rest: f"<head></head>{len(snapshots)} ticks")


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def log_kinds(report: Path) -> list[str]:
    with gzip.open(log_path(report), "rt") as file:
        return [json.loads(line)["kind"] for line in file]


def recorder(directory: Path, **settings: Any) -> ReportRecorder:
    return ReportRecorder(parse({"environment": "virtual", "report_output_dir": str(directory), **settings}))


async def test_report_is_written_when_its_interval_has_passed(tmp_path: Path) -> None:
    made = recorder(tmp_path, report_interval_hours=1)
    assert await made.record(TickSnapshot(timestamp_s=START_S)) is None
    path = await made.record(TickSnapshot(timestamp_s=START_S + 3600))
    assert path == str(tmp_path / "planner_report_20260921_151320_001.html")
    assert log_kinds(Path(path)) == ["metadata", "snapshot", "snapshot"]
    await made.record(TickSnapshot(timestamp_s=START_S + 3605))
    await made.close()
    assert names(tmp_path)[-1] == "planner_report_20260921_151325_002.log.jsonl.gz"


async def test_recorder_without_a_report_interval_writes_no_file_and_serves_a_live_page(tmp_path: Path) -> None:
    made = recorder(tmp_path, report_interval_hours=None)
    application = made.routes().application()
    assert "No tick yet" in (await request(application, "GET", "/")).text
    for tick in range(3):
        await made.record(TickSnapshot(timestamp_s=START_S + tick * 1e6))
    response = await request(application, "GET", "/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == '<head><meta http-equiv="refresh" content="30"></head>3 ticks'
    await made.close()
    assert names(tmp_path) == []


async def test_directory_that_cannot_be_written_is_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    made = recorder(tmp_path / "file" / "reports")
    await made.record(TickSnapshot(timestamp_s=START_S))
    with caplog.at_level(logging.ERROR):
        assert await made.write() is None
    (error,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert error.startswith("failed to write report ")


async def test_recorder_without_reports_and_dashboard_keeps_no_snapshots(tmp_path: Path) -> None:
    made = recorder(tmp_path, report_interval_hours=None, live_dashboard_port=0)
    await made.record(TickSnapshot(timestamp_s=START_S))
    assert "No tick yet" in await made.live_page()
