"""Generated pages are current, and every page of the documentation can be reached from its index."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from tools import endpoints_page, flags_page, metrics_page, python_api, upstream_page, variables_page

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINES_MAX = {"README.md": 150, "ARCHITECTURE.md": 250}


@pytest.mark.parametrize(
    "tool",
    [endpoints_page, flags_page, metrics_page, python_api, upstream_page, variables_page],
    ids=lambda tool: tool.__name__.rpartition(".")[2],
)
def test_reference_page_is_current(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.content(), "run: make references"


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files and anchors of this repository that a page links."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in found if "://" not in path]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def test_every_page_is_reachable_from_the_index() -> None:
    pending, reached = [INDEX], set[Path]()
    while pending:
        page = pending.pop()
        if page in reached or page.suffix != ".md" or not page.is_relative_to(ROOT / "docs"):
            continue
        reached.add(page)
        pending += [path for path, _ in links(page)]
    missing = set((ROOT / "docs").rglob("*.md")) - reached
    assert not missing, "link them from docs/README.md"


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_linked_headings_exist(page: Path) -> None:
    linked = [(path, anchor) for path, anchor in links(page) if anchor and path.suffix == ".md"]
    assert [(path.name, anchor) for path, anchor in linked if anchor not in anchors(path)] == []


@pytest.mark.parametrize("page", LINES_MAX)
def test_front_pages_stay_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= LINES_MAX[page]
