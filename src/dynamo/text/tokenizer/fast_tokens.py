"""FastTokens: the optional `fastokens` library with the interface of our own word tokenizer.

It implements in Rust what `word_tokenizer` implements in Python, including the word cache, in a tenth of the time. Its
rules for case folding differ from those of `tokenizers`, so only ASCII and settled text is passed to it.
"""

import os
from collections.abc import Callable
from typing import Any

from dynamo.core.config import environ
from dynamo.core.slices import joined
from dynamo.text.tokenizer import split_pattern

LIST_CHARS = 1 << 16
"""Characters of a text whose tokens are few enough for a list, whatever the text."""
SEARCH_CHARS = 1 << 18
"""Characters searched at a time, within about a millisecond."""
THREADS_VARIABLE = "FASTOKENS_BPE_THREADS"
"""Number of the library's threads for one long text, by default one per core. Each keeps some 30 MB after its first text, and
a text of 200,000 characters takes three times the processor time with two, as they wait for each other in a loop."""


class FastTokens:
    """Text to ids for one tokenizer. Its cache is bounded by the library and not counted here."""

    frees_the_interpreter = True
    cache_entries = 0
    cache_bytes = 0
    cache_hits = 0
    cache_misses = 0

    def __init__(self, library: Any) -> None:
        self._encode = library.encode
        self._encode_flat = getattr(library, "encode_batch_flat", None)  # Earlier versions do not have it.
        self._unsettled = split_pattern.unsettled().search

    def encode(self, text: str, most: int) -> list[int] | int | None:
        """Return the ids, without a template's additions, or only their number if there are more than `most`.

        Return None for text that only `tokenizers` may encode.
        """
        if not text.isascii() and self._has_unsettled(text):
            return None
        if self._encode_flat is None or len(text) <= LIST_CHARS:
            ids: list[int] = self._encode(text).ids
            return ids
        # A buffer first: `encode` returns a list, whatever its size, and a list of more than `most` ids is not needed.
        flat = memoryview(self._encode_flat([text])[0]).cast("I")
        return joined(flat) if len(flat) <= most else len(flat)

    def _has_unsettled(self, text: str) -> bool:
        """Search in pieces, between which other threads may run."""
        return any(self._unsettled(text, at, at + SEARCH_CHARS) for at in range(0, len(text), SEARCH_CHARS))


def fast_tokens_for(data: bytes, put: Callable[[str, str], None] = os.putenv) -> FastTokens | str:
    """Return an encoder for a `tokenizer.json`, or the reason why it cannot be used. `put` sets a variable for libraries."""
    if THREADS_VARIABLE not in environ():
        put(THREADS_VARIABLE, "1")  # Other requests use the other cores.
    try:
        import fastokens
    except ImportError:
        return "it is not installed"
    try:
        library = fastokens.Tokenizer.from_json_str(data.decode())
        library.no_truncation()
        library.no_padding()
    except Exception as error:  # noqa: BLE001 - the library does not document its errors for unsupported tokenizers
        return str(error)
    return FastTokens(library)
