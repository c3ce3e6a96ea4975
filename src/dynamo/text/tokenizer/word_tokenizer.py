"""WordTokenizer: byte-level BPE one word at a time, with a cache of words.

`tokenizers` spends most of its time on bookkeeping that a prompt does not need (offsets, alignments, an object per
token). The tokens of a word depend on the word alone, and words repeat: this module splits the text with the same
regex, looks every word up, and encodes unknown words with the library's own BPE. Equal to the library by construction
if a tokenizer has the form described in `word_tokenizer_for`, and compared with it when the tokenizer is loaded.
"""

import re
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any
from unicodedata import is_normalized

from msgspec import Struct

from dynamo.text.tokenizer import split_pattern

NOT_PLAIN = "its model is not plain BPE"
WORDS_MAX = 1 << 16  # In each of two generations. English text has about 30,000 words; code has more.
WORD_CHARS_MAX = 64  # Longer words rarely repeat.


class WordTokenizer:
    """Text to ids for one tokenizer. Thread-safe; with several threads the counts are approximate."""

    frees_the_interpreter = False

    def __init__(
        self,
        model: Any,
        ascii_words: "re.Pattern[str]",
        settled_words: "re.Pattern[str]",
        added_tokens: Mapping[str, int],
        is_nfc: bool,
    ) -> None:
        self._words = Words(model)
        self._split_ascii = ascii_words.findall
        self._split_settled = settled_words.findall
        self._unsettled = split_pattern.unsettled().search
        self._is_nfc = is_nfc
        self._added = dict(added_tokens)
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._split_added = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if added_tokens else None
        )

    @property
    def cache_entries(self) -> int:
        """Number of cached words."""
        return len(self._words) + len(self._words.older)

    @property
    def cache_bytes(self) -> int:
        """Approximate memory of the cache."""
        return self._words.cache_bytes

    @property
    def cache_hits(self) -> int:
        """Number of words found in the cache."""
        return self._words.lookups - self._words.misses

    @property
    def cache_misses(self) -> int:
        """Number of words encoded by the library."""
        return self._words.misses

    def encode(self, text: str, most: int = sys.maxsize) -> list[int] | int | None:
        """Return the ids, without a template's additions; None for text that only the library may encode.

        `most` has no effect: long texts are encoded by the library.
        """
        if not text.isascii() and (self._unsettled(text) or (self._is_nfc and not is_normalized("NFC", text))):
            return None
        if self._split_added is None:
            return self._stretch(text)
        result: list[int] = []
        is_added = False
        for part in self._split_added(text):
            if is_added:
                result.append(self._added[part])
            elif part:
                ids = self._stretch(part)
                if ids is None:
                    return None
                result += ids
            is_added = not is_added
        return result

    def _stretch(self, text: str) -> list[int] | None:
        """Return the ids of text without added tokens."""
        words = self._split_ascii(text) if text.isascii() else self._split_settled(text)
        if sum(map(len, words)) != len(text):
            return None  # The pattern left a gap, and the library's treatment of gaps is not reproduced here.
        self._words.lookups += len(words)
        return list(chain.from_iterable(map(self._words.__getitem__, words)))


class Words(dict[str, tuple[int, ...]]):
    """Word to ids; unknown words go to the library. When the newer of two generations is full, the older is dropped."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._byte_text = {byte: char for char, byte in byte_of_char().items()}
        self.older: dict[str, tuple[int, ...]] = {}
        self.lookups = 0
        self.misses = 0
        self._bytes_newer = 0
        self._bytes_older = 0

    @property
    def cache_bytes(self) -> int:
        return self._bytes_newer + self._bytes_older

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self.older.get(word)
        if ids is None:
            self.misses += 1
            byte_text = self._byte_text
            ids = tuple(token.id for token in self._model.tokenize("".join([byte_text[b] for b in word.encode()])))
        if len(word) <= WORD_CHARS_MAX:
            if len(self) >= WORDS_MAX:
                self._turn_over()
            self[word] = ids
            # A str and a tuple have headers of about 50 bytes, a dictionary entry about 100; ids are shared or 32.
            self._bytes_newer += 200 + len(word) + 40 * len(ids)
        return ids

    def _turn_over(self) -> None:
        self.older = dict(self)
        self._bytes_older, self._bytes_newer = self._bytes_newer, 0
        self.clear()


class WordForm(Struct, frozen=True):
    """Parts of a tokenizer that encodes every word on its own."""

    split: str
    """The split regex."""
    added: dict[str, int]
    """Added tokens, which are matched exactly as written, and their ids."""
    is_nfc: bool


def word_form_of(spec: Mapping[str, Any]) -> WordForm | str:
    """Return the form of a `tokenizer.json`, whose model is not looked at, or the reason why it has another one.

    The form is one split regex and byte level, no normalizer but NFC, and added tokens that are matched exactly as written.
    Later steps, such as a template that adds tokens, are left to the caller.
    """
    is_nfc = _normalizer_is_nfc(spec.get("normalizer"))
    if is_nfc is None:
        return "its normalizer does more than NFC"
    split = _split_source(spec.get("pre_tokenizer"))
    if split is None:
        return "its pre-tokenizer is not one split and byte level"
    tokens = spec.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in tokens):
        return "an added token strips white space or matches only between words"
    if len({bool(token.get("normalized")) for token in tokens}) > 1:
        return "some added tokens are normalized and others are not"
    if any(not token["content"].isascii() and not is_normalized("NFC", token["content"]) for token in tokens):
        return "an added token is not in normal form"
    return WordForm(split, {token["content"]: int(token["id"]) for token in tokens if token["content"]}, is_nfc)


def word_tokenizer_for(spec: Mapping[str, Any], model: Any) -> WordTokenizer | str:
    """Return a word tokenizer for a `tokenizer.json`, or the reason why there is none.

    It supports byte-level BPE in the form of `word_form_of` whose split regex can be translated.
    """
    bpe = spec["model"]
    if bpe.get("type") != "BPE" or any(
        bpe.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return NOT_PLAIN
    form = word_form_of(spec)
    if isinstance(form, str):
        return form
    ascii_words, settled_words = split_pattern.ascii_pattern(form.split), split_pattern.settled_pattern(form.split)
    if ascii_words is None or settled_words is None:
        return "its split regex may have another meaning in Python's `re`"
    return WordTokenizer(model, ascii_words, settled_words, form.added, form.is_nfc)


def byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: every byte as a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable}
    chars.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return chars


def _normalizer_is_nfc(normalizer: Mapping[str, Any] | None) -> bool | None:
    """Return True for NFC, False for none, None for anything else."""
    if normalizer is None:
        return False
    if normalizer.get("type") == "NFC":
        return True
    if normalizer.get("type") == "Sequence":
        kinds = [_normalizer_is_nfc(part) for part in normalizer.get("normalizers", [])]
        return None if None in kinds else any(kinds)
    return None


def _split_source(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return the regex of a pre-tokenizer that splits once and then maps bytes; None for anything else."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        is_plain = not pre_tokenizer.get("add_prefix_space", True) and pre_tokenizer.get("use_regex", True)
        return split_pattern.GPT2 if is_plain else None
    parts = pre_tokenizer.get("pretokenizers", [])
    if pre_tokenizer["type"] != "Sequence" or [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = parts
    if byte_level.get("add_prefix_space", True) or byte_level.get("use_regex", True):
        return None
    if (split.get("behavior"), bool(split.get("invert"))) not in (("Isolated", False), ("Removed", True)):
        return None
    source = split["pattern"].get("Regex")
    return source if isinstance(source, str) else None
