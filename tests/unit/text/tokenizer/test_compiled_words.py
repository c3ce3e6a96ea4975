"""The compiled encoder gives the library's ids, whatever the text, and leaves to it what it does not know."""

import json
import sys
import threading
import unicodedata
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.text.tokenizer.test_tokenizer import ASCII, WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dynamo.text.tokenizer import compiled_words, split_pattern
from dynamo.text.tokenizer import tokenizer as our_tokenizer
from dynamo.text.tokenizer.compiled_words import ALTERNATIVES, CompiledWords, compiled_words_for, is_nfc, rules_of

pytest.importorskip("dynamo.text.tokenizer._compiled_words", reason="it is built where there is a compiler")

MOST = 1 << 30
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt2": split_pattern.GPT2,
    "qwen": QWEN,
    "llama": QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "marks": QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    "plain": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
}
SAMPLE = [
    "The worker asks the router for a block of words, and they're given 12345 of them.\n\n    def f(x):\r\n        return x\n",
    "Быстрая коричневая лиса; 你好，世界！ नमस्ते दुनिया. L'été déjà. IT'S DON'T we'll I've 😀😀",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im|>"]


def trained(split: str, is_normalized: bool = False) -> Tokenizer:
    """Return a small tokenizer with a split regex."""
    made = Tokenizer(models.BPE())
    if is_normalized:
        made.normalizer = normalizers.NFC()
    parts = [
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    made.train_from_iterator(SAMPLE * 3, trainer=trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


def compiled(library: Tokenizer, change: Callable[[dict[str, Any]], object] = lambda _: None) -> CompiledWords | str:
    """Return the compiled encoder of a tokenizer whose file is changed first, or the reason why there is none."""
    spec = json.loads(library.to_str())
    change(spec)
    return compiled_words_for(spec, json.dumps(spec).encode())


Pairs = dict[str, tuple[Tokenizer, CompiledWords]]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    made: Pairs = {}
    for name, split in SPLITS.items():
        library = trained(split, is_normalized=name == "qwen")
        encoder = compiled(library)
        assert isinstance(encoder, CompiledWords), encoder
        made[name] = library, encoder
    return made


def ids_of(library: Tokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


ANY = st.one_of(ASCII, WORDS, st.text(st.characters(exclude_categories=["Cs"]), max_size=60))


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.one_of(ANY, st.sampled_from(SPECIAL)), max_size=4).map("".join))
def test_compiled_ids_equal_those_of_the_library_for_any_text(pairs: Pairs, name: str, text: str) -> None:
    library, encoder = pairs[name]
    ids = encoder.encode(text, MOST)
    if ids is None:
        assert split_pattern.unsettled().search(text) or not is_nfc(text) or name == "plain", "only these are left out"
        return
    assert ids == ids_of(library, text)
    assert encoder.encode(text, MOST) == ids, "from the cache"
    data = encoder._encode_long(text)
    assert data is not None
    assert array("I", data).tolist() == ids


@pytest.mark.parametrize("name", SPLITS)
def test_every_settled_character_is_split_as_by_the_library(pairs: Pairs, name: str) -> None:
    library, encoder = pairs[name]
    spans = split_pattern.settled()
    chars = [chr(code) for span in spans for code in range(span.start, span.stop, 7)]
    text = "\n".join(f" {char}a{char}1'{char}" for char in chars if is_nfc(char))
    for at in range(0, len(text), 4000):
        part = text[at : at + 4000]
        ids = encoder.encode(part, MOST)
        assert ids is None or ids == ids_of(library, part), at
        assert ids is not None or not is_nfc(part) or name == "plain", at


@pytest.mark.parametrize(
    "word", ["a" * 5000, "ab" * 70, "theworkerrouterblock" * 300, "é" * 64, "x" * 63 + "é", "é" * 32 + "a"]
)
def test_long_words_are_merged_as_by_the_library_and_not_cached(pairs: Pairs, word: str) -> None:
    library, encoder = pairs["gpt2"]
    entries = encoder.cache_entries
    assert encoder.encode(word, MOST) == ids_of(library, word)
    assert encoder.cache_entries == entries + (len(word.encode()) <= 64)


def test_longest_added_token_at_a_place_is_used(pairs: Pairs) -> None:
    library, encoder = pairs["qwen"]
    more = trained(QWEN)
    more.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_end|>\n", "[a]", "[a", "é€")]
    )
    for one, text in ((library, "<|im|><|im_end|><|im_en"), (more, "<|im_end|>\n<|im_end|>[a][a [é€é")):
        used = encoder if one is library else compiled(one)
        assert isinstance(used, CompiledWords)
        assert used.encode(text, MOST) == ids_of(one, text)


def test_cache_counts_words_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_words, "SLOTS_MAX", 2048)
    library = trained(QWEN)
    encoder = compiled(library)
    assert isinstance(encoder, CompiledWords)
    text = "unheardof " * 20
    assert encoder.encode(text, MOST) == ids_of(library, text)
    assert (encoder.cache_misses, encoder.cache_hits) == (3, 18), (
        "without and with its leading space, and the last space"
    )
    assert 0 < encoder.cache_entries <= 3
    for number in range(3000):
        text = f"word{chr(97 + number % 26)}{chr(97 + number // 26 % 26)}{chr(97 + number // 676)} and so on"
        assert encoder.encode(text, MOST) == ids_of(library, text)
        assert encoder.cache_entries <= 1025
        assert encoder.cache_bytes < 300_000


def test_long_text_is_encoded_apart_from_the_cache_and_may_have_too_many_tokens(pairs: Pairs) -> None:
    library, encoder = pairs["llama"]
    text = "It's a long document, with 12345 words and Umlaute äöü. " * 400
    expected = ids_of(library, text)
    entries = encoder.cache_entries
    assert encoder.encode(text, len(expected)) == expected
    assert encoder.encode(text, len(expected) - 1) == len(expected)
    assert encoder.cache_entries == entries
    assert encoder.encode(text + "\u0378", MOST) is None


def test_threads_that_encode_long_and_short_texts_at_once_get_the_same_ids(pairs: Pairs) -> None:
    library, encoder = pairs["qwen"]
    long, short = "".join(f"long word{number} " for number in range(3000)), "It's a short text, encoded in between. "
    expected = [ids_of(library, long), ids_of(library, short)]
    wrong: list[str] = []

    def work(text: str, ids: list[int], times: int) -> None:
        wrong.extend(text[:20] for _ in range(times) if encoder.encode(text, MOST) != ids)

    threads = [threading.Thread(target=work, args=(long, expected[0], 5)) for _ in range(3)]
    threads += [threading.Thread(target=work, args=(short, expected[1], 500))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_characters_whose_class_may_differ_are_left_to_the_library(pairs: Pairs) -> None:
    for _, encoder in pairs.values():
        for text in ("'\u017f", "\U0001fae8", "\u0378", "a\ud800", "\U0010ffff", "fine \u0378 fine"):
            assert encoder.encode(text, MOST) is None, text
    assert pairs["qwen"][1].encode("cafe\u0301", MOST) is None, "it is normalized first"
    assert pairs["gpt2"][1].encode("cafe\u0301", MOST) is not None


def test_normal_form_of_a_long_text_is_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_words, "SEARCH_CHARS", 4)
    for place in range(13):
        assert not is_nfc("x" * place + "e\u0301" + "x" * (12 - place)), place
        assert is_nfc("é" * place + "日本x" + "é" * (12 - place)), place
        assert is_nfc("가" * place + "각" + "日" * (12 - place)), place
        assert not is_nfc("가" * place + "\u1100\u1161\u11a8" + "가" * (12 - place)), place
    assert is_nfc("e" + "\u0332" * 6)
    assert not is_nfc("e" + "\u0332" * 20), "no place at which it can be divided: it is left to the library"


def test_pieces_of_a_text_begin_with_characters_that_are_never_composed_with_others_before_them() -> None:
    composed = {
        unicodedata.normalize("NFD", chr(code)) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000
    }
    later = {char for text in composed for char in text[1:]}
    assert not {char for char in later if compiled_words._joins_nothing_before(char)}


def test_classes_of_characters() -> None:
    classes = split_pattern.character_classes()
    found = {char: classes[ord(char)] for char in "a日é5½ \n\r\t\u00a0\u0301'\u0378\u017f"}
    letter, number, space, newline = (
        split_pattern.LETTER,
        split_pattern.NUMBER,
        split_pattern.SPACE,
        split_pattern.NEWLINE,
    )
    assert found == {
        "a": letter, "日": letter, "é": letter, "5": number, "½": number, " ": space, "\n": newline, "\r": newline, "\t": space,
        "\u00a0": space, "\u0301": split_pattern.MARK, "'": split_pattern.OTHER, "\u0378": 0, "\u017f": 0,
    }  # fmt: skip


def test_rules_follow_the_alternatives_of_a_split_regex() -> None:
    assert list(rules_of(QWEN)) == [2, 4, 7, 10, 12, 13, 14]
    assert list(rules_of(split_pattern.GPT2)) == [1, 3, 6, 9, 13, 14]
    assert rules_of(QWEN + r"|\d") == b""
    assert rules_of("|".join([r"\s+"] * 16)) == b""
    assert len(set(ALTERNATIVES.values())) == len(ALTERNATIVES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda spec: spec["model"].update(dropout=0.1), "plain BPE"),
        (lambda spec: spec["model"].update(type="Unigram"), "plain BPE"),
        (lambda spec: spec["model"].update(merges=[1]), "not in its vocabulary"),
        (lambda spec: spec["model"]["vocab"].pop("a"), "not in its vocabulary"),
        (lambda spec: spec["model"]["merges"].append(["a", "missing"]), "not in its vocabulary"),
        (lambda spec: spec["model"]["merges"].append("a b c"), "not in its vocabulary"),
        (lambda spec: spec["model"]["vocab"].update(a=-1), "not in its vocabulary"),
        (lambda spec: spec["model"]["vocab"].update(a=1 << 31), "too large"),
        (lambda spec: spec["added_tokens"][0].update(id=1 << 31), "too large"),
        (
            lambda spec: (spec["model"].update(ignore_merges=True), spec["model"]["vocab"].update(zz=1 << 31)),
            "too large",
        ),
        (lambda spec: spec["added_tokens"][0].update(lstrip=True), "strips white space"),
        (lambda spec: spec.update(normalizer={"type": "Lowercase"}), "more than NFC"),
        (lambda spec: spec["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"), "not one of those"),
    ],
)
def test_tokenizer_of_another_form_is_left_to_the_next_encoder(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    found = compiled(trained(QWEN), change)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", [list, " ".join])
def test_merges_are_decoded_in_parts(form: Callable[[list[str]], Any], indent: int | None) -> None:
    texts = ["a", '"', "\\", "],", '"]', '", "', "[", "é", "b1", "Z", '\\"', "\\\\", ","]
    merges = [form([left.replace(" ", ""), right.replace(" ", "")]) for left in texts for right in texts]
    data = json.dumps(merges, indent=indent).encode()
    for size in (0, 1, 2, 10, 100, 1 << 20):
        parts = [
            [form(list(one)) if form is list else one for one in part] for part in compiled_words._parts(data, size)
        ]
        assert [one for part in parts for one in part] == merges
        assert size > 100 or len(parts) > 2
    assert list(compiled_words._parts(b"[]")) == [[]]


def test_merges_may_be_texts_with_a_space(pairs: Pairs) -> None:
    library, encoder = pairs["gpt2"]

    def change(spec: dict[str, Any]) -> None:
        spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]

    older = compiled(library, change)
    assert isinstance(older, CompiledWords)
    assert older.encode(SAMPLE[0], MOST) == encoder.encode(SAMPLE[0], MOST)


