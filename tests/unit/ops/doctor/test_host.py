"""Facts about GPUs and memory from the system's own texts."""

import re
from pathlib import Path

import pytest

from dynamo.core.errors import StartupError
from dynamo.ops.doctor import host
from dynamo.ops.doctor.host import GPU_FIELDS, host_facts, memory, parse_gpus, space, temporary_space

SMI = """\
0, NVIDIA H200, GPU-1a2b, 570.133.20, 143771, 4, 0
1, NVIDIA H200, GPU-3c4d, 570.133.20, 143771, 120000, [N/A]
broken line
"""
MEMINFO = "MemTotal:       8000 kB\nMemFree:  1 kB\nMemAvailable:   6000 kB\n"


def test_gpus_are_read_from_the_table_and_other_lines_are_skipped() -> None:
    first, second = parse_gpus(SMI)
    assert (first.name, first.memory_mib, first.used_mib, first.ecc_errors) == ("NVIDIA H200", 143771, 4, 0)
    assert (second.index, second.uuid, second.ecc_errors) == ("1", "GPU-3c4d", None)
    assert len(GPU_FIELDS.split(",")) == 7


def test_memory_is_limited_by_the_container() -> None:
    assert memory(MEMINFO, "max\n", "1") == (8000 << 10, 6000 << 10)
    assert memory(MEMINFO, str(4000 << 10), str(3000 << 10)) == (4000 << 10, 1000 << 10)
    assert memory(MEMINFO, "", "") == (8000 << 10, 6000 << 10)


def test_space_of_a_directory_that_does_not_exist_is_that_of_its_parent(tmp_path: Path) -> None:
    found = space("logs", str(tmp_path / "a" / "b"))
    assert found.path == str(tmp_path / "a" / "b")
    assert found.total_bytes >= found.free_bytes > 0
    assert found.is_writable


def test_host_has_cores_memory_and_a_limit_of_open_files(tmp_path: Path) -> None:
    facts = host_facts([("models", str(tmp_path))], space("temporary", str(tmp_path)))
    assert facts.cores >= 1
    assert facts.memory_bytes >= facts.available_bytes > 0
    assert 0 < facts.open_files <= facts.open_files_max
    assert [one.use for one in facts.spaces] == ["temporary", "models"]


def test_temporary_directory_that_python_does_not_use_is_a_problem(tmp_path: Path) -> None:
    assert temporary_space("").error == ""
    found = temporary_space(str(tmp_path / "absent"))
    assert found.path == f"TMPDIR={tmp_path / 'absent'}"
    assert re.fullmatch(r"No such file or directory; /\S+ is used instead", found.error)


def test_no_usable_temporary_directory_is_a_problem_with_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise StartupError("no usable temporary directory: /a: No space left on device")

    monkeypatch.setattr(host, "temporary_directory", refuse)
    found = temporary_space("")
    assert (found.path, found.error) == ("no usable temporary directory", "/a: No space left on device")
