r"""PrefixTokens: what comes again is remembered, cut at special tokens; a conversation pays for what is new.

    <|im_start|>system\nBe brief.<|im_end|>      known
    \n<|im_start|>user\nHello<|im_end|>          seen once: tokenized, and remembered
    \n<|im_start|>user\nAnd now?<|im_end|>       new: tokenized, and its hash kept

A tokenizer takes special tokens out of the text before it does anything else, and treats what stands between them each
for itself: so the ids of a text are those of its stretches, one after the other. Where that might not hold (a special
token that takes white space with it, or that overlaps another) the text is not cut; and when a tokenizer is loaded it
is tried (`llm.tokenizer`). May be called from several threads.

Most prompts come once. They are not remembered, or they would push out those that come again: a stretch is kept when it
is met the second time.
"""

import contextlib
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

BYTES_MAX = 50_000_000  # As upstream: ids of some three million tokens.
ENTRY_SHARE = 8  # No stretch takes more than this part of it: one document must not push out every conversation.
ENTRY_BYTES = 200  # Of an entry beside its text and ids: the table, the list, the key.
SEEN = 1 << 16  # Hashes of what was met once, half a megabyte: of the last turns of some ten thousand conversations.
ID_BYTES = 8  # Of an id in a list: the number itself is shared.


class PrefixTokens:
    """Text to ids for one tokenizer."""

    def __init__(self, encode: Callable[[str], Sequence[int]], cuts: Sequence[str], bytes_max: int = BYTES_MAX) -> None:
        """`encode` is asked for stretches that are new; `cuts` are those of `cuts_of`."""
        self._encode = encode
        self._cut = re.compile(alternatives(cuts)).finditer
        self._bytes_max = bytes_max
        self._stretches: OrderedDict[str, list[int]] = OrderedDict()
        """The longest unused first."""
        self._numbers: dict[int, int] = {}
        """Every id that is in a stretch, so that equal ones are one object."""
        self._seen = array("q", bytes(8 * SEEN))
        """The hashes of stretches that were met, each in its place until another takes it."""
        self._lock = threading.Lock()
        self.cache_bytes = 0
        """About how much memory the stretches take."""
        self.cache_hits = 0
        self.cache_misses = 0

    @property
    def cache_entries(self) -> int:
        """Remembered stretches."""
        return len(self._stretches)

    def encode(self, text: str) -> list[int]:
        """The ids, without what a template adds."""
        ids: list[int] = []
        at = 0
        for cut in self._cut(text):
            end = cut.end()
            ids += self._ids_of(text[at:end])
            at = end
        if at < len(text):
            ids += self._ids_of(text[at:])
        return ids

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
        with contextlib.suppress(KeyError):  # Another thread may have needed its place.
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
    """The special tokens of a `tokenizer.json` after which its text may be cut; none where that is not certain.

    Such a token is found wherever it is written: no other token holds it, or may begin before it and reach into it.
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
    """Those of the texts that lie inside another, or begin with what another, or themselves, end with."""
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
    """A regex for any of these texts that looks at each character once, however many they are."""
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
