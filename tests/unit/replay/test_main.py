"""The command: flags to reports."""

import json
from pathlib import Path

import pytest

from dynamo.cli.__main__ import run
from dynamo.core.errors import ConfigError
from dynamo.replay.config import failure
from dynamo.replay.main import main

LOAD = ["--input-tokens=600", "--output-tokens=20", "--request-count=60", "--request-rate=20", "--num-workers=2"]


def test_summary_table_shows_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LOAD) == 0
    text = capsys.readouterr().out
    for words in ("Time to First Token (ms)", "Inter Token Latency (ms)", "Request Count", "Prefix Cache Reused Ratio"):
        assert words in text


def test_reports_are_written_and_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        flags = [f"--report-{kind}={tmp_path / name}.{kind}" for kind in ("json", "jsonl", "html")]
        assert main([*LOAD, "--router-mode=kv_router", "--telemetry", "--sla-ttft-ms=100", *flags]) == 0
    for kind in ("json", "jsonl", "html"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
    report = json.loads((tmp_path / "one.json").read_bytes())
    assert set(report) == {"summary", "per_request", "coverage", "planner", "telemetry"}
    assert report["summary"]["completed_requests"] == 60
    assert 0 < report["summary"]["sla_met_ratio"] <= 1
    assert report["summary"]["mean_itl_ms"] == pytest.approx(
        sum(json.loads(line)["itl_ms"] for line in (tmp_path / "one.jsonl").read_text().splitlines()) / 60
    )


def test_telemetry_contains_all_output_tokens(tmp_path: Path) -> None:
    main([*LOAD, "--telemetry", f"--report-json={tmp_path / 'r.json'}"])
    samples = json.loads((tmp_path / "r.json").read_bytes())["telemetry"]["samples"]
    assert sum(sum(one["output_tokens"]) for one in samples) == 60 * 20
    assert sum(sum(one["prefill_tokens"]) for one in samples) == 60 * 600


def test_modes_are_compared_in_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    main([*LOAD, "--compare=kv_router:prefill_load_scale=4", "--compare=balanced", f"--report-html={page}"])
    assert "kv_router:prefill_load_scale=4" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg") == 15
    assert "http" not in text, "the page needs something from elsewhere"


def test_dynamo_command_has_a_replay_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay"]) == 0
    assert "dynamo replay TRACE.jsonl" in capsys.readouterr().out
    assert run(["replay", *LOAD]) == 0


def test_replay_subcommands_include_the_trace_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    assert run(["replay", "sin-synth", "--time-duration=3", f"--output-file={trace}"]) == 0
    assert run(["replay", "datagen", "analyze", f"--input-file={trace}"]) == 0
    assert run(["replay", str(trace), "--num-workers=2"]) == 0
    assert "theoretical_hit_rate" in capsys.readouterr().out


def test_failure_flags_are_parsed() -> None:
    found = failure("3@60+2.5")
    assert (found.slot, found.at_ms, found.restart_ms) == (3, 60_000, 2500)
    assert failure("0@1").restart_ms is None


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["trace.jsonl", "--input-tokens=9"],
        ["--input-tokens=9", "--output-tokens=9", "--request-count=9"],
        [*LOAD, "--replay-concurrency=4"],
        [*LOAD, "--router-mode=best"],
        [*LOAD, "--router-mode=kv", '--router-config={"speed": 1}'],
        [*LOAD, "--router-mode=kv", '--router-config={"overlap_score_credit": "much"}'],
        [*LOAD, '--extra-engine-args={"block_size": 0}'],
        [*LOAD, '--extra-engine-args={"blocks": 1}'],
        [*LOAD, "--extra-engine-args=@nowhere.json"],
        [*LOAD, "--extra-engine-args=["],
        [*LOAD, "--fail=one@two"],
        [*LOAD, "--fail=9@1"],
        [*LOAD, "--worker-speed=1=0"],
        [*LOAD, "--worker-speed=fast"],
        [*LOAD, "--request-overhead-ms=-1"],
        [*LOAD, "--kv-event-lag-ms=5"],
        [*LOAD, "--num-workers=0"],
        [*LOAD, "--report-json=/nowhere/at/all.json"],
    ],
)
def test_invalid_replay_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(flags)
