"""CommonNames: from the keys by which most engines know blocks to the runs that hold them. Pure; a part of `index`.

Engines that derive their keys from what the blocks hold all say the same: one table serves for all of them. It is cut in
pieces by the keys' lowest bits, because a single dictionary of millions stands still for a fifth of a second when it
grows; a piece of a full index (16 M blocks) does for some 3 ms.

`PythonNames` is the definition. Where a compiler was at hand when the package was installed there is a twin in C
(`_names.c`), which takes a third of the time and of the memory; `CommonNames` is whichever there is.
"""

from typing import Protocol

from dynamo.kv_router.runs import Key, Run

MASK = 255


class Names(Protocol):
    """A table of keys, each for one run."""

    def get(self, key: Key, /) -> Run | None:
        """The run of a key, which may be nobody's."""
        ...

    def claim(self, keys: list[Key], run: Run, /) -> bool:
        """Gives keys to a run: all of them, or none where one is taken or there twice."""
        ...

    def release(self, keys: list[Key], /) -> None:
        """Takes keys back; raises `KeyError` at one that is nobody's."""
        ...

    def __len__(self) -> int: ...


class PythonNames:
    """`Names` of dictionaries."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[Key, Run]] = [{} for _ in range(MASK + 1)]

    def get(self, key: Key, /) -> Run | None:
        """See `Names`."""
        return self._shards[key & MASK].get(key)

    def claim(self, keys: list[Key], run: Run, /) -> bool:
        """See `Names`."""
        shards = self._shards
        for number, key in enumerate(keys):
            shard = shards[key & MASK]
            if key in shard:
                self.release(keys[:number])
                return False
            shard[key] = run
        return True

    def release(self, keys: list[Key], /) -> None:
        """See `Names`."""
        shards = self._shards
        for key in keys:
            del shards[key & MASK][key]

    def __len__(self) -> int:
        return sum(map(len, self._shards))


CommonNames: type[Names] = PythonNames
try:
    from dynamo.kv_router._names import CompiledNames
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True
    CommonNames = CompiledNames
