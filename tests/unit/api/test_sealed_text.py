"""Sealed text is read back; other values are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.api.sealed_text import sealed, unsealed


@given(st.text())
def test_sealed_text_is_read_back(text: str) -> None:
    assert unsealed("a:", sealed("a:", text)) == text


@pytest.mark.parametrize("value", ["", "EqQBCgIYAhIM", "a:%%", "a:/w==", sealed("b:", "x")])
def test_other_values_are_not_sealed_text(value: str) -> None:
    assert unsealed("a:", value) is None
