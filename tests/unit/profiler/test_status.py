from pathlib import Path

import pytest
import yaml

from dynamo.core.errors import ConfigError
from dynamo.profiler.status import StatusFile


def read(directory: Path) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((directory / "profiler_status.yaml").read_text())
    return found


def test_states_follow_the_run(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "new")
    status.enter("SweepingPrefill", "Sweeping")
    running = read(tmp_path / "new")
    assert (running["status"], running["phase"], running["message"]) == ("running", "SweepingPrefill", "Sweeping")
    assert str(running["timestamp"]).endswith("Z")
    status.finish({"final_config": "final_config.yaml"})
    done = read(tmp_path / "new")
    assert (done["status"], done["phase"], done["outputs"]) == (
        "success",
        "Done",
        {"final_config": "final_config.yaml"},
    )


def test_failure_keeps_the_phase_in_which_it_happened(tmp_path: Path) -> None:
    status = StatusFile(tmp_path)
    status.enter("GeneratingDGD", "Packaging")
    status.fail("Config validation failed", "model: missing")
    assert read(tmp_path)["error"] == "model: missing"
    assert read(tmp_path)["phase"] == "GeneratingDGD"
    assert [path.name for path in tmp_path.iterdir()] == ["profiler_status.yaml"]


def test_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-dir"):
        StatusFile(tmp_path / "file").enter("Initializing", "Starting")
