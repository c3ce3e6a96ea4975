"""`--tokenizer` selects the encoders to try."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.text.tokenizer.choices import BACKEND_NAMES, backends_wanted
from dynamo.text.tokenizer.tokenizer import BACKENDS


def test_backend_names_are_those_of_the_encoders_best_first() -> None:
    assert tuple(BACKENDS) == BACKEND_NAMES


@pytest.mark.parametrize(
    ("choice", "falls_back", "expected"),
    [
        ("default", True, ("compiled", "fastokens", "words")),
        ("default", False, ("compiled", "fastokens", "words")),
        ("fastokens", True, ("fastokens", "compiled", "words")),
        ("fastokens", False, ("fastokens",)),
        ("basetenkenizer", True, ("compiled", "fastokens", "words")),
    ],
)
def test_tokenizer_backend_choice_is_tried_first(choice: str, falls_back: bool, expected: tuple[str, ...]) -> None:
    assert backends_wanted(choice, falls_back=falls_back) == expected


@pytest.mark.parametrize("choice", ["basetenkenizer", "compiled", "words", ""])
def test_tokenizer_backend_choice_that_is_unavailable_is_refused(choice: str) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        backends_wanted(choice, falls_back=False)
