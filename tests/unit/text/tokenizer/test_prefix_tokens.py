"""Cached tokens of earlier texts equal a fresh tokenization, are bounded, and serve repeated texts."""

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.text.tokenizer import prefix_tokens
from dynamo.text.tokenizer.prefix_tokens import ENTRY_SHARE, PrefixTokens, alternatives, cuts_of
from dynamo.text.tokenizer.tokenizer import Tokenizer, cache_bytes_wanted

TEXT = st.text(st.sampled_from("aB1 \n\té😀'<|>"), max_size=30)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXT), min_size=1, max_size=8)
ODD = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|im_end", "|>", " ", "x"]


def prompt_of(turns: list[tuple[str, str]]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n<think>"


@pytest.fixture(scope="module")
def every(model_dirs: dict[str, Path], sentencepiece_dir: Path) -> dict[str, list[Tokenizer]]:
    """Every kind of tokenizer behind every backend."""
    paths = {**model_dirs, "sentencepiece": sentencepiece_dir}
    return {name: [Tokenizer.from_dir(str(path), ways) for ways in ([], ["words"])] for name, path in paths.items()}


@pytest.mark.parametrize("name", ["qwen", "llama", "o200k", "gpt2", "sentencepiece"])
@settings(max_examples=25, deadline=None)
@given(turns=TURNS, odd=st.lists(st.sampled_from(ODD), max_size=12), add_special_tokens=st.booleans())
def test_prefix_token_cache_does_not_change_ids(
    every: dict[str, list[Tokenizer]],
    name: str,
    turns: list[tuple[str, str]],
    odd: list[str],
    add_special_tokens: bool,
) -> None:
    for tokenizer in every[name]:
        for length in range(1, len(turns) + 1):  # As a conversation grows.
            text = prompt_of(turns[:length])
            assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
        text = "".join(odd)
        assert tokenizer.encode(text, add_special_tokens) == tokenizer.encode_by_library(text, add_special_tokens)


class Counting:
    """Tokenizes each character to its code, and counts."""

    def __init__(self) -> None:
        self.received_requests: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.received_requests.append(text)
        return [ord(char) for char in text]


def test_prefix_token_cache_stores_a_repeated_prefix() -> None:
    counting = Counting()
    prefixes = PrefixTokens(counting, ["<a>", "<b>"])
    assert prefixes.encode("one<a>two<b>three") == [ord(char) for char in "one<a>two<b>three"]
    assert counting.received_requests == ["one<a>", "two<b>", "three"]
    assert prefixes.encode("one<a>two<b>four<a>") == [ord(char) for char in "one<a>two<b>four<a>"]
    assert counting.received_requests[3:] == ["one<a>", "two<b>", "four<a>"]
    assert prefixes.encode("one<a>two<b>five<a>") == [ord(char) for char in "one<a>two<b>five<a>"]
    assert counting.received_requests[6:] == ["five<a>"]
    assert (prefixes.cache_hits, prefixes.cache_misses, prefixes.cache_entries) == (2, 7, 2)


def test_prefix_token_cache_does_not_store_a_single_use() -> None:
    prefixes = PrefixTokens(Counting(), ["<a>"])
    for number in range(1_000):
        prefixes.encode(f"{number}<a>")
    assert (prefixes.cache_entries, prefixes.cache_bytes) == (0, 0)


def test_prefix_token_cache_returns_correct_ids_after_a_hash_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tokens, "SEEN", 1)
    counting = Counting()
    prefixes = PrefixTokens(counting, ["<a>"])
    for _ in range(3):
        assert prefixes.encode("one<a>two<a>") == [ord(char) for char in "one<a>two<a>"]
    assert prefixes.cache_entries == 0, "each takes the other's"
    for _ in range(3):
        prefixes.encode("one<a>")
    assert prefixes.cache_entries == 1


def test_prefix_token_cache_is_not_changed_by_the_caller() -> None:
    prefixes = PrefixTokens(Counting(), ["<a>"])
    for _ in range(3):
        ids = prefixes.encode("x")
        assert ids == [ord("x")]
        ids.append(1)


