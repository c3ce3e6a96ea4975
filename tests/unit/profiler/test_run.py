from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.operator.reconcile.requests.result import generated_objects
from dynamo.profiler.config import ProfilerConfig
from dynamo.profiler.run import ProfilerRun
from dynamo.profiler.spec import profile_spec
from dynamo.profiler.status import StatusFile
from dynamo.protocols.kubernetes.v1beta1 import ProfilingPhase


class RecordedStatus(StatusFile):
    """A status file that keeps the phases in memory too."""

    __slots__ = ("phases",)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.phases: list[ProfilingPhase] = []

    def enter(self, phase: ProfilingPhase, message: str) -> None:
        self.phases.append(phase)
        super().enter(phase, message)


def run(directory: Path, *, dry_run: bool = False, **changes: Any) -> RecordedStatus:
    hardware = {"gpuSku": "h200_sxm", "totalGpus": 16, "numGpusPerNode": 8}
    spec = profile_spec({"model": "Qwen/Qwen3-32B", "image": "r/dynamo-planner:1", "hardware": hardware, **changes})
    status = RecordedStatus(directory)
    status.enter("Initializing", "Starting")
    ProfilerRun(ProfilerConfig(config="{}", output_dir=str(directory), dry_run=dry_run), spec, status).execute()
    return status


def test_phases_are_those_of_the_released_profiler(tmp_path: Path) -> None:
    status = run(tmp_path, features={"planner": {"optimization_target": "sla"}})
    assert status.phases == ["Initializing", "SweepingPrefill", "SelectingConfig", "BuildingCurves", "GeneratingDGD"]
    assert status.phase == "Done"


def test_result_is_readable_by_the_operator(tmp_path: Path) -> None:
    run(tmp_path, features={"planner": {"optimization_target": "sla"}, "mocker": {"enabled": True}})
    found = generated_objects((tmp_path / "final_config.yaml").read_text())
    assert len(found.others) == 2
    assert (tmp_path / "picked_dgd_config.yaml").is_file()
    assert (tmp_path / "selected_decode_interpolation" / "raw_data.npz").is_file()


def test_request_without_planner_and_mocker_has_no_curves(tmp_path: Path) -> None:
    assert "BuildingCurves" not in run(tmp_path).phases
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final_config.yaml", "profiler_status.yaml"]


def test_dry_run_writes_an_empty_result(tmp_path: Path) -> None:
    run(tmp_path, dry_run=True)
    assert yaml.safe_load((tmp_path / "final_config.yaml").read_text()) is None


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_result_has_no_yaml_references(tmp_path: Path, backend: str) -> None:
    run(tmp_path, backend=backend)
    assert "&id" not in (tmp_path / "final_config.yaml").read_text()
