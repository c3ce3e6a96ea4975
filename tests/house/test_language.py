"""Docstrings, messages, names and documentation are plain technical English: the word list of tools/language.py, with a budget."""

import pytest
from tools import language

BUDGETS: dict[tuple[str, str], int] = {
    ("common", language.IDENTIFIERS): 1,  # make_room_for, a method of upstream's cache
    ("kvbm", language.IDENTIFIERS): 1,
    ("mocker", language.IDENTIFIERS): 1,
    ("protocols", language.IDENTIFIERS): 1,
    ("sglang", language.IDENTIFIERS): 2,
}
"""Findings that are still allowed, by package and kind; every other package and kind has none. Numbers only go down."""


def test_no_package_has_more_findings_than_its_budget() -> None:
    counts = language.counts()
    over = {where: number for where, number in counts.items() if number > BUDGETS.get(where, 0)}
    assert not over, "reword them; python tools/language.py PATH lists them"


def test_budgets_are_lowered_with_the_findings() -> None:
    counts = language.counts()
    assert {where: number for where, number in BUDGETS.items() if counts[where] < number} == {}


@pytest.mark.parametrize("page", language.PAGES, ids=lambda page: page.relative_to(language.ROOT).as_posix())
def test_documentation_has_no_findings(page: language.Path) -> None:
    assert [f"{one.line}: {one.word}: {one.text}" for one in language.prose(page)] == []


def test_code_of_a_page_is_not_prose(tmp_path: language.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text `told`\n\n    told\n\n```sh\ntold\n```\n<!-- told -->\nNobody is here.\n")
    (found,) = language.prose(page)
    assert (found.line, found.kind, found.word) == (9, language.PROSE, "nobody")


@pytest.mark.parametrize(
    ("source", "kind", "word"),
    [
        ('"""A worker tells its load."""', language.DOCSTRING, "tells"),
        ('x = "nobody is here"', language.STRING, "nobody"),
        ("def told() -> None: ...", language.IDENTIFIERS, "told"),
        ('class A:\n    x: int = 1\n    """Whoever comes."""', language.DOCSTRING, "whoever"),
    ],
)
def test_finding_names_its_kind_and_word(tmp_path: language.Path, source: str, kind: str, word: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    (found,) = language.findings(path)
    assert (found.kind, found.word) == (kind, word)
