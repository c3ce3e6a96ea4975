"""The command line and the report of `dynamo troubleshoot`."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.archive import read_files
from dynamo.ops.troubleshoot.case import CaseFacts
from dynamo.ops.troubleshoot.command import SIGNATURES, TroubleshootConfig, json_report, rows_of_case, troubleshoot
from dynamo.ops.troubleshoot.signature import matches


@pytest.mark.parametrize(
    "wrong", [{"bundle": "x", "graph": "g"}, {"bundle": "x", "logs": "l"}, {"logs": "l", "namespace": "n"}]
)
def test_sources_exclude_each_other(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must not be combined"):
        TroubleshootConfig(**wrong)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://x:port", "http://", "http://x:0"])
def test_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--url {url}: must be an http:// or https:// URL"):
        TroubleshootConfig(url=url)


def test_signatures_have_unique_names_and_are_many() -> None:
    assert len({one.name for one in SIGNATURES}) == len(SIGNATURES) >= 30


def test_bundle_with_a_failure_has_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worker-1.log").write_text("INFO ok\nRuntimeError: No CUDA GPUs are available\n")
    assert troubleshoot(["--bundle", str(tmp_path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAIL gpu-absent worker-1.log: RuntimeError: No CUDA GPUs are available" in text
    assert "Next: nvidia-smi" in text


def test_json_names_signature_evidence_cause_and_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text("Too many open files")
    saved = tmp_path / "saved.tar.gz"
    assert (
        troubleshoot(["--bundle", str(tmp_path / "a.log").removesuffix("/a.log"), "--json", "--save", str(saved)]) == 1
    )
    value = json.loads(capsys.readouterr().out)
    (one,) = value["signatures"]
    assert (one["signature"], one["status"], one["count"]) == ("open-files", "FAIL", 1)
    assert one["evidence"] == [{"source": "a.log", "text": "Too many open files"}]
    assert one["cause"]
    assert one["next"]
    assert value["verdict"] == "FAIL"
    assert read_files(str(saved)) == {"a.log": "Too many open files"}


def test_healthy_and_empty_cases_have_exit_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert troubleshoot(["--bundle", str(tmp_path)]) == 0
    assert "SKIP  collected" in capsys.readouterr().out
    (tmp_path / "a.log").write_text("INFO ready")
    assert troubleshoot(["--bundle", str(tmp_path)]) == 0
    assert "none of" in capsys.readouterr().out


def test_unreadable_source_is_a_warning() -> None:
    case = CaseFacts(logs={"a": "x"})
    rows = rows_of_case(case, matches(case, SIGNATURES), ["events: forbidden"])
    assert [(row.check, row.status.value) for row in rows] == [
        ("collected", "PASS"),
        ("collected", "WARN"),
        ("signatures", "PASS"),
    ]
    assert json.loads(json_report(rows, []))["signatures"] == []
