"""CompiledWords: byte-level BPE one word at a time, in C, with the interface of `word_tokenizer.WordTokenizer`.

`_compiled_words.c` is built where a compiler is available at installation. It supports the split regexes of the usual model
families, each as a list of rules; other tokenizers are left to the next encoder. It takes a small part of the memory of the
library `fastokens` (docs/decisions/0013).
"""

import os
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any
from unicodedata import is_normalized

import msgspec

from dynamo.core.codec import UNREADABLE
from dynamo.core.slices import joined
from dynamo.text.tokenizer import split_pattern
from dynamo.text.tokenizer.word_tokenizer import NOT_PLAIN, byte_of_char, word_form_of

HELD_CHARS = 1 << 13
"""Characters of a text that is encoded with the interpreter locked, within 0.1 ms."""
SEARCH_CHARS = 1 << 18
"""Characters whose normal form is checked at a time, within a millisecond or two."""
SLOTS_MAX = 1 << 16
"""Slots of the cache of words, at most half of them used. English text has about 30,000 words."""

HANGUL_PARTS = frozenset(map(chr, range(0x1100, 0x1200)))
"""Letters that are composed to syllables."""

ALTERNATIVES = {
    "'s|'t|'re|'ve|'m|'ll|'d": 1,
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)": 2,
    r" ?\p{L}+": 3,
    r"[^\r\n\p{L}\p{N}]?\p{L}+": 4,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+": 5,
    r" ?\p{N}+": 6,
    r"\p{N}": 7,
    r"\p{N}{1,3}": 8,
    r" ?[^\s\p{L}\p{N}]+": 9,
    r" ?[^\s\p{L}\p{N}]+[\r\n]*": 10,
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*": 11,
    r"\s*[\r\n]+": 12,
    r"\s+(?!\S)": 13,
    r"\s+": 14,
}
"""Alternatives of split regexes, with the numbers of their rules in `_compiled_words.c`."""
RULES_MAX = 15

PART_BYTES = 1 << 16
"""Bytes of the merges that are decoded at a time."""
PAIR_END, TEXT_END = re.compile(rb'[0-9A-Za-z]"\s*\]\s*,'), re.compile(rb'[0-9A-Za-z]"\s*,')
"""End of a merge of either form. The quote ends a text: one that begins a text is not preceded by a letter."""


class CompiledWords:
    """Text to ids for one tokenizer. Thread-safe."""

    frees_the_interpreter = True

    def __init__(self, words: Any, is_nfc: bool) -> None:
        self._encode = words.encode
        self._encode_long = words.encode_long
        self._counts = words.counts
        self._is_nfc = is_nfc

    @property
    def cache_entries(self) -> int:
        """Number of cached words."""
        return int(self._counts()[0])

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return int(self._counts()[1])

    @property
    def cache_hits(self) -> int:
        """Number of words found in the cache."""
        return int(self._counts()[2])

    @property
    def cache_misses(self) -> int:
        """Number of words encoded with the merges."""
        return int(self._counts()[3])

    def encode(self, text: str, most: int) -> list[int] | int | None:
        """Return the ids, without a template's additions, or only their number if there are more than `most`.

        Return None for text that only the library may encode.
        """
        if self._is_nfc and not text.isascii() and not is_nfc(text):
            return None
        if len(text) <= HELD_CHARS:
            ids: list[int] | None = self._encode(text)
            return ids
        data = self._encode_long(text)
        if data is None:
            return None
        flat = memoryview(data).cast("I")
        return joined(flat) if len(flat) <= most else len(flat)


class _Model(msgspec.Struct):
    """Model of a `tokenizer.json`."""

    type: str = ""
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False
    """Whether a word that is a token is encoded as that token, even if the merges do not lead to it."""
    vocab: dict[str, int] = {}
    merges: msgspec.Raw = msgspec.Raw(b"[]")


_decode_merges = msgspec.json.Decoder(list[tuple[str, str] | str]).decode


class _TokenizerFile(msgspec.Struct):
    model: _Model


