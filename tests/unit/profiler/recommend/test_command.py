import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.core.errors import ConfigError
from dynamo.profiler.recommend.command import recommend
from dynamo.profiler.recommend.simulation import DeploymentSimulator, SimulatedResult

SMALL = ["Qwen/Qwen3-8B", "--gpu", "h100_sxm", "--gpus", "4", "--isl", "1000", "--osl", "60", "--requests", "60"]


def run(directory: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = recommend([*SMALL, "--output-dir", str(directory), *more])
    found: dict[str, Any] = json.loads((directory / "recommendation.json").read_text())
    return code, found


def test_result_meets_the_objectives_and_is_written_in_all_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path, "--request-rate", "6")
    assert code == 0
    assert found["meets_objectives"]
    assert found["recommended"]["met_share"] >= 0.95
    assert found["recommended"]["gpus"] == min(one["gpus"] for one in found["results"] if one["met_share"] >= 0.95)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        "recommendation.json", "pareto.html", "launch.sh", "compose.yaml", "graph.yaml", "rehearsal.yaml", "mocker",
    }  # fmt: skip
    assert yaml.safe_load((tmp_path / "graph.yaml").read_text())["kind"] == "DynamoGraphDeployment"
    text = capsys.readouterr().out
    assert "Recommended:" in text
    assert "This assumes:" in text


def test_unattainable_objectives_are_reported_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path, "--request-rate", "6", "--ttft", "5", "--itl", "1")
    assert code == 1
    assert not found["meets_objectives"]
    assert "Nearest to the objectives" in capsys.readouterr().out


def test_trace_is_simulated_with_its_common_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at * 200, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 3, 100 + at]}
        for at in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    directory = tmp_path / "out"
    assert recommend([*SMALL, "--trace", str(tmp_path / "trace.jsonl"), "--output-dir", str(directory)]) == 0
    found = json.loads((directory / "recommendation.json").read_text())
    assert found["recommended"]["reused_share"] > 0.3


def test_measured_points_correct_the_estimate(tmp_path: Path) -> None:
    _, before = run(tmp_path / "a", "--request-rate", "6")
    slow = [{"concurrency": 8, "input_tokens": 1000, "output_tokens": 60, "ttft_ms": 400, "tpot_ms": 25}]
    (tmp_path / "points.json").write_text(json.dumps(slow))
    _, after = run(tmp_path / "b", "--request-rate", "6", "--points", str(tmp_path / "points.json"))
    assert after["recommended"]["mean_itl_ms"] > 1.2 * before["recommended"]["mean_itl_ms"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--gpu", "h101"], "--gpu 'h101'"),
        (["--gpu", "t4", "--gpus", "1"], "--gpus 1: must be 2 or more"),
        (["--points", "none.json"], "--points none.json"),
    ],
)
def test_unsupported_command_line_is_refused(more: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        recommend([*SMALL, "--request-rate", "6", *more])


def test_interrupted_search_keeps_what_was_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate, finished = DeploymentSimulator.run, 2

    def run_twice(self: DeploymentSimulator, *more: Any) -> SimulatedResult:
        nonlocal finished
        if not finished:
            raise KeyboardInterrupt
        finished -= 1
        return simulate(self, *more)

    monkeypatch.setattr(DeploymentSimulator, "run", run_twice)
    code, found = run(tmp_path, "--request-rate", "6")
    assert code == 130
    assert 1 <= len(found["results"]) <= 2
    assert (tmp_path / "graph.yaml").is_file()
    assert "interrupted" in capsys.readouterr().err


def test_search_that_ends_before_a_simulation_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: DeploymentSimulator, *more: Any) -> SimulatedResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeploymentSimulator, "run", interrupted)
    assert recommend([*SMALL, "--request-rate", "6", "--output-dir", str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()
