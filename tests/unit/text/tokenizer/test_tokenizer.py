"""The tokenizer is the library, only sooner."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.text.tokenizer import word_tokenizer
from dynamo.text.tokenizer.tokenizer import Tokenizer, self_test_texts, spec_of, with_model

ASCII = st.text(st.characters(max_codepoint=127), max_size=200)
WORDS = st.lists(
    st.sampled_from(
        [
            *" \n\t\r'",
            *(
                "  ",
                "\n\n",
                "\r\n",
                "it's",
                "IT'S",
                "they're",
                "don't",
                "12",
                "12345",
                " 1",
                "word",
                " Word",
                "camelCase",
                "ÉCOLE",
            ),
            *(
                "<|im_start|>",
                "<|im_end|>",
                "<think>",
                "<|im",
                "_start|>",
                "<",
                "é",
                "e\u0301",
                "日本",
                "—",
                "…",
                "😀",
                "½",
            ),
            *(
                "\u00a0",
                "\u3000",
                "\u2028",
                "\u180e",
                "\u200b",
                "ſ",
                "'ſ",
                "'K",
                "\u0130",
                "\U0001fae8",
                "\u0345",
                "\x1c",
                "\x85",
            ),
        ]
    ),
    max_size=40,
).map("".join)


@pytest.fixture(scope="module")
def tokenizers_of(model_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_dir(str(path), ["words"]) for name, path in model_dirs.items()}


@pytest.fixture(scope="module")
def tokenizer(tokenizers_of: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_of["qwen"]


def test_tokenizer_supports_every_byte_level_family(tokenizers_of: dict[str, Tokenizer]) -> None:
    assert {name: tokenizer.is_fast for name, tokenizer in tokenizers_of.items()} == dict.fromkeys(tokenizers_of, True)


@pytest.mark.parametrize("family", ["qwen", "llama", "o200k", "gpt2"])
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(ASCII, WORDS, st.text(max_size=60)), add_special_tokens=st.booleans())
def test_tokenizer_ids_equal_those_of_the_library_for_any_text(
    tokenizers_of: dict[str, Tokenizer], family: str, text: str, add_special_tokens: bool
) -> None:
    tokenizer = tokenizers_of[family]
    try:
        expected = tokenizer.encode_by_library(text, add_special_tokens)
    except UnicodeEncodeError:  # A lone surrogate, which JSON decoding never returns.
        return
    assert tokenizer.encode(text, add_special_tokens) == expected
    assert tokenizer.encode(text, add_special_tokens) == expected, "a remembered text is the same"


def test_tokenizer_normalizes_accents_where_configured(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def test_tokenizer_adds_bos_only_on_request(tokenizers_of: dict[str, Tokenizer]) -> None:
    llama = tokenizers_of["llama"]
    bos = llama.token_to_id("<|endoftext|>")
    assert llama.encode("hello", add_special_tokens=True) == [bos, *llama.encode("hello")]


def test_tokenizer_cuts_added_tokens_out_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\n<think>")
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_to_id("<think>")


def test_tokenizer_special_ids_are_those_marked_special(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {
        tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    }


def test_tokenizer_vocabulary_size_is_its_largest_id_plus_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer.token_bytes())
    assert tokenizer.token_bytes()[tokenizer.vocab_size - 1] != b""


def test_tokenizer_cache_is_not_changed_by_the_caller(tokenizer: Tokenizer) -> None:
    text = "A stretch of text that is long enough to be remembered as a whole, and then some."
    expected = tokenizer.encode_by_library(text)
    tokenizer.encode(text).clear()
    tokenizer.encode(text).append(1)
    assert tokenizer.encode(text) == expected


def test_tokenizer_of_another_kind_uses_the_library(sentencepiece_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(str(sentencepiece_dir), ["words"])
    assert not tokenizer.is_fast
    assert tokenizer.encode("The worker") == tokenizer.encode_by_library("The worker")
    assert (tokenizer.cache_entries, tokenizer.cache_hits, tokenizer.cache_misses) == (0, 0, 1), "the text as a whole"


def _changed(model_dir: Path, tmp_path: Path, **changes: object) -> Tokenizer:
    spec = json.loads((model_dir / "tokenizer.json").read_text())
    spec.update(changes)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    return Tokenizer.from_dir(str(tmp_path), ["words"])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_tokenizer_with_unsupported_options_uses_the_library(
    model_dir: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    assert not _changed(model_dir, tmp_path, **changes).is_fast


def test_tokenizer_with_white_space_stripping_tokens_uses_the_library(model_dir: Path, tmp_path: Path) -> None:
    tokens = json.loads((model_dir / "tokenizer.json").read_text())["added_tokens"]
    tokens[0]["rstrip"] = True
    tokenizer = _changed(model_dir, tmp_path, added_tokens=tokens)
    assert not tokenizer.is_fast
    assert tokenizer.encode("<|endoftext|>   x") == tokenizer.encode_by_library("<|endoftext|>   x")


def test_tokenizer_that_differs_at_load_is_reported_and_uses_the_library(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(word_tokenizer.WordTokenizer, "encode", lambda self, text, most: [0] * len(text))
    tokenizer = Tokenizer.from_dir(str(model_dir), ["words"])
    assert not tokenizer.is_fast
    assert "words is not used: its result differs from tokenizers" in caplog.text
    assert tokenizer.encode("hello") == tokenizer.encode_by_library("hello")


def test_tokenizer_ignores_truncation_and_padding_of_the_file(model_dir: Path, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = _changed(model_dir, tmp_path, truncation=truncation)
    text = "é\u0345 many words that are not cut off"
    assert tokenizer.decode(tokenizer.encode_by_library(text)) == unicodedata.normalize("NFC", text)


def test_tokenizer_error_names_a_broken_file(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        _changed(model_dir, tmp_path, model={"type": "Unheard"})


def test_tokenizer_refuses_an_unknown_decoder(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decoder WordPiece is not supported"):
        _changed(model_dir, tmp_path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})


def test_tokenizer_self_test_covers_added_tokens(tokenizer: Tokenizer) -> None:
    assert any("<|im_start|>" in text for text in self_test_texts(["<|im_start|>"]))


def test_tokenizer_reads_a_file_without_its_vocabulary_and_the_vocabulary_where_it_is_needed(model_dir: Path) -> None:
    data = (model_dir / "tokenizer.json").read_bytes()
    spec = spec_of(data, "tokenizer.json")
    assert spec.keys() == json.loads(data).keys() - {"model"}
    assert with_model(spec, data) == json.loads(data)
    with pytest.raises(ConfigError, match="not a JSON object"):
        spec_of(b"[1]", "tokenizer.json")


@pytest.mark.parametrize("backends", [[], ["words"], ["fastokens"], ["compiled"]])
def test_tokenizer_ids_of_a_long_text_equal_those_of_the_library(
    model_dirs: dict[str, Path], backends: list[str]
) -> None:
    text = "<|im_start|>user\n" + "It's a long document, with 12345 words and Umlaute äöü. " * 400
    for path in model_dirs.values():
        tokenizer = Tokenizer.from_dir(str(path), backends)
        assert tokenizer.encode(text) == tokenizer._library.encode(text, add_special_tokens=False).ids
        assert (
            tokenizer.encode(text, add_special_tokens=True)
            == tokenizer._library.encode(text, add_special_tokens=True).ids
        )
