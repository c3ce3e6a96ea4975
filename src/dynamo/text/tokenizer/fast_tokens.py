"""FastTokens: the optional `fastokens` library behind the same door as our own word tokenizer.

It does in Rust what `word_tokenizer` does in Python, remembered words included, and takes a tenth of the time. Where
case folding is involved it follows other rules than `tokenizers`, so only ASCII and settled text is given to it.
"""

from typing import Any

from dynamo.text.tokenizer import split_pattern


class FastTokens:
    """Text to ids for one tokenizer. What it remembers is bounded by the library and not counted here."""

    frees_the_interpreter = True
    cache_entries = 0
    cache_bytes = 0
    cache_hits = 0
    cache_misses = 0

    def __init__(self, library: Any) -> None:
        self._encode = library.encode
        self._unsettled = split_pattern.unsettled().search

    def encode(self, text: str) -> list[int] | None:
        """The ids, without what a template adds; None for text that only `tokenizers` may judge."""
        if not text.isascii() and self._unsettled(text):
            return None
        ids: list[int] = self._encode(text).ids
        return ids


def fast_tokens_for(data: bytes) -> FastTokens | str:
    """The library for a `tokenizer.json`, or why it is not used."""
    try:
        import fastokens
    except ImportError:
        return "it is not installed"
    try:
        library = fastokens.Tokenizer.from_json_str(data.decode())
        library.no_truncation()
        library.no_padding()
    except Exception as error:  # It does not say what it raises for a tokenizer that it does not know.
        return str(error)
    return FastTokens(library)
