"""Adapter: the terms that a LoRA adapter adds to the products with the model's matrices, for the rows that use it.

A matrix W of a layer becomes W + up · down for the rows of an adapter. The sum is never formed: each row is multiplied by W
together with all others, and the product with `up · down` is added. One step can mix rows with several adapters and none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Rows = slice | Ids


@dataclass(frozen=True, slots=True)
class AdapterDelta:
    """Low-rank term that is added to one matrix.

    Where the model stores several projections as one matrix, `up` is zero between the ranks of one projection and the
    outputs of another: a few more additions cost less than one product per projection.
    """

    down: F32
    """Shape (inputs, ranks)."""
    up: F32
    """Shape (ranks, outputs), multiplied by the adapter's scale."""

    def add(self, x: F32, rows: Rows, out: F32) -> None:
        """Add the adapter's product with these rows of `x` to the same rows of `out`."""
        out[rows] += (x[rows] @ self.down) @ self.up


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """Low-rank terms for the matrices of one layer."""

    qkv: AdapterDelta | None = None
    out: AdapterDelta | None = None
    gate_up: AdapterDelta | None = None
    down: AdapterDelta | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter, prepared for this model."""

    name: str
    number: int
    """Id of the adapter, as in upstream's tools."""
    fingerprint: int
    """Hash of the adapter's files; KV blocks computed with another fingerprint are not shared, even under the same name."""
    layers: Sequence[LayerDeltas]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Rows of a step that use one adapter."""

    adapter: Adapter
    rows: Rows

    def among(self, rows: Ids, total: int) -> "Adapted | None":
        """Return those of the given rows, by their place in `rows`, that use the adapter; None if no row does.

        `total`: number of rows of the step.
        """
        uses = np.zeros(total, np.bool_)
        uses[self.rows] = True
        places = np.flatnonzero(uses[rows])
        return Adapted(self.adapter, rows_of(places.tolist())) if len(places) else None


def rows_of(rows: Sequence[int]) -> Rows:
    """Return rows as the fastest index: a slice if they are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, dtype=np.intp)
