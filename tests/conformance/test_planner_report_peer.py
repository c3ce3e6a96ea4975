"""Reports compared with the released planner's: the same snapshots give the same files, log rows, panels, traces and title.

The time axis differs: ours has dates, the released one the time of day, which is ambiguous in a report of a whole day.
"""

import asyncio
import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conformance.planner_cases import released

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.reasons import LoadReason, ThroughputReason
from dynamo.planner.reports.charts import figure
from dynamo.planner.reports.recorder import ReportRecorder
from dynamo.planner.reports.snapshots import TickSnapshot

pytestmark = pytest.mark.conformance


def engines(rng: random.Random, kind: str) -> list[dict[str, Any]]:
    return [
        {
            "worker_id": f"{kind}{number}",
            "dp_rank": 0,
            "queued_prefill_tokens": rng.randint(0, 99),
            "queued_decode_kv_tokens": rng.randint(0, 99),
            "inflight_decode_kv_tokens": rng.randint(0, 99),
        }
        for number in range(rng.randint(0, 3))
    ]


def snapshot_row(rng: random.Random, time_s: float, *, has_roles: bool) -> dict[str, Any]:
    """Return the fields of a snapshot."""
    row: dict[str, Any] = {}
    for field in msgspec.structs.fields(TickSnapshot):
        name = field.name
        if field.type == (int | None):
            row[name] = rng.choice([None, 0, 1, 2, 5])
        elif field.type == (float | None):
            row[name] = rng.choice([None, round(rng.uniform(0, 900), 3)])
        elif "reason" in name:
            kind = LoadReason if "load" in name else ThroughputReason
            is_role = name.endswith(("prefill", "decode"))
            row[name] = rng.choice(list(kind)).value if has_roles or not is_role else None
    return {
        **row,
        "timestamp_s": time_s,
        "gpu_hours": time_s / 1e9,
        "prefill_engines": engines(rng, "p"),
        "decode_engines": engines(rng, "d"),
    }


def report_case(rng: random.Random) -> dict[str, Any]:
    has_roles = rng.random() < 0.5
    config = {
        "mode": "disagg",
        "environment": "virtual",
        "optimization_target": "sla",
        "ttft_ms": rng.choice([300.0, 500.0]),
    }
    if rng.random() < 0.3:
        config["report_filename"] = rng.choice(["today.html", "today", "TODAY.HTML"])
    rows = [snapshot_row(rng, 1_790_000_000.0 + 5 * tick, has_roles=has_roles) for tick in range(rng.randint(1, 12))]
    return {"config": config, "snapshots": rows, "max_kv_tokens": rng.choice([None, 4096])}


def ours(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    config = parse({**case["config"], "report_output_dir": str(directory)})
    snapshots = [msgspec.convert(one, TickSnapshot) for one in case["snapshots"]]
    recorder = ReportRecorder(config)

    async def write() -> None:
        for one in snapshots:
            await recorder.record(one)
        await recorder.close()

    asyncio.run(write())
    drawn = figure(snapshots, config, case["max_kv_tokens"])
    (log,) = directory.glob("*.gz")
    with gzip.open(log, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {
        "names": sorted({*(one.name for one in directory.iterdir())}),
        "rows": rows,
        "title": drawn["layout"]["title"]["text"],
        "notes": sorted(one["text"] for one in drawn["layout"]["annotations"]),
        "traces": sorted([one["name"], one["y"], one.get("text")] for one in drawn["data"]),
    }


def test_report_files_equal_the_released_ones(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rng = random.Random(11)
    given = [report_case(rng) for _ in range(12)]
    for number, (case, expected) in enumerate(zip(given, released("report", given), strict=True)):
        found = ours(case, tmp_path / str(number))
        for rows in (found["rows"], expected["rows"]):
            for name in ("generated_at_utc", "html_report_path"):
                assert isinstance(rows[0].pop(name), str)
        for name, value in expected.items():
            assert found[name] == value, name
