"""Test names, docstrings and identifiers of tests, tools and benchmarks contain no word of tools/language.py."""

from functools import cache
from pathlib import Path

from tools import language

TESTS = Path(__file__).resolve().parents[1]


@cache
def findings() -> list[language.Finding]:
    return list(language.below([TESTS]))


def lines(found: list[language.Finding]) -> list[str]:
    return [f"{one.path.relative_to(TESTS)}:{one.line}: {one.word}: {one.text}" for one in found]


def test_test_names_contain_no_listed_word() -> None:
    names = [one for one in findings() if one.kind == language.IDENTIFIERS and one.text.startswith("test_")]
    assert lines(names) == []


def test_docstrings_of_tests_contain_no_listed_word() -> None:
    assert lines([one for one in findings() if one.kind == language.DOCSTRING]) == []
