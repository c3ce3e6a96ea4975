"""Sweep: combinations, constraints and the best result."""

from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay import sweep
from dynamo.replay.sweep import SweepConfig, best, front, main

LOAD = ["--input-tokens=600", "--output-tokens=20", "--request-count=60", "--request-rate=20"]
KNOBS = ["--knob=num_workers=1,2", "--knob=router_mode=kv_router", "--knob=prefill_load_scale=1,32"]


def row(workers: int, latency: float, met: float | None = None) -> dict[str, Any]:
    summary = {"mean_e2e_latency_ms": latency} | ({} if met is None else {"sla_met_ratio": met})
    return {"workers": workers, "summary": summary, "knobs": {}}


def test_sweep_runs_every_combination() -> None:
    found = SweepConfig(knob=["num_workers=1", "2", "router_mode=kv_router", "balanced"]).combinations()
    assert len(found) == 4
    assert {"num_workers": 2, "router_mode": "balanced"} in found


def test_pareto_front_contains_only_undominated_runs() -> None:
    rows = [row(1, 90.0), row(2, 50.0), row(2, 60.0), row(4, 55.0), row(8, 40.0)]
    assert [(one["workers"], one["summary"]["mean_e2e_latency_ms"]) for one in front(rows)] == [
        (1, 90),
        (2, 50),
        (8, 40),
    ]


def test_best_run_meets_the_objectives_with_the_fewest_workers() -> None:
    rows = [row(1, 90.0, 0.5), row(2, 50.0, 0.99), row(8, 40.0, 1.0)]
    assert best(rows, 0.99) is rows[1]
    assert best(rows[:1], 0.99) is None
    assert best([row(1, 90.0), row(8, 40.0)], 0.99) == row(8, 40.0)


def test_sweep_command_prints_the_flags_and_reuses_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    flags = [*LOAD, *KNOBS, f"--results={results}", f"--report-html={page}", "--sla-ttft-ms=5000"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "Best: " in text
    assert "--router-mode=kv_router" in text
    assert len(results.read_text().splitlines()) == 4
    assert "<svg" in page.read_text()
    monkeypatch.setattr(sweep, "run", lambda task: pytest.fail("it was run again"))
    assert main(flags) == 0


def test_unattainable_objectives_are_a_failure() -> None:
    assert main([*LOAD, "--knob=num_workers=1", "--sla-ttft-ms=0.001"]) == 1


@pytest.mark.parametrize("knobs", [[], ["--knob=num_workers"], ["--knob=num_workers=1", "--jobs=0"], ["--knob=a=1"]])
def test_invalid_sweep_knobs_are_refused(knobs: list[str]) -> None:
    with pytest.raises(ConfigError):
        main([*LOAD, "--router-mode=kv_router", *knobs])
