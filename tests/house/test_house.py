"""Rules of the source tree that can be checked by a program."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.house.source import MODULES, ROOT, SOURCE, relative, tree

import dynamo

PACKAGES = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())
ADDRESSES = sorted(path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__")
"""Modules next to the packages, where upstream's users import them from."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".sh", ".jinja", ""}
FOLDERS = (".ci", "benchmarks", "docs", "examples", "src", "tests", "tools")


@cache
def texts() -> list[tuple[Path, str]]:
    """Return every text file of this repository, in any checkout."""
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # A file in a worktree.
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [
        (path, path.read_text(encoding="utf-8"))
        for path in sorted(found)
        if path.suffix in TEXT_SUFFIXES and "egg-info" not in str(path) and path.stat().st_size < 1_000_000
    ]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_has_a_docstring(path: Path) -> None:
    text = ast.get_docstring(tree(path))
    assert text, f"{relative(path)} has no docstring"
    assert len(text.splitlines()[0]) <= 140


def test_environment_is_read_in_one_module() -> None:
    readers = {
        relative(path)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
    }
    sets_for_prometheus_client = "src/dynamo/common/backend/metrics.py"
    runs_without_this_package = "src/dynamo/operator/output_copier.py"
    assert readers <= {"src/dynamo/core/config.py", sets_for_prometheus_client, runs_without_this_package}


PICKLING_MODULES = {"pickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "multiprocessing"}
PICKLING_NAMES = {"ProcessPoolExecutor", "recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"}


def pickling_in(source: str) -> list[str]:
    """Return the uses of pickling in the source, which is parsed only if it contains one of the names."""
    found: list[str] = []
    if not any(name in source for name in (*PICKLING_MODULES, *PICKLING_NAMES, "allow_pickle")):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLING_MODULES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PICKLING_MODULES:
                found.append(node.module or "")
            found += [alias.name for alias in node.names if alias.name in PICKLING_NAMES]
        elif isinstance(node, ast.Attribute) and node.attr in PICKLING_NAMES:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_source_does_not_pickle(path: Path) -> None:
    assert pickling_in(path.read_text(encoding="utf-8")) == []


def test_metrics_are_rendered_in_turns_of_the_loop() -> None:
    """`MetricsPage` renders a registry in turns; `render` takes a second for as many series as a large cluster has."""
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "render"
        and ast.unparse(node.func.value).endswith(("registry", "metrics"))
    ]
    assert not found


def test_pickle_check_finds_every_way_to_pickle() -> None:
    for source in (
        "import pickle",
        "import multiprocessing.connection",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Listener",
        "from concurrent.futures import ProcessPoolExecutor",
        "link.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
    ):
        assert pickling_in(source), source
    assert pickling_in("np.load(path, allow_pickle=False)\nimport json") == []


BROAD_EXCEPTS_MAX = 40
BROAD = {"Exception", "BaseException"}


def broad_excepts() -> Iterator[tuple[str, str]]:
    """Yield each handler of all exceptions: its place, and the comment on its line."""
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in BROAD):
                comment = lines[node.lineno - 1].partition("#")[2].partition("noqa: BLE001 -")
                yield f"{relative(path)}:{node.lineno}", (comment[2] or comment[0]).strip()


def test_broad_excepts_are_few_and_have_a_reason() -> None:
    found = list(broad_excepts())
    assert len(found) <= BROAD_EXCEPTS_MAX, "name the errors, or use dynamo.core.boundaries"
    assert [place for place, reason in found if len(reason.split()) < 4] == []


def test_no_file_contains_a_path_of_a_machine() -> None:
    machine = re.compile(r"/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "fa" + "rm")) + r")/")
    assert [relative(path) for path, text in texts() if machine.search(text)] == []


ABSENT = re.compile(
    r"(?:serving|control)-plane\.md|(?:published-results|lessons|restructure|real-engines)\b(?:\.md| R\d)|\bstyle\.md"
    r"|architecture\.md §|\bissue \d+\b|\(R\d{1,2}\b|figures R\d"
)
"""Documents that are not in the repository, and citations of their numbered parts."""


def test_no_reference_to_documents_outside_the_repository() -> None:
    here = Path(__file__).name
    found = [
        f"{relative(path)}: {match[0]}"
        for path, text in texts()
        if path.name != here
        for match in ABSENT.finditer(text)
    ]
    assert found == [], "state the fact, or link a page of docs/"


def test_source_has_no_todo_comments() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    found = {relative(path) for path in MODULES if later.search(path.read_text(encoding="utf-8"))}
    servicers = "src/dynamo/planner/plugins/proto/v1/plugin_pb2_grpc.py"  # As protoc: a method without an override.
    assert found - {servicers} == set()


def test_pyproject_is_the_only_configuration_file() -> None:
    others = ("setup.cfg", "tox.ini", "pytest.ini", "mypy.ini", ".flake8", "ruff.toml", ".importlinter")
    assert [name for name in others if (ROOT / name).exists()] == []
    *_, last_statement = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
    assert isinstance(last_statement, ast.Expr)
    assert isinstance(last_statement.value, ast.Call)
    assert [word.arg for word in last_statement.value.keywords] == ["ext_modules"], "it says what pyproject.toml cannot"


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "unit").rglob("test_*.py")), ids=relative)
def test_unit_test_files_mirror_the_source_files(path: Path) -> None:
    place = path.relative_to(ROOT / "tests" / "unit").parent / path.name.removeprefix("test_")
    subjects = [SOURCE / place, ROOT / place]
    assert any(subject.exists() or subject.with_suffix("").is_dir() for subject in subjects), f"{place} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_verbs_in_the_docs_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = re.findall(r"(?:^|`|&& )make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(commands) <= verbs


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_to_files_of_the_repository_are_valid(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ours = [link for link in links if "://" not in link]
    assert [link for link in ours if not (page.parent / link).exists()] == []


GENERATED = [ROOT / "docs" / "reference" / name for name in ("modules.md", "upstream-tests.md")]
"""Pages whose paths are relative to packages, ours and upstream's."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=relative)
def test_paths_in_the_docs_exist(page: Path) -> None:
    commands = re.findall(
        r"`((?:src|tests|benchmarks|tools|docs|examples)/[\w./-]+)`", page.read_text(encoding="utf-8")
    )
    assert [path for path in commands if not (ROOT / path).exists()] == []


def test_architecture_page_names_every_package() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [package for package in (*PACKAGES, *ADDRESSES) if f"`{package}`" not in page] == []


def test_every_package_has_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert {*PACKAGES, *ADDRESSES} == {package for layer in layers for package in layer.split(" | ")}


def test_changelog_has_a_section_of_this_version() -> None:
    assert f"## [{dynamo.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
