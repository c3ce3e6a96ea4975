"""Containerfiles: lint, layers without build tools or root, and their instructions executed in a fresh environment."""

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from string import Template

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "container").glob("Containerfile.*"))
SLIM = ("frontend", "operator", "epp", "planner", "mocker")
EXTRAS = re.compile(r"\[([a-z0-9,]+)\]")
TIMEOUT_S = 300
DENY = """
import importlib.abc, runpy, sys
allowed = set({allowed!r})
class Denied(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {known!r} and top not in allowed:
            raise ModuleNotFoundError(f"No module named {{name!r}}: its distribution is not installed in the image", name=name)
sys.meta_path.insert(0, Denied())
sys.argv = ["python", "--help"]
runpy.run_module({module!r}, run_name="__main__")
"""


@dataclass(slots=True)
class Stage:
    """One stage of a Containerfile: instruction and text."""

    base: str
    name: str = ""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, instruction: str) -> list[str]:
        return [text for one, text in self.instructions if one == instruction]


def stages(path: Path) -> list[Stage]:
    """Return the stages of a Containerfile, with the defaults of its arguments."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "ARG" and not found:
            name, _, arguments[name] = rest.partition("=")
        elif word == "FROM":
            base, *alias = Template(rest).substitute(arguments).split()
            found.append(Stage(base, alias[1] if alias else ""))
        elif word and not word.startswith("#") and found:
            found[-1].instructions.append((word, rest.strip()))
    return found


def named(path: Path) -> str:
    return path.suffix.removeprefix(".")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_linter_has_no_findings(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint has no binary for this platform")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_last_stage_runs_as_an_ordinary_user_and_has_no_build_tools(path: Path) -> None:
    build, last = stages(path)
    assert build.name == "build"
    assert last.texts("USER")[-1] == "1000:1000"
    assert not any("apt-get" in one or "gcc" in one for one in last.texts("RUN"))
    assert last.base.endswith("-slim-bookworm") == (named(path) in SLIM)
    assert last.texts("ENTRYPOINT") == [f'["python3", "-m", "dynamo.{named(path)}"]']


@pytest.mark.parametrize("path", FILES, ids=named)
def test_copied_paths_exist_and_are_sent_to_the_builder(path: Path) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for text in stages(path)[0].texts("COPY"):
        *sources, target = text.split()
        assert target.startswith("./")
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, one.removeprefix("!")) for one in ignored), f"{source}: see .dockerignore"


def test_every_extra_exists() -> None:
    known = set(metadata.distribution("dynamo-serve").metadata.get_all("Provides-Extra") or [])
    for path in FILES:
        for stage in stages(path):
            for text in stage.texts("RUN"):
                for found in EXTRAS.findall(text) if "pip install" in text else ():
                    assert set(found.split(",")) <= known, path.name


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment, in which the build stage's instructions were executed.

    The package is installed as the image installs it; its dependencies are those of this environment, which
    `importable` restricts to those of the image's extras.
    """
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    source.mkdir()
    for text in stages(FILES[0])[0].texts("COPY"):
        *names, target = text.split()
        for name in names:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
                shutil.copytree(ROOT / name, source / target, ignore=ignored)
            else:
                shutil.copy(ROOT / name, source / target)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python3"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    own = Path(metadata.distribution("pip").locate_file(""))  # type: ignore[arg-type]
    Path(packages, "dependencies.pth").write_text(f"{own}\n")
    command = [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*command, "--ignore-installed", str(source)], capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**os.environ, "DYNAMO_PURE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(packages, "dynamo").is_dir()
    return python


def requirements(name: str) -> list[str]:
    """Return the requirements of a distribution; none of one that this environment lacks."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def closure(extras: set[str]) -> set[str]:
    """Return the distributions that an installation with these extras has."""
    found: set[str] = set()
    waiting = [("dynamo-serve", frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        key = canonicalize_name(name)
        for text in requirements(key):
            one = Requirement(text)
            marked = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted or {""})
            if marked and (key == "dynamo-serve" or canonicalize_name(one.name) not in found):
                waiting.append((one.name, frozenset(one.extras)))
        found.add(key)
    return found


@pytest.mark.parametrize("name", SLIM)
def test_entry_point_starts_with_the_dependencies_of_the_image_alone(fresh: Path, name: str, tmp_path: Path) -> None:
    (command,) = [
        text for text in stages(ROOT / "container" / f"Containerfile.{name}")[0].texts("RUN") if "install" in text
    ]
    (extras,) = EXTRAS.findall(command)
    by_module = metadata.packages_distributions()
    image = closure(set(extras.split(",")))
    known = {module for module, owners in by_module.items() if module not in sys.stdlib_module_names}
    allowed = {module for module in known if {canonicalize_name(one) for one in by_module[module]} & image}
    assert {"msgspec", "dynamo"} <= allowed
    assert "pytest" not in allowed
    script = DENY.format(allowed=sorted(allowed), known=sorted(known), module=f"dynamo.{name}")
    done = subprocess.run([fresh, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage: python -m dynamo" in done.stdout
