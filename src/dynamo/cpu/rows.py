"""Rows: the memory of a step's rows, and how the rows are divided into blocks that one thread computes."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynamo.cpu.architecture import Architecture
from dynamo.cpu.operations import THIN_ROWS_MAX, project

F32 = npt.NDArray[np.float32]

BLOCK_ROWS_MAX = 512  # With fewer rows, the products repack the weights more often; more rows only take more memory.
SHARE_ROWS_MIN = THIN_ROWS_MAX + 1  # With fewer rows, a thread of its own computes less than it repacks of the weights.


class RowBuffers:
    """Memory that is reused by every layer of every step."""

    def __init__(self, shape: Architecture, rows_max: int, threads: int) -> None:
        """`threads`: number of threads that compute blocks at the same time."""
        self.shape = shape
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        grouped = (rows_max, kv_heads, heads // kv_heads, dim)
        self.x = np.empty((rows_max, shape.hidden_size), np.float32)
        self.qkv = np.empty((rows_max, (heads + 2 * kv_heads) * dim), np.float32)
        self.attended = np.empty((rows_max, heads * dim), np.float32)
        self.queries = self.qkv[:, : heads * dim].reshape(grouped)
        self.attended_heads = self.attended.reshape(grouped)
        self._scratch = [BlockScratch(shape, min(rows_max, BLOCK_ROWS_MAX)) for _ in range(threads)]
        self._views: dict[int, RowBlock] = {}

    def shares(self, rows: int) -> "list[list[RowBlock]]":
        """Divide the first rows of the buffers over the threads, and each share into blocks."""
        count = max(1, min(len(self._scratch), rows // SHARE_ROWS_MIN))
        if count == 1 and rows <= BLOCK_ROWS_MAX:
            block = self._views.get(rows)
            if block is None:
                block = self._views[rows] = RowBlock(self, 0, rows, self._scratch[0])
            return [[block]]
        return [
            [RowBlock(self, first, end, scratch) for first, end in _divided(*bounds, BLOCK_ROWS_MAX)]
            for bounds, scratch in zip(_divided(0, rows, -(-rows // count)), self._scratch, strict=False)
        ]


class BlockScratch:
    """Memory for the results that are used within one block only."""

    def __init__(self, shape: Architecture, rows_max: int) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        widest = max((shape.heads + 2 * shape.kv_heads) * shape.head_dim, 2 * inner, hidden)
        self.normal = np.empty((rows_max, hidden), np.float32)
        self.gate_up = np.empty((rows_max, 2 * inner), np.float32)
        self.inner = np.empty((rows_max, inner), np.float32)
        self.thin = np.empty(min(rows_max, THIN_ROWS_MAX) * widest, np.float32)


class RowBlock:
    """Views of the buffers for consecutive rows, in the shapes that the layers use."""

    def __init__(self, buffers: RowBuffers, first: int, end: int, scratch: BlockScratch) -> None:
        shape, rows = buffers.shape, end - first
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        self.rows = slice(first, end)
        self.x = buffers.x[first:end]
        self.qkv = buffers.qkv[first:end]
        by_head = self.qkv.reshape(rows, heads + 2 * kv_heads, dim)
        by_pair = self.qkv.view(np.complex64).reshape(rows, heads + 2 * kv_heads, dim // 2)
        self.queries_keys = by_head[:, : heads + kv_heads]
        self.pairs = by_pair[:, : heads + kv_heads]
        self.keys_values = by_head[:, heads:]
        self.attended = buffers.attended[first:end]
        self.normal = scratch.normal[:rows]
        self.gate_up = scratch.gate_up[:rows]
        self.gate = self.gate_up[:, : shape.intermediate_size]
        self.up = self.gate_up[:, shape.intermediate_size :]
        self.inner = scratch.inner[:rows]
        self._thin = scratch.thin

    def project(self, x: F32, matrix: F32, bias: F32 | None, out: F32) -> None:
        project(x, matrix, out, self._thin)
        if bias is not None:
            out += bias


def _divided(first: int, end: int, longest: int) -> list[tuple[int, int]]:
    """Divide a range into the fewest parts of at most this length, all of nearly the same length."""
    parts = -(-(end - first) // longest)
    bounds = [first + part * (end - first) // parts for part in range(parts + 1)]
    return list(pairwise(bounds))
