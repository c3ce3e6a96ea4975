"""A trace sent to a running frontend, and the simulation of the trace that the frontend wrote."""

import json
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S

from dynamo.replay.main import main

pytestmark = pytest.mark.integration

LOAD = ["--input-tokens=300", "--output-tokens=12", "--request-count=24", "--replay-concurrency=6"]
LOAD += ["--shared-prefix-ratio=0.5", "--num-prefix-groups=2", "--turns-per-session=2", "--trace-block-size=64"]


def test_online_replay_sends_a_load_whose_trace_can_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_REQUEST_TRACE", "1")
    monkeypatch.setenv("DYN_REQUEST_TRACE_FILE_PATH", str(tmp_path / "trace"))
    with Cluster(tmp_path, "--router-mode", "kv") as cluster:
        cluster.mocker("--speedup-ratio", "20", "--block-size", "16")
        report, page = tmp_path / "r.json", tmp_path / "page.html"
        flags = ["--replay-mode=online", f"--url=http://127.0.0.1:{cluster.port}", "--prompt-token-ids=10-200"]
        flags += [f"--request-timeout-seconds={DEADLINE_S}", f"--report-json={report}", f"--report-html={page}"]
        assert main([*LOAD, *flags, "--capture-per-request", "--telemetry"]) == 0
        cluster.frontend.terminate()
        assert cluster.frontend.wait(DEADLINE_S) == 0
    found = json.loads(report.read_bytes())
    assert found["coverage"] == {"requests": 24, "completed": 24, "unfinished": 0}
    assert found["summary"]["total_output_tokens"] == 24 * 12
    assert all(row["ttft_ms"] > 0 and row["worker"] == 0 for row in found["per_request"])
    assert "Time to First Token" in capsys.readouterr().out

    (trace,) = tmp_path.glob("trace*.jsonl.gz")
    again = ["--trace-format=dynamo", "--num-workers=1", "--router-mode=kv_router"]
    again += ['--extra-engine-args={"block_size": 16}', "--report-json=-"]
    assert main([str(trace), *again]) == 0
    simulated = json.loads(capsys.readouterr().out)["summary"]
    assert simulated["completed_requests"] == 24
    assert simulated["total_output_tokens"] == 24 * 12
    assert simulated["total_input_tokens"] == found["summary"]["total_input_tokens"]
