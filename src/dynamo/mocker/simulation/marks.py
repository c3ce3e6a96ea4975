"""BlockMarks: the readable blocks of a pool by sequence hash, each with its number of holders or the mark of its eviction policy.

`PythonMarks` is the definition. `_marks.c` is an equivalent in C, built where a compiler is available at installation, which uses the
processor's caches better (docs/decisions/0014). `BlockMarks` is whichever is available.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol


class Marks(Protocol):
    """A table from hashes to marks of 32 bits."""

    def __len__(self) -> int: ...

    def __contains__(self, block_hash: int, /) -> bool: ...

    def __getitem__(self, block_hash: int, /) -> int: ...

    def __setitem__(self, block_hash: int, mark: int, /) -> None: ...

    def get(self, block_hash: int, /) -> int | None:
        """Return the mark of a hash; None without one."""
        ...

    def items(self) -> Iterable[tuple[int, int]]:
        """Return all hashes with their marks, in any order."""
        ...

    def put_all(self, hashes: list[int], mark: int, /) -> None:
        """Set the mark of these hashes."""
        ...

    def drop(self, hashes: list[int], /) -> list[int]:
        """Remove hashes and return those that are not negative. Raises `KeyError` for one without a mark."""
        ...

    def marked(self, hashes: list[int], mark: int, /) -> list[int]:
        """Return the hashes of a list that have this mark."""
        ...

    def known(self, hashes: list[int], /) -> int:
        """Return the number of leading hashes that have marks; no other one has."""
        ...

    def held(self, hashes: list[int], /) -> int:
        """Return the number of leading hashes with marks above zero; all have marks, the others zero or less."""
        ...

    def shared(self, hashes: list[int], /) -> int:
        """Return the number of leading hashes whose mark is not one; all have marks, and that of the others is one."""
        ...


class PythonMarks(dict[int, int]):
    """`Marks` as a dictionary."""

    __slots__ = ()

    def put_all(self, hashes: list[int], mark: int, /) -> None:
        """See `Marks`."""
        self.update(dict.fromkeys(hashes, mark))

    def drop(self, hashes: list[int], /) -> list[int]:
        """See `Marks`."""
        for block_hash in hashes:
            del self[block_hash]
        return [block_hash for block_hash in hashes if block_hash >= 0]

    def marked(self, hashes: list[int], mark: int, /) -> list[int]:
        """See `Marks`."""
        mark_of = self.get
        return [block_hash for block_hash in hashes if mark_of(block_hash) == mark]

    def known(self, hashes: list[int], /) -> int:
        """See `Marks`."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self)

    def held(self, hashes: list[int], /) -> int:
        """See `Marks`."""
        return bisect_left(hashes, True, key=lambda block_hash: self[block_hash] <= 0)

    def shared(self, hashes: list[int], /) -> int:
        """See `Marks`."""
        return bisect_left(hashes, True, key=lambda block_hash: self[block_hash] == 1)


BlockMarks: type[Marks] = PythonMarks
try:
    from dynamo.mocker.simulation._marks import CompiledMarks
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True
    BlockMarks = CompiledMarks
