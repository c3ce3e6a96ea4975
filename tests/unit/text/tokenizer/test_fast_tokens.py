"""`fastokens` is used where it is installed and agrees, and never for texts on which it may differ."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.text.tokenizer import fast_tokens
from dynamo.text.tokenizer.fast_tokens import FastTokens, fast_tokens_for
from dynamo.text.tokenizer.prefix_tokens import TooManyTokens
from dynamo.text.tokenizer.tokenizer import Tokenizer


class FakeTokenizer:
    """The library's interface over `tokenizers`."""

    received_requests: list[str]
    is_wrong = False

    def __init__(self, text: str) -> None:
        self._library = tokenizers.Tokenizer.from_str(text)
        self.received_requests = []
        type(self).last = self

    last: "FakeTokenizer"

    @classmethod
    def from_json_str(cls, text: str) -> "FakeTokenizer":
        return cls(text)

    def no_truncation(self) -> None:
        self._library.no_truncation()

    def no_padding(self) -> None:
        self._library.no_padding()

    def encode(self, text: str) -> Any:
        self.received_requests.append(text)
        encoding = self._library.encode(text, add_special_tokens=False)
        return types.SimpleNamespace(ids=[*encoding.ids, 0] if self.is_wrong else encoding.ids)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[FakeTokenizer]:
    module = types.ModuleType("fastokens")
    fresh = type("Fresh", (FakeTokenizer,), {})
    module.Tokenizer = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)
    return fresh


def test_fast_tokens_encode_where_installed(double: type[FakeTokenizer], model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(str(model_dir), ["fastokens"])
    assert (tokenizer.backend, tokenizer.is_fast) == ("fastokens", True)
    text = "The worker asks the router. Быстрая лиса."
    assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
    assert double.last.received_requests[-1] == text
    assert (tokenizer.cache_entries, tokenizer.cache_hits, tokenizer.cache_misses) == (0, 0, 1), "the text as a whole"


def test_fast_tokens_add_bos(double: type[FakeTokenizer], model_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_dir(str(model_dirs["llama"]), ["fastokens"])
    assert tokenizer.encode("hello", add_special_tokens=True) == tokenizer.encode_by_library("hello", True)


@pytest.mark.parametrize("text", ["'\u017f", "\U0001fae8", "\u0378"])
def test_fast_tokens_skip_unsettled_text(double: type[FakeTokenizer], model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_dir(str(model_dir), ["fastokens"])
    assert tokenizer.encode(text) == tokenizer.encode_by_library(text)
    assert text not in double.last.received_requests


def test_fast_tokens_fall_back_where_results_differ(
    double: type[FakeTokenizer], model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double.is_wrong = True
    assert Tokenizer.from_dir(str(model_dir), ["fastokens", "words"]).backend == "words"
    assert "fastokens is not used: its result differs from tokenizers" in caplog.text


def test_fast_tokens_fall_back_where_the_file_is_unreadable(
    double: type[FakeTokenizer], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> FakeTokenizer:
        raise ValueError("unsupported pre-tokenizer")

    monkeypatch.setattr(double, "from_json_str", fail)
    assert Tokenizer.from_dir(str(model_dir), ["fastokens", "words"]).backend == "words"


def test_fast_tokens_fall_back_where_not_installed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert Tokenizer.from_dir(str(model_dir), ["fastokens", "words"]).backend == "words"


@pytest.fixture(scope="module")
def real(model_dirs: dict[str, Path]) -> list[Tokenizer]:
    pytest.importorskip("fastokens")
    tokenizers_ = [Tokenizer.from_dir(str(path), ["fastokens"]) for path in model_dirs.values()]
    assert {tokenizer.backend for tokenizer in tokenizers_} == {"fastokens"}
    return tokenizers_


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), add_special_tokens=st.booleans())
def test_fast_tokens_library_agrees_where_installed(real: list[Tokenizer], text: str, add_special_tokens: bool) -> None:
    for tokenizer in real:
        assert tokenizer.encode(text, add_special_tokens) == tokenizer.encode_by_library(text, add_special_tokens)


@pytest.mark.parametrize("backends", [(), ("fastokens",)])
def test_text_of_too_many_tokens_is_refused_with_their_number(model_dir: Path, backends: tuple[str, ...]) -> None:
    pytest.importorskip("fastokens")
    tokenizer = Tokenizer.from_dir(str(model_dir), backends)
    text = "a b! " * 40_000
    expected = tokenizer.encode_by_library(text)
    tokenizer.tokens_max = len(expected) - 1
    with pytest.raises(TooManyTokens, match=f"has {len(expected)} tokens") as refused:
        tokenizer.encode(text)
    assert refused.value.count == len(expected)
    parts = f"{text}<|im_end|>{text}<|im_end|>"
    with pytest.raises(TooManyTokens) as refused:
        tokenizer.encode(parts)
    tokenizer.tokens_max = 10 * len(expected)
    assert refused.value.count == len(tokenizer.encode_by_library(parts))
    tokenizer.tokens_max = len(expected)
    assert tokenizer.encode(text) == expected


def test_unsettled_character_in_a_long_text_is_found(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokens, "SEARCH_CHARS", 4)
    pytest.importorskip("fastokens")
    encoder = fast_tokens_for((model_dir / "tokenizer.json").read_bytes())
    assert isinstance(encoder, FastTokens)
    for place in range(13):
        text = "é" * place + "\u0378" + "é" * (12 - place)
        assert encoder.encode(text, 1000) is None, place
    assert encoder.encode("é" * 13, 1000) is not None


@pytest.mark.parametrize(
    ("own", "set_to"), [({}, [("FASTOKENS_BPE_THREADS", "1")]), ({"FASTOKENS_BPE_THREADS": "4"}, [])]
)
def test_library_uses_one_thread_unless_its_variable_is_set(
    double: type[FakeTokenizer], model_dir: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], set_to: object
) -> None:
    monkeypatch.delenv("FASTOKENS_BPE_THREADS", raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    put: list[tuple[str, str]] = []
    fast_tokens_for((model_dir / "tokenizer.json").read_bytes(), lambda name, value: put.append((name, value)))
    assert put == set_to


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_long_text_starts_no_thread_of_the_library(model_dir: Path) -> None:
    pytest.importorskip("fastokens")
    code = f"""
import os
from dynamo.text.tokenizer.tokenizer import Tokenizer
tokenizer = Tokenizer.from_dir({str(model_dir)!r}, ["fastokens"])
assert tokenizer.backend == "fastokens"
before = len(os.listdir("/proc/self/task"))
tokenizer._encoder.encode("The worker asks the router for a block of words. " * 10_000, 1 << 20)
print(before, len(os.listdir("/proc/self/task")))
"""
    variables = {name: value for name, value in os.environ.items() if name != "FASTOKENS_BPE_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"
