from pathlib import Path
from typing import Any

import pytest

from dynamo.cpu import blas

AMD = "vendor_id\t: AuthenticAMD\n"
FLAGS = "flags\t\t: fpu sse2 avx2 avx512f avx512bw avx512cd avx512dq avx512vl\n"


@pytest.fixture
def without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "numpy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AMD + FLAGS, {"OPENBLAS_NUM_THREADS": "3", "OPENBLAS_CORETYPE": "SkylakeX"}),
        ("vendor_id\t: GenuineIntel\n" + FLAGS, {"OPENBLAS_NUM_THREADS": "3"}),
        (AMD + FLAGS.replace(" avx512vl", ""), {"OPENBLAS_NUM_THREADS": "3"}),
        ("Features : asimd\n", {"OPENBLAS_NUM_THREADS": "3"}),
        (None, {"OPENBLAS_NUM_THREADS": "3"}),
    ],
)
@pytest.mark.usefixtures("without_numpy")
def test_blas_setup_sets_the_processor_type(tmp_path: Path, text: str | None, expected: dict[str, Any]) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text("processor\t: 0\n" + text)
    put: dict[str, str] = {}
    assert blas.prepare(3, {}, cpu_info=str(file), put=put.__setitem__)
    assert put == expected


def test_blas_setup_refuses_after_numpy_is_imported() -> None:
    import numpy  # noqa: F401, ICN001

    put: dict[str, str] = {}
    assert not blas.prepare(3, {}, put=put.__setitem__)
    assert put == {}


def test_blas_setup_uses_one_thread_for_small_models_and_all_cores_but_one_for_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "cores", lambda: 7)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert blas.suitable_threads(str(tmp_path)) == 1
    monkeypatch.setattr(blas, "SMALL_MODEL_BYTES", 99)
    assert blas.suitable_threads(str(tmp_path)) == 6
    assert blas.suitable_threads(str(tmp_path), workers=2) == 3
    assert blas.suitable_threads(str(tmp_path), workers=4, cores_there=4) == 1
    assert blas.suitable_threads(str(tmp_path / "nothing")) == 1


def test_blas_setup_uses_at_least_one_core() -> None:
    assert blas.cores() >= 1


@pytest.mark.usefixtures("without_numpy")
def test_blas_setup_keeps_variables_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(AMD + FLAGS)
    put: dict[str, str] = {}
    assert blas.prepare(3, {"OPENBLAS_CORETYPE": "Zen"}, cpu_info=str(file), put=put.__setitem__)
    assert put == {"OPENBLAS_NUM_THREADS": "3"}
