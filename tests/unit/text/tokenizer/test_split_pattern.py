"""A split regex is translated only where `re` and the library interpret it in the same way."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from dynamo.text.tokenizer import split_pattern, word_tokenizer


@pytest.mark.parametrize("family", ["qwen", "o200k"])  # The two hold every property that the others use.
def test_split_pattern_splits_settled_characters_like_the_library(model_dirs: dict[str, Path], family: str) -> None:
    spec = json.loads((model_dirs[family] / "tokenizer.json").read_text())
    source = word_tokenizer._split_source(spec["pre_tokenizer"])
    assert source is not None
    pattern = split_pattern.settled_pattern(source)
    assert pattern is not None
    settled = (chr(code) for span in split_pattern.settled() for code in span)
    text = "\n".join(f" {char}a{char}1'{char}" for char in settled)
    library = pre_tokenizers.Split(Regex(source), "isolated")
    assert pattern.findall(text) == [piece for piece, _ in library.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "source",
    [
        r"a.b",
        r"^a",
        r"a$",
        r"(a)|b",
        r"[a&&b]",
        r"\d+",
        r"\h+",
        r"(?<=a)b",
        r"[[:alpha:]]+",
        r"\p{Han}+",
        r"a{2}+",
        r"[\S]",
        "[a",
    ],
)
def test_split_pattern_refuses_an_ambiguous_regex(source: str) -> None:
    assert split_pattern.ascii_pattern(source) is None
    assert split_pattern.settled_pattern(source) is None


def test_split_pattern_excludes_surrogates_and_unassigned_characters() -> None:
    assert split_pattern.unsettled().search("\ud800")
    assert split_pattern.unsettled().search("\u0378")
    assert split_pattern.unsettled().search(chr(sys.maxunicode))
    assert not split_pattern.unsettled().search("plain text, naïve café 日本 😀")


def test_settled_characters_are_few_separate_spans_in_ascending_order() -> None:
    spans = split_pattern.settled()
    assert len(spans) < 1000
    assert sum(map(len, spans)) > 50_000
    assert all(before.stop < after.start for before, after in pairwise(spans))
