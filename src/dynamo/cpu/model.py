"""Model: the transformer, from token ids to logits.

Rows are tokens: all sequences of a step are computed as one matrix, whatever their lengths; only attention depends on
which rows belong to which sequence. Four transformations are applied to the weights on loading, so that they need not be
applied to every token:

* the gain of a norm is multiplied into the matrix that follows it;
* queries, keys and values are one matrix, and so are the gate and the up projection;
* the halves of a head are interleaved, so that a rotation is one multiplication of complex numbers;
* the 1/sqrt(head_dim) of attention is multiplied into the queries, and the 1/2 of SiLU into the gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError
from dynamo.cpu.adapter import Adapted
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.attention import Ids, KvCache, TokenSpan, plan
from dynamo.cpu.checkpoint import Checkpoint

F32 = npt.NDArray[np.float32]

GEMV_ROWS_MAX = 3  # Up to here OpenBLAS is faster row by row: it does not repack the weights for so few rows.
THIN_ROWS_MAX = 63  # Up to here it is faster with the weights on the left, even when the result must be transposed.


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step. Spans of one row come first, ordered by context; rows follow the spans."""

    tokens: Ids
    positions: Ids
    slots: Ids
    """Cache slot for the keys and values of each token."""
    spans: Sequence[TokenSpan]
    wanted: Ids
    """Rows whose logits are needed."""
    adapted: Sequence[Adapted] = ()
    """Rows that use adapters."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; matrices are (outputs, inputs)."""

    qkv: F32
    qkv_bias: F32 | None
    qk_gain: F32 | None
    out: F32
    out_bias: F32 | None
    gate_up: F32
    gate_up_bias: F32 | None
    down: F32
    down_bias: F32 | None


@dataclass(frozen=True, slots=True)
class TransformerWeights:
    """All trained parameters."""

    embedding: F32
    layers: Sequence[Layer]
    norm: F32
    head: F32


