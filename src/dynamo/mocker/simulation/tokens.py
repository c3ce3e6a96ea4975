"""TokenSource: random token ids from a ring that is filled once.

A sequence's n-th token is `ids[(offset + n) & mask]`: no token is stored per sequence, and a preempted sequence
continues with the same tokens.
"""

from array import array
from collections.abc import Collection
from functools import cached_property
from random import Random

IDS = 1 << 16  # Ring size of 0.5 MB: a power of two, so that wrapping is a mask, and longer than most answers.


class TokenSource:
    """Uniform token ids below `vocab_size` without those in `excluded` (the end-of-sequence ids)."""

    def __init__(self, vocab_size: int, excluded: Collection[int] = (), seed: int | None = None) -> None:
        self._allowed = (
            [token for token in range(vocab_size) if token not in excluded] if excluded else range(vocab_size)
        )
        assert len(self._allowed) > 0, "every token id is excluded"
        self._random = Random(seed)
        self._draws = array("Q", self._random.randbytes(8 * IDS))
        self.mask = IDS - 1
        self.first_hash = self._draws[0]
        """First of the source's hashes for blocks whose tokens are not used; other seeds have other ones."""

    @cached_property
    def ids(self) -> list[int]:
        """The ring. It is made at its first use: a replay of many workers, which shows no token, needs none."""
        allowed, count = self._allowed, len(self._allowed)
        return [allowed[draw % count] for draw in self._draws]

    def offset(self) -> int:
        """Return the index at which a new sequence begins to read."""
        return self._random.randrange(IDS)

    def slice(self, start: int, end: int) -> list[int]:
        """Return the tokens from `start` to `end`, counted from the beginning of the ring."""
        return [self.ids[at & self.mask] for at in range(start, end)]