def test_words_that_are_tokens_are_used_where_the_model_ignores_merges() -> None:
    spec = json.loads(trained(QWEN).to_str())
    vocab = spec["model"]["vocab"]
    words = ["zzz", "Ġqqq", "ĠĠĠĠĠĠĠ", "w" * 70, "ÃĬ" * 8, "你", "the"]
    for word in words:
        vocab.setdefault(word, len(vocab))
    spec["model"]["ignore_merges"] = True
    for at, token in enumerate(spec["added_tokens"]):
        token["id"] = len(vocab) + at
    data = json.dumps(spec)
    library, encoder = Tokenizer.from_str(data), compiled_words_for(spec, data.encode())
    assert isinstance(encoder, CompiledWords)
    text = "w" * 70 + " zz\nzzz qqq qqqq the         x " + "w" * 70 + " " + "w" * 71 + " ÊÊÊÊÊÊÊÊ 你<|im_end|>zzz"
    for _ in range(2):
        ids = encoder.encode(text, MOST)
        assert ids == ids_of(library, text)
        assert {vocab["zzz"], vocab["Ġqqq"], vocab["w" * 70]} <= set(ids or [])
    spec["model"]["ignore_merges"] = False
    plain = compiled_words_for(spec, json.dumps(spec).encode())
    assert isinstance(plain, CompiledWords)
    assert plain.encode("zzz", MOST) != encoder.encode("zzz", MOST)


