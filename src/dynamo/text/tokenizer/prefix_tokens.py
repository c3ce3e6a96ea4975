r"""PrefixTokens: cache of token ids for stretches of text between special tokens; only new stretches are tokenized.

    <|im_start|>system\nBe brief.<|im_end|>      cached
    \n<|im_start|>user\nHello<|im_end|>          seen once before: tokenized and cached
    \n<|im_start|>user\nAnd now?<|im_end|>       new: tokenized, and its hash stored

A tokenizer splits off special tokens before any other step and encodes the text between them independently, so the ids
of a text are the concatenated ids of its stretches. Where that might not hold (a special token that strips white space
around it, or that overlaps another) the text is not cut; a self-test checks it when a tokenizer is loaded
(`text.tokenizer.tokenizer`). Thread-safe.

Most prompts occur once. Caching them would evict recurring ones, so a stretch is cached at its second occurrence.
"""

import contextlib
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument

BYTES_MAX = 50_000_000  # As upstream: ids of about three million tokens.
ENTRY_SHARE = 8  # A stretch takes at most 1/8 of the cache, so that one document does not evict every conversation.
ENTRY_BYTES = 200  # Overhead of an entry in addition to its text and ids: the table, the list, the key.
SEEN = 1 << 16  # Hashes of stretches seen once, half a megabyte: the last turns of about ten thousand conversations.
SEARCH_CHARS = 1 << 18  # Characters searched for special tokens at a time, within a millisecond or two.
ID_BYTES = 8  # Size of an id in a list: the number itself is shared.


class TooManyTokens(InvalidArgument):
    """A text has more tokens than the tokenizer may return."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(f"Validation: a text has {count} tokens, and at most {most} are allowed")
        self.count = count


class PrefixTokens:
    """Text to ids for one tokenizer."""

    def __init__(self, encode: Callable[[str], Sequence[int]], cuts: Sequence[str], bytes_max: int = BYTES_MAX) -> None:
        """`encode` tokenizes new stretches; `cuts` comes from `cuts_of`."""
        self._encode = encode
        pattern = re.compile(alternatives(cuts))
        self._cut, self._search = pattern.finditer, pattern.search
        self._cut_chars = max(map(len, cuts), default=0)
        self._bytes_max = bytes_max
        self._stretches: OrderedDict[str, list[int]] = OrderedDict()
        """Cached stretches, least recently used first."""
        self._numbers: dict[int, int] = {}
        """Every id in a cached stretch, so that equal ids share one object."""
        self._seen = array("q", bytes(8 * SEEN))
        """Hashes of stretches seen once, each in its slot until another replaces it."""
        self._lock = threading.Lock()
        self.cache_bytes = 0
        """Approximate memory of the cached stretches."""
        self.cache_hits = 0
        self.cache_misses = 0

    @property
    def cache_entries(self) -> int:
        """Number of cached stretches."""
        return len(self._stretches)

    def encode(self, text: str, most: int = sys.maxsize) -> list[int]:
        """Return the ids, without a template's additions. Raise `TooManyTokens` for more than `most`."""
        ids: list[int] = []
        excess = 0
        """Tokens of a text that has too many: they are only counted."""
        for stretch in self._stretches_of(text):
            try:
                ids += self._ids_of(stretch)
            except TooManyTokens as error:
                excess += error.count
            if excess or len(ids) > most:
                excess += len(ids)
                ids = []
        if excess:
            raise TooManyTokens(excess, most)
        return ids

    def _stretches_of(self, text: str) -> Iterator[str]:
        """Yield the parts of a text; each but the last ends with a special token."""
        at = 0
        for cut in self._cut(text) if len(text) <= SEARCH_CHARS else self._cut_long(text):
            end = cut.end()
            yield text[at:end]
            at = end
        if at < len(text):
            yield text[at:]

    def _cut_long(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches in a long text, searched in pieces, between which other threads may run."""
        at = 0
        while at < len(text):
            end = at + SEARCH_CHARS
            found = self._search(text, at, end + self._cut_chars)
            if found is None or found.start() >= end:  # A match beyond the end might be one of a longer text.
                at = end
            else:
                yield found
                at = found.end()

    def _ids_of(self, stretch: str) -> Sequence[int]:
        known = self._stretches.get(stretch)
        if known is None:
            self.cache_misses += 1
            ids = self._encode(stretch)
            mark = hash(stretch)
            if self._seen[mark % SEEN] == mark:
                self._remember(stretch, ids)
            else:
                self._seen[mark % SEEN] = mark
            return ids
        self.cache_hits += 1
        with contextlib.suppress(KeyError):  # Another thread may have evicted it.
            self._stretches.move_to_end(stretch)
        return known

    def _remember(self, stretch: str, ids: Sequence[int]) -> None:
        size = _size(stretch, ids)
        if size > self._bytes_max // ENTRY_SHARE:
            return
        with self._lock:
            if stretch in self._stretches:
                return
            self._stretches[stretch] = list(map(self._numbers.setdefault, ids, ids))
            self.cache_bytes += size
            while self.cache_bytes > self._bytes_max:
                self.cache_bytes -= _size(*self._stretches.popitem(last=False))


def cuts_of(added_tokens: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the special tokens of a `tokenizer.json` after which text may be cut; none if that is not safe.

    Such a token is matched wherever it occurs: no other token contains it, or may start before it and overlap it.
    """
    tokens = list(added_tokens)
    if any(token.get("single_word") for token in tokens):
        return []
    overlapped = _overlapped({str(token["content"]) for token in tokens if token["content"]})
    return [
        text
        for token in tokens
        if token.get("special")
        and not any(token.get(flag) for flag in ("lstrip", "rstrip", "normalized"))
        and (text := str(token["content"]))
        and not text[0].isspace()
        and not text[-1].isspace()
        and text not in overlapped
    ]


def _overlapped(texts: set[str]) -> set[str]:
    """Return the texts that lie inside another, or start with the end of another or of themselves."""
    begun_by: dict[str, set[str]] = {}
    for text in texts:
        for length in range(1, len(text)):
            begun_by.setdefault(text[:length], set()).add(text)
    lengths = {len(text) for text in texts}
    found: set[str] = set()
    for other in texts:
        if other in begun_by:
            found.add(other)
        for start in range(1, len(other)):
            found |= begun_by.get(other[start:], set())
            found |= {other[start : start + length] for length in lengths if start + length <= len(other)} & texts
    return found


def alternatives(texts: Sequence[str]) -> str:
    """Return a regex for any of these texts that reads each character once, however many texts there are."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    parts = [re.escape(first) + alternatives(rests) for first, rests in sorted(branches.items())]
    if not parts:
        return ""
    optional = "?" if "" in texts else ""
    return parts[0] if len(parts) == 1 and not optional else f"(?:{'|'.join(parts)}){optional}"


def _size(stretch: str, ids: Sequence[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(stretch) + ID_BYTES * len(ids)
