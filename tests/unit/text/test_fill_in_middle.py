"""Prompts with a gap, in the formats of several families of models."""

import pytest

from dynamo.text.fill_in_middle import FORMATS, FillInMiddle

QWEN = {"<|fim_prefix|>": 1, "<|fim_middle|>": 2, "<|fim_suffix|>": 3, "<|fim_pad|>": 4, "<|im_end|>": 9}


def test_fill_in_middle_puts_the_prefix_first_for_qwen() -> None:
    middle = FillInMiddle.find(QWEN)
    assert middle is not None
    assert middle.token_ids([10, 11], [20]) == [1, 10, 11, 3, 20, 2]
    assert middle.end_ids == (1, 3, 2, 4)


def test_fill_in_middle_puts_the_suffix_first_for_codestral() -> None:
    middle = FillInMiddle.find({"[SUFFIX]": 5, "[PREFIX]": 6, "[MIDDLE]": 7})
    assert middle is not None
    assert middle.token_ids([10], [20, 21]) == [5, 20, 21, 6, 10]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.markers[0])
def test_fill_in_middle_finds_each_format_by_its_markers(form: object) -> None:
    markers = {marker: number for number, marker in enumerate(form.markers)}  # type: ignore[attr-defined]
    middle = FillInMiddle.find(markers)
    assert middle is not None
    ids = middle.token_ids([100], [200])
    assert sorted(ids) == [*range(len(markers)), 100, 200]


@pytest.mark.parametrize("markers", [{}, {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}])
def test_fill_in_middle_requires_every_marker(markers: dict[str, int]) -> None:
    assert FillInMiddle.find(markers) is None
