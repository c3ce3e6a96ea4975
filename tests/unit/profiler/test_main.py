import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.core.errors import ConfigError
from dynamo.profiler.main import main, output_dir, read_spec

SPEC: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "image": "r/dynamo-planner:1.6.1",
    "hardware": {"gpuSku": "h100_sxm", "totalGpus": 8, "numGpusPerNode": 8},
}


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restore the root logger, which `main` sets up."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for added in [one for one in root.handlers if one not in handlers]:
        root.removeHandler(added)
        added.close()
    root.setLevel(level)


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((directory / "profiler_status.yaml").read_text())
    return found


def test_success_is_exit_code_0(tmp_path: Path) -> None:
    assert main(["--config", json.dumps(SPEC), "--output-dir", str(tmp_path)]) == 0
    assert status(tmp_path)["status"] == "success"
    assert "selected" in (tmp_path / "profile_sla.log").read_text()


def test_invalid_specification_is_exit_code_1_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", json.dumps({**SPEC, "image": ""}), "--output-dir", str(tmp_path)]) == 1
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["message"] == "Config validation failed"
    assert status(tmp_path)["error"].startswith("image: missing")
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: image: missing")


def test_failure_of_the_search_is_not_one_of_the_specification(tmp_path: Path) -> None:
    hardware = {"gpuSku": "t4", "totalGpus": 1, "numGpusPerNode": 1}
    spec = {**SPEC, "model": "meta-llama/Llama-3.3-70B-Instruct", "hardware": hardware}
    assert main(["--config", json.dumps(spec), "--output-dir", str(tmp_path)]) == 1
    assert status(tmp_path)["message"] == "Profiler failed"
    assert "no engine of up to 8 nodes fits" in status(tmp_path)["error"]


def test_wrong_argument_is_exit_code_2_with_a_status(tmp_path: Path) -> None:
    assert main(["--config", "{}", f"--output-dir={tmp_path}", "--no-such-flag"]) == 2
    assert status(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--output-dir", "a"], "a"),
        (["--x", "--output-dir=b"], "b"),
        (["--output-dir"], "profiling_results"),
        ([], "profiling_results"),
    ],
)
def test_output_directory_of_a_wrong_command_line(argv: list[str], found: str) -> None:
    assert output_dir(argv) == found


def test_specification_is_inline_or_a_file_of_either_format(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "a.json").write_text(json.dumps(SPEC))
    assert read_spec(json.dumps(SPEC)) == read_spec(str(tmp_path / "a.yaml")) == read_spec(str(tmp_path / "a.json"))


def test_long_text_is_not_read_as_a_path() -> None:
    assert read_spec(json.dumps({"model": "x" * 10000}))["model"]
    with pytest.raises(ConfigError, match="neither inline JSON nor a readable file"):
        read_spec("x" * 10000)
