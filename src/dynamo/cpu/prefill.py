"""Prefill: attention of many tokens of one sequence, in tiles whose scores stay in a core's cache.

A tile has the scores of some tokens of the sequence with some of their queries, with all query heads that share a key head side
by side: one product computes them. Tiles of the same queries are joined by an online softmax. Keys behind the last query
of a tile are not read, so that about half of all scores is never computed.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynamo.cpu.spans import Run, TokenSpan, between

F32 = npt.NDArray[np.float32]

QUERIES_MAX = 128  # Tokens whose queries share a tile. With more, more scores behind the diagonal are computed in vain.
COLUMNS_MAX = 256  # Queries of a tile over all its heads. With fewer, the matrix products are slower.
KEYS_MAX = 512  # Keys of a tile; at least twice `QUERIES_MAX`, so that the diagonal lies within the last tile.
SCORES_MAX = COLUMNS_MAX * KEYS_MAX  # Scores of a tile: 512 KiB.


class Scratch:
    """Memory for the tiles that one thread computes."""

    def __init__(self, kv_heads: int, heads_per_kv: int, head_dim: int) -> None:
        columns = queries_max(heads_per_kv) * heads_per_kv
        self.scores = np.empty(max(SCORES_MAX, columns * KEYS_MAX), np.float32)
        columns *= kv_heads
        self.queries, self.sums, self.more = (np.empty(columns * head_dim, np.float32) for _ in range(3))
        self.top, self.new_top, self.total, self.more_total = (np.empty(columns, np.float32) for _ in range(4))
        self.keys, self.values = (np.empty(kv_heads * KEYS_MAX * head_dim, np.float32) for _ in range(2))


class PrefillPart:
    """Consecutive tokens of one sequence and some key heads; each token attends to itself and to all tokens before it."""

    def __init__(self, span: TokenSpan, heads: slice, heads_per_kv: int) -> None:
        self._rows = slice(span.row, span.row + span.count)
        self._count, self._heads, self._group = span.count, heads, heads_per_kv
        self.cost = span.context * span.count * (heads.stop - heads.start)
        """Number of scores per query head."""
        tiles = -(-span.context // KEYS_MAX)
        bounds = [tile * span.context // tiles for tile in range(tiles + 1)]
        self._tiles = [between(span.runs, at, until) for at, until in pairwise(bounds)]
        self._mask = _mask(span.count, heads_per_kv)

    def attend(self, queries: F32, keys: F32, values: F32, out: F32, scratch: Scratch) -> None:
        """Write the attention output of these rows and heads to `out`, with arguments as in `DecodeGroup.attend`."""
        heads, dim = self._heads.stop - self._heads.start, keys.shape[-1]
        columns = self._count * self._group
        own = _first(scratch.queries, heads, self._count, self._group, dim)
        np.copyto(own, queries[self._rows, self._heads].swapaxes(0, 1))
        transposed = own.reshape(heads, columns, dim).swapaxes(1, 2)
        sums, more = _first(scratch.sums, heads, columns, dim), _first(scratch.more, heads, columns, dim)
        top, new_top = _first(scratch.top, heads, 1, columns), _first(scratch.new_top, heads, 1, columns)
        total, more_total = _first(scratch.total, heads, 1, columns), _first(scratch.more_total, heads, 1, columns)
        for number, tile in enumerate(self._tiles, 1):
            tile_keys = _gathered(keys[self._heads], tile, scratch.keys)
            tile_values = _gathered(values[self._heads], tile, scratch.values)
            scores = _first(scratch.scores, heads, tile_keys.shape[1], columns)
            np.matmul(tile_keys, transposed, out=scores)
            if number == len(self._tiles):
                scores[:, -self._count :] += self._mask
            np.maximum.reduce(scores, axis=1, keepdims=True, out=new_top)
            if number == 1:
                top, new_top = new_top, top
                _exponentials(scores, top, total)
                np.matmul(scores.swapaxes(1, 2), tile_values, out=sums)
                continue
            np.maximum(top, new_top, out=new_top)
            np.subtract(top, new_top, out=top)
            np.exp(top, out=top)
            sums *= top.swapaxes(1, 2)
            total *= top
            top, new_top = new_top, top
            _exponentials(scores, top, more_total)
            np.matmul(scores.swapaxes(1, 2), tile_values, out=more)
            sums += more
            total += more_total
        np.reciprocal(total, out=total)
        shape = (heads, self._count, self._group)
        np.multiply(
            sums.reshape(*shape, dim), total.reshape(*shape, 1), out=out[self._rows, self._heads].swapaxes(0, 1)
        )


def parts_of(span: TokenSpan, kv_heads: int, heads_per_kv: int) -> list[PrefillPart]:
    """Return the parts that compute a span; they are independent of each other."""
    parts: list[PrefillPart] = []
    most = queries_max(heads_per_kv)
    pieces = -(-span.count // most)
    bounds = [piece * span.count // pieces for piece in range(pieces + 1)]
    for first, end in pairwise(bounds):
        piece = span.part(first, end, span.row + first)
        tile = piece.count * heads_per_kv * min(piece.context, KEYS_MAX)
        together = min(
            kv_heads, max(1, SCORES_MAX // tile)
        )  # Heads in one operation, which costs less for short prompts.
        parts += [
            PrefillPart(piece, slice(head, min(kv_heads, head + together)), heads_per_kv)
            for head in range(0, kv_heads, together)
        ]
    return parts


def queries_max(heads_per_kv: int) -> int:
    """Return the most tokens whose queries are computed together."""
    return max(1, min(QUERIES_MAX, COLUMNS_MAX // heads_per_kv))


def _mask(count: int, heads_per_kv: int) -> F32:
    """Return what is added to the scores of the last keys: minus infinity where a key lies behind the query."""
    behind = np.tril(np.full((count, count), -np.inf, np.float32), -1)
    return np.repeat(behind, heads_per_kv, axis=1)


def _first(memory: F32, *shape: int) -> F32:
    """Return the first elements in this shape."""
    size = 1
    for length in shape:
        size *= length
    return memory[:size].reshape(shape)


def _gathered(pages: F32, runs: Sequence[Run], memory: F32) -> F32:
    """Return the slots of all runs, (heads, slots, head_dim): in place if there is one run, otherwise as a copy."""
    if len(runs) == 1:
        return pages[:, runs[0][0] : runs[0][1]]
    out = _first(memory, len(pages), sum(stop - start for start, stop in runs), pages.shape[-1])
    at = 0
    for start, stop in runs:
        until = at + stop - start
        out[:, at:until] = pages[:, start:stop]
        at = until
    return out


def _exponentials(scores: F32, top: F32, total: F32) -> None:
    """Replace the scores by their exponentials relative to the largest, and write the sums."""
    np.subtract(scores, top, out=scores)
    np.exp(scores, out=scores)
    np.add.reduce(scores, axis=1, keepdims=True, out=total)