def compiled_words_for(spec: Mapping[str, Any], data: bytes) -> CompiledWords | str:
    """Return an encoder for a `tokenizer.json`, parsed and plain, or the reason why there is none.

    It supports byte-level BPE in the form of `word_form_of` with a split regex of `ALTERNATIVES`. The parsed file may lack
    the model.
    """
    try:
        from dynamo.text.tokenizer._compiled_words import Words
    except ImportError:
        return "it is not compiled"
    form = word_form_of(spec)
    if isinstance(form, str):
        return form
    rules = rules_of(form.split)
    if not rules:
        return "its split regex is not one of those that are compiled"
    try:
        model = msgspec.json.decode(data, type=_TokenizerFile).model
    except UNREADABLE:
        return NOT_PLAIN
    is_plain = model.type == "BPE" and not (
        model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix
    )
    if not is_plain:
        return NOT_PLAIN
    try:
        byte_ids, merges = _byte_ids(model.vocab), _merges(model)
    except (KeyError, ValueError, OverflowError):
        return "a byte or the result of a merge is not in its vocabulary"
    added = [(text.encode(), token_id) for text, token_id in form.added.items()]
    whole = _whole(model.vocab) if model.ignore_merges else []
    seed = int.from_bytes(os.urandom(8), "little")  # Clients cannot choose words that fill the same slots.
    classes = split_pattern.character_classes()
    try:
        words = Words(rules, classes, byte_ids, merges, added, whole, SLOTS_MAX, seed)
    except OverflowError:
        return "an id is too large"
    return CompiledWords(words, form.is_nfc)


def rules_of(split: str) -> bytes:
    """Return the numbers of the rules for a split regex, in its order; empty if it has any other alternative."""
    rules = bytearray()
    rest = split
    while rest:
        known = [one for one in ALTERNATIVES if rest == one or rest.startswith(f"{one}|")]
        if not known:
            return b""
        longest = max(known, key=len)
        rules.append(ALTERNATIVES[longest])
        rest = rest[len(longest) + 1 :]
    return bytes(rules) if len(rules) <= RULES_MAX else b""


def is_nfc(text: str) -> bool:
    """Return whether a text is certainly in normal form C.

    Other threads may run while a long text is checked, in pieces that end where nothing joins. A text without such a place in a whole
    piece, for example of combining marks, is not checked.
    """
    at = 0
    while at < len(text):
        end, last = at + SEARCH_CHARS, at + 2 * SEARCH_CHARS
        while end < len(text) and not _joins_nothing_before(text[end]):
            end += 1
            if end == last:
                return False
        if not is_normalized("NFC", text[at:end]):
            return False
        at = end
    return True


def _joins_nothing_before(char: str) -> bool:
    """Return whether a character is never composed with those before it: ASCII, and letters except the parts of Hangul syllables."""
    return char.isascii() or (char.isalpha() and char not in HANGUL_PARTS)


def _byte_ids(vocab: Mapping[str, int]) -> bytes:
    """Return the id of the token of every byte. Raise `KeyError`."""
    ids = array("I", bytes(4 * 256))
    for char, byte in byte_of_char().items():
        ids[byte] = vocab[char]
    return ids.tobytes()


def _merges(model: _Model) -> bytes:
    """Return the ids of the left, the right and the joined token of every merge. Raise `KeyError` or `ValueError`."""
    vocab, ids = model.vocab, array("I")
    for merges in _parts(bytes(model.merges)):
        for merge in merges:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            ids.extend((vocab[left], vocab[right], vocab[left + right]))
    return ids.tobytes()


def _parts(merges: bytes, part_bytes: int = PART_BYTES) -> Iterator[list[tuple[str, str] | str]]:
    """Yield the merges of an array in JSON in parts. Raise `ValueError`.

    A merge is a pair, in older files one text with a space. As objects, all merges would take more memory than the tokenizer.
    """
    at = merges.index(b"[") + 1
    merge_end = PAIR_END if merges[at : at + 80].lstrip().startswith(b"[") else TEXT_END
    while at:
        found = merge_end.search(merges, at + part_bytes)
        end = merges.rindex(b"]") if found is None else found.end() - 1  # Without the comma.
        yield _decode_merges(b"[%b]" % merges[at:end])
        at = 0 if found is None else found.end()


def _whole(vocab: Mapping[str, int]) -> list[tuple[bytes, int]]:
    """Return the tokens that consist of bytes, with their ids."""
    byte_of = byte_of_char()
    return [
        (bytes(map(byte_of.__getitem__, token)), id_) for token, id_ in vocab.items() if byte_of.keys() >= set(token)
    ]