class TransformerModel:
    """Transformer with its cache. Not thread-safe: its buffers are reused by every step."""

    def __init__(
        self,
        shape: Architecture,
        weights: TransformerWeights,
        *,
        slots: int,
        rows_max: int,
        longest: int,
        memory: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """`memory`: existing memory for the cache, if other processes read it."""
        self.shape = shape
        self.cache = KvCache(shape.layers, shape.kv_heads, slots, shape.head_dim, memory)
        self._loaded: TransformerWeights | None = weights
        self._rotations = shape.rope.rotations(longest)
        self._buffers = _Buffers(shape, rows_max)

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def load(self, weights: TransformerWeights) -> None:
        """Use these weights from now on. The caller must discard cached blocks of other weights."""
        self._loaded = weights

    def unload(self) -> None:
        """Release the weights; nothing can be computed until `load`."""
        self._loaded = None

    @property
    def _weights(self) -> TransformerWeights:
        assert self._loaded is not None, "a step without weights"
        return self._loaded

    def forward(self, batch: Batch) -> F32:
        """Write the tokens' keys and values and return the logits of the wanted rows."""
        return self.logits(self.states(batch))

    def logits(self, states: F32) -> F32:
        """Return the logits of normalised rows."""
        logits = np.empty((len(states), len(self._weights.head)), np.float32)
        if len(states):
            project(states, self._weights.head, logits, np.empty(logits.size, np.float32))
        return logits

    def score(self, states: F32) -> F32:
        """Apply the head to states: one score per token of the vocabulary, or per label."""
        scores: F32 = states @ self._weights.head.T
        return scores

    def states(self, batch: Batch) -> F32:
        """Write the tokens' keys and values and return the normalised final states of the wanted rows."""
        shape, eps, weights = self.shape, self.shape.norm_eps, self._weights
        work = self._buffers.of(len(batch.tokens))
        groups = plan(batch.spans, shape.kv_heads, shape.heads // shape.kv_heads)
        rotations = self._rotations[batch.positions][:, None]
        cache_rows = self.cache.rows_of(batch.slots)
        np.take(weights.embedding, batch.tokens, axis=0, out=work.x)
        for number, layer in enumerate(weights.layers):
            normalise(work.x, eps, work.normal)
            work.project(work.normal, layer.qkv, layer.qkv_bias, work.qkv)
            for one in batch.adapted:
                if (delta := one.adapter.layers[number].qkv) is not None:
                    delta.add(work.normal, one.rows, work.qkv)
            if layer.qk_gain is not None:
                normalise(work.queries_keys, eps, work.queries_keys)
                work.queries_keys *= layer.qk_gain
            work.pairs *= rotations
            self.cache.write(number, cache_rows, work.keys_values)
            keys, values = self.cache.keys(number), self.cache.values(number)
            for group in groups:
                group.attend(work.queries, keys, values, work.attended_heads)
            work.project(work.attended, layer.out, layer.out_bias, work.normal)
            for one in batch.adapted:
                if (delta := one.adapter.layers[number].out) is not None:
                    delta.add(work.attended, one.rows, work.normal)
            work.x += work.normal
            normalise(work.x, eps, work.normal)
            work.project(work.normal, layer.gate_up, layer.gate_up_bias, work.gate_up)
            for one in batch.adapted:
                if (delta := one.adapter.layers[number].gate_up) is not None:
                    delta.add(work.normal, one.rows, work.gate_up)
            gated_silu(work.gate, work.up, work.inner)
            work.project(work.inner, layer.down, layer.down_bias, work.normal)
            for one in batch.adapted:
                if (delta := one.adapter.layers[number].down) is not None:
                    delta.add(work.inner, one.rows, work.normal)
            work.x += work.normal
        x = work.x[batch.wanted]
        normalise(x, eps, x)
        x *= weights.norm
        return x


class _Buffers:
    """Memory that is reused by every layer of every step."""

    def __init__(self, shape: Architecture, rows_max: int) -> None:
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.x = np.empty((rows_max, hidden), np.float32)
        self.normal = np.empty((rows_max, hidden), np.float32)
        self.qkv = np.empty((rows_max, q + 2 * kv), np.float32)
        self.attended = np.empty((rows_max, q), np.float32)
        self.gate_up = np.empty((rows_max, 2 * inner), np.float32)
        self.inner = np.empty((rows_max, inner), np.float32)
        self.thin = np.empty(min(rows_max, THIN_ROWS_MAX) * max(q + 2 * kv, 2 * inner, hidden), np.float32)
        self._views: dict[int, _Views] = {}

    def of(self, rows: int) -> "_Views":
        """Return views of the first rows of each buffer, in the shapes that the layers use."""
        views = self._views.get(rows)
        if views is None:
            views = self._views[rows] = _Views(self, rows)
        return views


class _Views:
    """Views of the buffers for one step."""

    def __init__(self, buffers: _Buffers, rows: int) -> None:
        shape = buffers.shape
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        grouped = (rows, kv_heads, heads // kv_heads, dim)
        self.x = buffers.x[:rows]
        self.normal = buffers.normal[:rows]
        self.qkv = buffers.qkv[:rows]
        by_head = self.qkv.reshape(rows, heads + 2 * kv_heads, dim)
        by_pair = self.qkv.view(np.complex64).reshape(rows, heads + 2 * kv_heads, dim // 2)
        self.queries_keys = by_head[:, : heads + kv_heads]
        self.pairs = by_pair[:, : heads + kv_heads]
        self.queries = self.qkv[:, : heads * dim].reshape(grouped)
        self.keys_values = by_head[:, heads:]
        self.attended = buffers.attended[:rows]
        self.attended_heads = self.attended.reshape(grouped)
        self.gate_up = buffers.gate_up[:rows]
        self.gate = self.gate_up[:, : shape.intermediate_size]
        self.up = self.gate_up[:, shape.intermediate_size :]
        self.inner = buffers.inner[:rows]
        self._thin = buffers.thin

    def project(self, x: F32, matrix: F32, bias: F32 | None, out: F32) -> None:
        project(x, matrix, out, self._thin)
        if bias is not None:
            out += bias


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
    """Compute SiLU(gate) * up: g * sigmoid(g) = h * (1 + tanh(h)) with h = g / 2, which cannot overflow."""
    np.tanh(half_gate, out=out)
    out += 1
    out *= half_gate
    out *= up


def load_weights(path: str, shape: Architecture) -> TransformerWeights:
    """Load a checkpoint. Raise `ConfigError` if a tensor is missing, of the wrong shape or unused."""
    checkpoint = Checkpoint(path)
    hidden, vocab = shape.hidden_size, shape.vocab_size
    embedding = checkpoint.tensor("model.embed_tokens.weight", vocab, hidden)
    weights = TransformerWeights(
        embedding=embedding,
        layers=[_load_layer(checkpoint, shape, f"model.layers.{number}") for number in range(shape.layers)],
        norm=checkpoint.tensor("model.norm.weight", hidden),
        head=_load_head(checkpoint, shape, embedding),
    )
    left = [name for name in checkpoint.unread() if name != "lm_head.weight" and not name.endswith("inv_freq")]
    if left:
        raise ConfigError(f"{path}: {left[0]} (one of {len(left)}) is not used by a {shape.name}")
    return weights


def _load_head(checkpoint: Checkpoint, shape: Architecture, embedding: F32) -> F32:
    """Return the output head: a row for each token of the vocabulary, or for each label."""
    if shape.labels:
        return checkpoint.tensor("score.weight", len(shape.labels), shape.hidden_size)
    if shape.has_tied_embeddings:
        return embedding
    return checkpoint.tensor("lm_head.weight", shape.vocab_size, shape.hidden_size)


def _load_layer(checkpoint: Checkpoint, shape: Architecture, name: str) -> Layer:
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.heads * dim, shape.kv_heads * dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    norm = checkpoint.tensor(f"{name}.input_layernorm.weight", hidden)
    mlp_norm = checkpoint.tensor(f"{name}.post_attention_layernorm.weight", hidden)
    gains = [checkpoint.optional(f"{attention}.{kind}_norm.weight", dim) for kind in "qk"]
    scale = np.float32(dim**-0.5)
    qkv = [checkpoint.tensor(f"{attention}.{kind}_proj.weight", size, hidden) for kind, size in _qkv(q, kv)]
    biases = [checkpoint.optional(f"{attention}.{kind}_proj.bias", size) for kind, size in _qkv(q, kv)]
    qk_gain = None
    if gains[0] is not None and gains[1] is not None:
        repeated = [np.tile(gains[0] * scale, (shape.heads, 1)), np.tile(gains[1], (shape.kv_heads, 1))]
        qk_gain = interleaved(np.concatenate(repeated).reshape(-1), dim).reshape(-1, dim)
    else:
        qkv[0] *= scale
        biases[0] = None if biases[0] is None else biases[0] * scale
    qkv[:2] = [interleaved(matrix, dim) for matrix in qkv[:2]]
    biases[:2] = [None if bias is None else interleaved(bias, dim) for bias in biases[:2]]
    gate = checkpoint.tensor(f"{mlp}.gate_proj.weight", inner, hidden) * np.float32(0.5)
    gate_bias = checkpoint.optional(f"{mlp}.gate_proj.bias", inner)
    up_bias = checkpoint.optional(f"{mlp}.up_proj.bias", inner)
    return Layer(
        qkv=np.concatenate(qkv) * norm,
        qkv_bias=_joined(biases),
        qk_gain=qk_gain,
        out=checkpoint.tensor(f"{attention}.o_proj.weight", hidden, q),
        out_bias=checkpoint.optional(f"{attention}.o_proj.bias", hidden),
        gate_up=np.concatenate([gate, checkpoint.tensor(f"{mlp}.up_proj.weight", inner, hidden)]) * mlp_norm,
        gate_up_bias=_joined([None if gate_bias is None else gate_bias * np.float32(0.5), up_bias]),
        down=checkpoint.tensor(f"{mlp}.down_proj.weight", hidden, inner),
        down_bias=checkpoint.optional(f"{mlp}.down_proj.bias", hidden),
    )


def _qkv(q: int, kv: int) -> list[tuple[str, int]]:
    return [("q", q), ("k", kv), ("v", kv)]


def _joined(biases: list[F32 | None]) -> F32 | None:
    """Concatenate the biases of joined projections, which must all exist or all be absent."""
    return None if biases[0] is None else np.concatenate([bias for bias in biases if bias is not None])


def interleaved(rows: F32, dim: int) -> F32:
    """Interleave the two halves of a head: in a checkpoint, the members of a pair lie half a head apart."""
    halves = rows.reshape(-1, 2, dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
