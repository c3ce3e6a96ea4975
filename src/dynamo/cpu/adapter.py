"""Adapter: what a LoRA adapter adds to the model's matrices, for those rows of a step that ask for it.

A matrix W of a layer becomes W + up · down for the rows of an adapter. The sum is never made: a row goes through W with all
others, and what `up · down` makes of it is added. Rows with several adapters and with none are so computed in one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Rows = slice | npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to one matrix.

    Where the model keeps several projections as one matrix, `up` is zero between one's ranks and another's outputs: a few
    more sums cost less than a product for each.
    """

    down: F32
    """(inputs, ranks)."""
    up: F32
    """(ranks, outputs), with the adapter's scale in it."""

    def add(self, x: F32, rows: Rows, out: F32) -> None:
        """Adds what it makes of these rows of `x` to the same rows of `out`."""
        out[rows] += (x[rows] @ self.down) @ self.up


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """What is added to the matrices of one layer."""

    qkv: Delta | None = None
    out: Delta | None = None
    gate_up: Delta | None = None
    down: Delta | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter as this model uses it."""

    name: str
    number: int
    """By which upstream's tools know it."""
    fingerprint: int
    """Of its files: blocks that were computed with others are not its own, whatever those were called."""
    layers: Sequence[LayerDeltas]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rows of a step that one adapter has a say in."""

    adapter: Adapter
    rows: Rows


def rows_of(rows: Sequence[int]) -> Rows:
    """Rows as they are found fastest: in place where they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, dtype=np.intp)
