"""CommonNames: a table from the block keys that engines share to the runs that hold the blocks. Pure; a part of `index`.

Engines that derive keys from block contents use the same keys, so one table serves all of them. It is split by the keys'
lowest bits, because resizing one dictionary of millions of entries takes 200 ms; a part of a full index (16 M blocks) takes
about 3 ms.

`PythonNames` is the definition. `_names.c` is an equivalent in C, built where a compiler is available at installation, with a
third of the time and memory; `CommonNames` is whichever is available.
"""

from typing import Protocol

from dynamo.kv_router.runs import Key, Run

MASK = 255


class Names(Protocol):
    """A table of keys, each of which belongs to one run."""

    def get(self, key: Key, /) -> Run | None:
        """Return the run of a key; None for an unknown key."""
        ...

    def claim(self, keys: list[Key], run: Run, /) -> bool:
        """Assign keys to a run: all of them, or none if one is taken or repeated."""
        ...

    def release(self, keys: list[Key], /) -> None:
        """Remove keys. Raises `KeyError` for an unknown one."""
        ...

    def __len__(self) -> int: ...


class PythonNames:
    """`Names` as Python dictionaries."""

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
