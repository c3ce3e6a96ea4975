"""Operations: what the layers compute from rows of numbers, written to given memory."""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

GEMV_ROWS_MAX = 3  # Up to here OpenBLAS is faster row by row: it does not repack the weights for so few rows.
THIN_ROWS_MAX = 63  # Up to here it is faster with the weights on the left, even when the result must be transposed.
STRIP_NUMBERS = 1 << 16  # Numbers that pass through several operations together: 256 KiB, which stay in a core's cache.


def project(x: F32, matrix: F32, out: F32, scratch: F32) -> None:
    """Compute `out = x @ matrix.T` in the form that OpenBLAS computes fastest for this number of rows."""
    rows = len(x)
    if rows <= GEMV_ROWS_MAX:
        for row in range(rows):
            np.dot(matrix, x[row], out=out[row])
    elif rows <= THIN_ROWS_MAX:
        thin = scratch[: rows * len(matrix)].reshape(len(matrix), rows)
        np.dot(matrix, x.T, out=thin)
        out[...] = thin.T
    else:
        np.dot(x, matrix.T, out=out)


def normalise(x: F32, eps: float, out: F32) -> None:
    """Divide by the root of the mean square over the last axis."""
    square = np.einsum("...i,...i->...", x, x)
    square /= x.shape[-1]
    square += eps
    np.sqrt(square, out=square)
    np.divide(x, square[..., None], out=out)


def gated_silu(half_gate: F32, up: F32, out: F32) -> None:
    """Compute SiLU(gate) * up of rows: g * sigmoid(g) = h * (1 + tanh(h)) with h = g / 2, which cannot overflow."""
    strip = max(1, STRIP_NUMBERS // out.shape[-1])
    for first in range(0, len(out), strip):
        rows = slice(first, first + strip)
        part = out[rows]
        np.tanh(half_gate[rows], out=part)
        part += 1
        part *= half_gate[rows]
        part *= up[rows]