def test_parts_of_a_wrong_form_are_refused() -> None:
    from dynamo.text.tokenizer._compiled_words import Words

    classes, byte_ids = split_pattern.character_classes(), bytes(1024)
    assert Words(b"\x01", classes, byte_ids, b"", [(b"a", 1)], [], 1024, 0).encode("a") == [1]
    for parts in (
        (b"\x0f", classes, byte_ids, b"", [], [], 1024, 0),
        (b"\x01" * 16, classes, byte_ids, b"", [], [], 1024, 0),
        (b"\x01", b"", byte_ids, b"", [], [], 1024, 0),
        (b"\x01", classes, b"", b"", [], [], 1024, 0),
        (b"\x01", classes, byte_ids, b"abc", [], [], 1024, 0),
        (b"\x01", classes, byte_ids, b"", [], [], 1, 0),
        (b"\x01", classes, byte_ids, b"", [(b"", 1)], [], 1024, 0),
    ):
        with pytest.raises(ValueError, match=r"wrong form|empty"):
            Words(*parts)
    with pytest.raises(TypeError):
        Words(b"\x01", classes, byte_ids, b"", [("a", "b", "c")], [], 1024, 0)
    with pytest.raises(TypeError):
        Words(b"\x01", classes, byte_ids, b"", [], [], 1024, 0).encode(b"a")


def test_compiled_encoder_is_preferred_and_skipped_where_it_is_not_compiled(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert our_tokenizer.Tokenizer.from_dir(str(model_dir)).backend == "compiled"
    monkeypatch.setitem(sys.modules, "dynamo.text.tokenizer._compiled_words", None)
    assert our_tokenizer.Tokenizer.from_dir(str(model_dir), ["compiled", "words"]).backend == "words"
