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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError
from dynamo.cpu.adapter import Adapted
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.attention import KvCache, StepAttention
from dynamo.cpu.checkpoint import Checkpoint
from dynamo.cpu.operations import gated_silu, normalise, project
from dynamo.cpu.prefill import Scratch
from dynamo.cpu.rows import RowBlock, RowBuffers
from dynamo.cpu.spans import Ids, TokenSpan, narrowed
from dynamo.cpu.team import Team

F32 = npt.NDArray[np.float32]


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
        team: Team | None = None,
    ) -> None:
        """`memory`: existing memory for the cache, if other processes read it. `team`: by default, as many threads as OpenBLAS."""
        self.shape = shape
        self.cache = KvCache(shape.layers, shape.kv_heads, slots, shape.head_dim, memory)
        self._loaded: TransformerWeights | None = weights
        self._rotations = shape.rope.rotations(longest)
        self._team = Team.of_blas() if team is None else team
        self._buffers = RowBuffers(shape, rows_max, self._team.size)
        heads = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        self._scratch = [Scratch(*heads) for _ in range(self._team.size)]

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
        buffers, layers = self._buffers, self._weights.layers
        shares = self._shares(batch)
        with self._team.side_by_side() if len(shares) > 1 else nullcontext():
            attention = self._attention(batch.spans)
            self._team.run([partial(self._begin, share, batch) for share in shares])
            for number in range(len(layers) - 1):
                self._attend(attention, number)
                self._team.run([partial(self._advance, share, number) for share in shares])
            wanted = batch.wanted
            if len(wanted) < len(batch.tokens):  # The last layer has written its keys and values: other rows are done.
                batch, rows, wanted = _narrowed(batch)
                buffers.x[: len(rows)] = buffers.x[rows]
                buffers.queries[: len(rows)] = buffers.queries[rows]
                attention, shares = self._attention(batch.spans), self._shares(batch)
            self._attend(attention, len(layers) - 1)
            self._team.run([partial(self._advance, share, len(layers) - 1) for share in shares])
        x = buffers.x[wanted]
        normalise(x, self.shape.norm_eps, x)
        x *= self._weights.norm
        return x

    def _attention(self, spans: Sequence[TokenSpan]) -> StepAttention:
        shape = self.shape
        return StepAttention(spans, shape.kv_heads, shape.heads // shape.kv_heads, self._scratch)

    def _attend(self, attention: StepAttention, number: int) -> None:
        """Compute the attention of one layer for all rows."""
        keys, values = self.cache.keys(number), self.cache.values(number)
        self._team.run(attention.tasks(self._buffers.queries, keys, values, self._buffers.attended_heads))

    def _shares(self, batch: Batch) -> "list[list[_StepBlock]]":
        """Return the rows that each thread computes, in blocks."""
        rows = len(batch.tokens)
        shares = self._buffers.shares(rows)
        if len(shares) == len(shares[0]) == 1:
            return [[self._block(shares[0][0], batch, batch.adapted)]]
        return [[self._block(block, batch, _adapted(batch, block.rows)) for block in share] for share in shares]

    def _block(self, work: RowBlock, batch: Batch, adapted: Sequence[Adapted]) -> "_StepBlock":
        rotations = self._rotations[batch.positions[work.rows]][:, None]
        return _StepBlock(work, rotations, self.cache.rows_of(batch.slots[work.rows]), adapted)

    def _begin(self, share: "Sequence[_StepBlock]", batch: Batch) -> None:
        """Compute the first layer's queries, keys and values of these rows."""
        for block in share:
            np.take(self._weights.embedding, batch.tokens[block.work.rows], axis=0, out=block.work.x)
            self._before_attention(0, block)

    def _advance(self, share: "Sequence[_StepBlock]", number: int) -> None:
        """Complete a layer for these rows, and compute the queries, keys and values of the next one."""
        for block in share:
            self._after_attention(number, block)
            if number + 1 < len(self._weights.layers):
                self._before_attention(number + 1, block)

    def _before_attention(self, number: int, block: "_StepBlock") -> None:
        work, layer, eps = block.work, self._weights.layers[number], self.shape.norm_eps
        normalise(work.x, eps, work.normal)
        work.project(work.normal, layer.qkv, layer.qkv_bias, work.qkv)
        for one in block.adapted:
            if (delta := one.adapter.layers[number].qkv) is not None:
                delta.add(work.normal, one.rows, work.qkv)
        if layer.qk_gain is not None:
            normalise(work.queries_keys, eps, work.queries_keys)
            work.queries_keys *= layer.qk_gain
        work.pairs *= block.rotations
        self.cache.write(number, block.cache_rows, work.keys_values)

    def _after_attention(self, number: int, block: "_StepBlock") -> None:
        work, layer, eps = block.work, self._weights.layers[number], self.shape.norm_eps
        work.project(work.attended, layer.out, layer.out_bias, work.normal)
        for one in block.adapted:
            if (delta := one.adapter.layers[number].out) is not None:
                delta.add(work.attended, one.rows, work.normal)
        work.x += work.normal
        normalise(work.x, eps, work.normal)
        work.project(work.normal, layer.gate_up, layer.gate_up_bias, work.gate_up)
        for one in block.adapted:
            if (delta := one.adapter.layers[number].gate_up) is not None:
                delta.add(work.normal, one.rows, work.gate_up)
        gated_silu(work.gate, work.up, work.inner)
        work.project(work.inner, layer.down, layer.down_bias, work.normal)
        for one in block.adapted:
            if (delta := one.adapter.layers[number].down) is not None:
                delta.add(work.inner, one.rows, work.normal)
        work.x += work.normal


@dataclass(frozen=True, slots=True)
class _StepBlock:
    """Rows of a step that are computed together."""

    work: RowBlock
    rotations: npt.NDArray[np.complex64]
    cache_rows: Ids
    adapted: Sequence[Adapted]
    """Rows of the block that use adapters."""


def _adapted(batch: Batch, rows: slice) -> list[Adapted]:
    """Return which of these rows use adapters."""
    chosen = np.arange(rows.start, rows.stop)
    return [some for one in batch.adapted if (some := one.among(chosen, len(batch.tokens))) is not None]


def _narrowed(batch: Batch) -> tuple[Batch, Ids, Ids]:
    """Return a batch with the wanted rows only (and those between them), its rows in this batch, and the wanted rows in it."""
    spans, rows = narrowed(batch.spans, batch.wanted)
    places = np.zeros(len(batch.tokens), np.intp)
    places[rows] = np.arange(len(rows))
    adapted = [some for one in batch.adapted if (some := one.among(rows, len(batch.tokens))) is not None]
    wanted = places[batch.wanted]
    return Batch(batch.tokens[rows], batch.positions[rows], batch.slots[rows], spans, wanted, adapted), rows, wanted


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
