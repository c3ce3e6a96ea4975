"""Test names and docstrings of tests are plain technical English: the word list of tools/language.py, with a shrinking budget."""

from pathlib import Path

import pytest
from tools import language

TESTS = Path(__file__).resolve().parents[1]
NAMES, DOCSTRINGS = "names", "docstrings"
BUDGETS = {NAMES: 353, DOCSTRINGS: 533}
"""Findings that are still allowed in all tests; the numbers only go down."""


def count(kind: str) -> int:
    """Count the findings in names of tests or in docstrings."""
    found = list(language.below([TESTS]))
    if kind == NAMES:
        return sum(one.kind == language.IDENTIFIERS and one.text.startswith("test_") for one in found)
    return sum(one.kind == language.DOCSTRING for one in found)


@pytest.mark.parametrize("kind", BUDGETS)
def test_tests_have_no_more_findings_than_their_budget(kind: str) -> None:
    assert count(kind) <= BUDGETS[kind], "reword them; python tools/language.py tests lists them"
