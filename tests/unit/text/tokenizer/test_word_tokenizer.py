"""Words are cached, counted and bounded."""

import json
from pathlib import Path

import pytest

from dynamo.text.tokenizer import word_tokenizer
from dynamo.text.tokenizer.tokenizer import Tokenizer
from dynamo.text.tokenizer.word_tokenizer import byte_of_char


def test_word_tokenizer_has_a_character_for_every_byte() -> None:
    assert sorted(byte_of_char().values()) == list(range(256))
    assert byte_of_char()["\u0120"] == ord(" ")


def words_of(path: Path) -> Tokenizer:
    """Return a tokenizer that caches words only."""
    data = (path / "tokenizer.json").read_bytes()
    return Tokenizer(json.loads(data), data, backends=["words"], cache_bytes=0)


def test_word_tokenizer_counts_words(model_dir: Path) -> None:
    tokenizer = words_of(model_dir)
    before = tokenizer.cache_misses
    text = "unheardof " * 20
    tokenizer.encode(text)
    assert tokenizer.cache_misses == before + 2, "with and without its leading space"
    hits = tokenizer.cache_hits
    tokenizer.encode(text)
    assert (tokenizer.cache_hits, tokenizer.cache_misses) == (hits + 21, before + 2), "and what follows the last word"
    assert tokenizer.cache_entries > 0
    assert tokenizer.cache_bytes > 0


def test_word_tokenizer_cache_is_bounded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_tokenizer, "WORDS_MAX", 50)
    tokenizer = words_of(model_dir)
    for number in range(400):
        text = f"word{number}x and{number}y " * 8
        assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
        assert tokenizer.cache_bytes < 2 * 50 * 1000
    assert tokenizer.cache_entries <= 2 * 50


def test_word_tokenizer_does_not_cache_long_words(model_dir: Path) -> None:
    tokenizer = words_of(model_dir)
    entries = tokenizer.cache_entries
    text = "a" * 40_000
    assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
    assert tokenizer.cache_entries == entries
