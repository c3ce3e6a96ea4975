"""The wheel: pure where the compiled module is not built, with the metadata that an index shows."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def wheel(tmp_path: Path, **variables: str) -> Path:
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)],
        env={**os.environ, **variables}, check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    (found,) = built.iterdir()
    return found


@pytest.mark.parametrize("variables", [{"DYNAMO_PURE": "1"}, {"CC": "/bin/false"}], ids=["asked for", "no compiler"])
def test_wheel_without_the_compiled_module_is_pure_and_describes_itself(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    path = wheel(tmp_path, **variables)
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert not [name for name in names if name.endswith(".so")]
    assert {"dynamo/py.typed", "dynamo/cpu/demo_model/model.safetensors"} <= set(names)
    recipes = [str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    prefix = "dynamo/ops/recipes/shipped/"
    assert sorted(recipes) == sorted(
        f"recipes/{name.removeprefix(prefix)}" for name in names if name.startswith(prefix)
    )
    assert metadata.get_all("Project-URL")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "inference" in metadata["Keywords"]


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_wheel_with_the_compiled_module_is_for_this_platform(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    assert "-none-any" not in path.name
    with zipfile.ZipFile(path) as archive:
        assert [
            name for name in archive.namelist() if name.startswith("dynamo/kv_router/_names.") and name.endswith(".so")
        ]