def test_prefix_token_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    counting = Counting()
    prefixes = PrefixTokens(counting, ["<a>"], bytes_max=20_000)
    prefixes.encode("kept<a>")
    prefixes.encode("kept<a>")
    for number in range(200):
        prefixes.encode(f"{number:050}<a>")
        prefixes.encode(f"{number:050}<a>")
        prefixes.encode("kept<a>")
        assert prefixes.cache_bytes <= 20_000
    assert counting.received_requests.count("kept<a>") == 2
    assert 10 < prefixes.cache_entries < 200
    for _ in range(3):
        prefixes.encode("x" * (20_000 // ENTRY_SHARE) + "<a>")
    prefixes.encode("kept<a>")
    assert counting.received_requests.count("kept<a>") == 2, "what is too large for it is not remembered"


def test_prefix_token_cache_is_thread_safe() -> None:
    prefixes = PrefixTokens(lambda text: [ord(char) for char in text], ["<a>"], bytes_max=5_000)
    wrong: list[str] = []

    def send_request() -> None:
        for number in range(2_000):
            text = f"{number % 50}<a>{number % 7}"
            if prefixes.encode(text) != [ord(char) for char in text]:
                wrong.append(text)

    threads = [threading.Thread(target=send_request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert 0 < prefixes.cache_bytes <= 5_000


def token(content: str, **flags: Any) -> Mapping[str, Any]:
    return {"content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([token("<a>"), token("<b>")], ["<a>", "<b>"]),
        ([token("<a>"), token("<b>", special=False)], ["<a>"]),
        ([token("<a>"), token("<b>", rstrip=True)], ["<a>"]),
        ([token("<a>"), token("<b>", lstrip=True)], ["<a>"]),
        ([token("<a>"), token("<b>", normalized=True)], ["<a>"]),
        ([token("<a>"), token("<b>", single_word=True)], []),
        ([token("<a>"), token("x<a>y")], ["x<a>y"]),
        ([token("<a>"), token("z<")], ["z<"]),
        ([token("aba")], []),
        ([token("<a> "), token("")], []),
        ([], []),
    ],
)
def test_prefix_token_cache_cuts_only_after_isolated_tokens(
    tokens: list[Mapping[str, Any]], expected: list[str]
) -> None:
    assert cuts_of(tokens) == expected


@given(
    texts=st.lists(st.text(st.sampled_from("ab|<("), min_size=1, max_size=5), min_size=1, max_size=8),
    text=st.text("ab|<("),
)
def test_prefix_token_cache_regex_finds_the_longest_isolated_token(texts: list[str], text: str) -> None:
    import re

    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    assert re.findall(alternatives(texts), text) == re.findall(longest_first, text)


def test_prefix_token_cache_detects_a_tokenizer_that_cannot_be_cut(
    sentencepiece_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = json.loads((sentencepiece_dir / "tokenizer.json").read_text())
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    tokenizer = Tokenizer(spec, json.dumps(spec).encode())
    assert "prefix cache disabled" in caplog.text
    text = "<s>the worker</s>the router"
    assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
    assert tokenizer.cache_entries == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, prefix_tokens.BYTES_MAX),
        ({"DYN_TOKENIZER_CACHE": "0"}, 0),
        ({"DYN_TOKENIZER_CACHE": "false"}, prefix_tokens.BYTES_MAX),
        ({"DYN_TOKENIZER_CACHE_BYTES": "9000"}, 9000),
        ({"DYN_TOKENIZER_CACHE": "0", "DYN_TOKENIZER_CACHE_BYTES": "9000"}, 0),
    ],
)
def test_prefix_token_cache_size_is_a_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int, model_dir: Path
) -> None:
    for name in ("DYN_TOKENIZER_CACHE", "DYN_TOKENIZER_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_bytes_wanted() == expected
    tokenizer = Tokenizer.from_dir(str(model_dir), [])
    tokenizer.encode("a stretch")
    tokenizer.encode("a stretch")
    assert (tokenizer.cache_entries > 0) == (expected > 0)


def test_long_text_is_cut_at_the_same_places_as_by_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tokens, "SEARCH_CHARS", 7)
    cuts = ["<a>", "<abc>", "<|end|>"]
    prefixes = PrefixTokens(lambda text: [hash(text)], cuts)
    for text in ("<a>" * 20, "xx<abc>" * 9, "<ab<a><|en<|end|>d|>" * 5, "x" * 50, "x" * 6 + "<|end|>y"):
        found = [one.span() for one in prefixes._cut_long(text)]
        assert found == [one.span() for one in re.finditer("|".join(map(re.escape, cuts)), text)], text
