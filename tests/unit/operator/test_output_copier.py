"""Sidecar of the profiler: progress and result reach the ConfigMap, through failures of the API server."""

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.operator import output_copier
from dynamo.operator.output_copier import CHECK_S, PUBLISH_S, OutputCopier, reported, result_files

METADATA = {"labels": {"a": "b"}, "ownerReferences": [{"uid": "u"}]}


class Cluster:
    """The pod, and the ConfigMap that is written. Each step of `script` runs in one interval of the copier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script: list[Any] = []
        self.written: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.is_ended = False
        self.pod_error: OSError | None = None
        self.failures = 0
        self.slept = 0.0

    def call(self, method: str, path: str, body: Any) -> Any:
        self.paths.append(f"{method} {path}")
        if method == "GET":
            if self.pod_error:
                raise self.pod_error
            state = {"terminated": {"exitCode": 0}} if self.is_ended else {"running": {}}
            other = {"name": "output-copier", "state": {"running": {}}}
            return {"status": {"containerStatuses": [other, {"name": "profiler", "state": state}]}}
        if self.failures:
            self.failures -= 1
            raise urllib.error.URLError("away")
        self.written.append(body)
        return {}

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.script:
            self.script.pop(0)()

    def report(self, **fields: str) -> None:
        (self.folder / "profiler_status.yaml").write_text(yaml.safe_dump(fields))

    def end(self, status: str = "success", **fields: str) -> None:
        self.report(status=status, **fields)
        self.is_ended = True

    def run(self) -> int:
        environment = {
            "OUTPUT_PATH": str(self.folder),
            "OUTPUT_NAME": "dgdr-output-chat",
            "OUTPUT_METADATA": json.dumps({"metadata": METADATA}),
            "DGDR_NAMESPACE": "space",
            "POD_NAME": "p",
        }
        return OutputCopier(self.call, environment).run(self.sleep)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_each_phase_is_published_once_and_the_result_at_the_end(cluster: Cluster) -> None:
    text = "a message that is so long that YAML folds it into a second line, which belongs to it: " + "x" * 80
    cluster.script = [
        lambda: cluster.report(status="running", phase="SweepingPrefill", message=text),
        lambda: None,
        lambda: cluster.report(status="running", phase="SweepingDecode", message="2 of 5"),
        lambda: (cluster.folder / "final_config.yaml").write_text("kind: x"),
        lambda: cluster.end(phase="Done", message="done"),
    ]
    assert cluster.run() == 0
    data = [one["data"] for one in cluster.written]
    assert data[0] == {"phase": "SweepingPrefill", "message": text}
    assert [one["phase"] for one in data] == ["SweepingPrefill", "SweepingDecode", "Done", "Done"]
    assert set(data[-1]) == {"phase", "message", "profiler_status", "final_config.yaml", "profiler_status.yaml"}
    assert data[-1]["profiler_status"] == "success"
    assert cluster.written[-1]["metadata"] == {**METADATA, "name": "dgdr-output-chat", "namespace": "space"}
    assert any("/configmaps/dgdr-output-chat?fieldManager=output-copier&force=true" in one for one in cluster.paths)


def test_failed_profiler_fails_the_pod_after_its_status_is_published(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.end("failed", error="no GPUs")
    assert cluster.run() == 1
    data = cluster.written[-1]["data"]
    assert (data["profiler_status"], data["profiler_error"]) == ("failed", "no GPUs")
    assert "profiler_status.yaml" in data
    assert "the profiler has failed: no GPUs" in capsys.readouterr().out


def test_profiler_that_ends_without_a_status_is_a_failure(cluster: Cluster) -> None:
    cluster.is_ended = True
    assert cluster.run() == 1
    assert cluster.written[-1]["data"] == {
        "phase": "", "message": "", "profiler_status": "failed", "profiler_error": "it ended without a status",
    }  # fmt: skip


def test_result_upload_is_retried_until_the_server_responds(cluster: Cluster) -> None:
    cluster.end(phase="Done")
    cluster.failures = 50
    assert cluster.run() == 0
    assert cluster.written[-1]["data"]["phase"] == "Done"
    assert 50 * 2 < cluster.slept < 60 * CHECK_S


def test_unpublished_result_is_a_failure_after_a_limit(cluster: Cluster) -> None:
    cluster.end(phase="Done")
    cluster.failures = 10**6
    assert cluster.run() == 1
    assert cluster.slept <= PUBLISH_S + 2 * CHECK_S


def test_deleted_pod_ends_the_copier_and_an_unreadable_one_does_not(cluster: Cluster) -> None:
    cluster.pod_error = urllib.error.URLError("away")

    def gone() -> None:
        cluster.pod_error = urllib.error.HTTPError("u", 404, "Not Found", None, None)  # type: ignore[arg-type]

    cluster.script = [lambda: None] * 9 + [gone]
    assert cluster.run() == 1
    assert cluster.slept >= 20


@pytest.mark.parametrize("text", ["", "a: [", "- x", "\x00"])
def test_unreadable_profiler_status_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "profiler_status.yaml").write_text(text)
    assert reported(tmp_path) == {}


def test_files_beyond_the_size_limit_are_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copier, "MAX_BYTES", 20)
    (tmp_path / "final_config.yaml").write_text("kind: x")
    (tmp_path / "webui_data.json").write_text("x" * 21)
    assert result_files(tmp_path) == {"final_config.yaml": "kind: x"}
