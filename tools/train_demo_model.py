"""Trains the demo model: corpus to tokenizer, tokenizer to weights, weights to a package directory.

    python tools/train_demo_model.py --work-dir /tmp/demo-train --minutes 50
    python tools/train_demo_model.py --work-dir /tmp/demo-train --minutes 50      # again: goes on
    python tools/train_demo_model.py --work-dir /tmp/demo-train --export-only
    python tools/train_demo_model.py --work-dir /tmp/demo-more --start-from DIR --rate-factor 0.3 --minutes 15

The model is a small Qwen3 written out in PyTorch with Hugging Face's parameter names. The run is cut
by the clock: the learning rate warms up, stays, and falls to zero over the last part of the budget,
so any budget ends in a finished model. A checkpoint is written every few minutes, and a second start
continues from it: the data of a step depends only on the seed and the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import demo_corpus
import torch
from demo_corpus import Learn, Piece
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed, nn
from torch.nn import functional

PACKAGE_DIR = Path(__file__).resolve().parents[1] / "src" / "dynamo" / "cpu" / "demo_model"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A word with the space before it, one digit, punctuation with the space before it, line ends, spaces.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS_WITHOUT_SPACE = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of the network."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is trained."""

    seed: int = 17
    minutes: float = 50.0
    steps: int = 0  # Where given, it replaces the clock: the run is then the same on every machine.
    batch_tokens: int = 4096
    pool_batches: int = 48  # Examples are sorted by length within a pool, so that little is padding.
    matrix_lr: float = 3e-3
    vector_lr: float = 3e-3
    rate_factor: float = 1.0  # On both; smaller where a trained model learns more.
    weight_decay: float = 0.02
    warmup_steps: int = 80
    decay_share: float = 0.3
    checkpoint_minutes: float = 3.0
    is_mixed: bool = True  # bfloat16 where it may be; many times slower on a processor without instructions for it.
    processes: int = 2  # Each with one thread: on a busy machine far faster than one with two.
    plain_share: float = 0.12  # Of the examples: texts without turns ...
    json_share: float = 0.22  # ... and answers under a JSON schema; the others are conversations.
    sum_share: float = 0.3  # Of the latter: drills of sums answered by a number alone.
    drill_share_first: float = 0.45  # Drills first, since copying must be learnt before tools and rules ...
    drill_share_last: float = 0.1
    drill_pools: tuple[int, int] = (45, 50)  # ... and fewer of them between these pools.

    def drill_share(self, index: int) -> float:
        """The share of drills in a pool."""
        first, last = self.drill_pools
        over = min(1.0, max(0.0, (index - first) / (last - first)))
        return self.drill_share_first + over * (self.drill_share_last - self.drill_share_first)


# --- tokenizer ---------------------------------------------------------------------------------


def train_tokenizer(vocab: int, seed: int, *, examples: int = 6000, spaced_words: int = 480) -> Tokenizer:
    """Byte-level BPE in which a word is cut the same way with and without the space before it.

    The merges are learnt on words without spaces; only then the commonest words of the fixed prose
    get a token of their own that includes the space. A name that is copied from a sentence into JSON
    thus keeps its tokens, which is what lets so small a model copy it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = vocab - spaced_words - len(SPECIAL_TOKENS) - len(VISIBLE_TOKENS)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _byte_level(WORDS_WITHOUT_SPACE)
    trainer = trainers.BpeTrainer(vocab_size=base, initial_alphabet=alphabet, show_progress=False)
    prose = demo_corpus.prose()
    drawn = ["".join(text for text, _ in sample) for sample in islice(demo_corpus.samples(seed), examples)]
    for token in (*SPECIAL_TOKENS, *VISIBLE_TOKENS):
        drawn = [text.replace(token, "\n") for text in drawn]
    learner.train_from_iterator(drawn + prose * 4, trainer)
    state = json.loads(learner.to_str())["model"]
    tokens: dict[str, int] = state["vocab"]
    merges = [tuple(merge) for merge in state["merges"]]
    words = Counter(word for text in prose for word in text.replace("?", " ").replace(".", " ").split(" "))
    space = "\u0120"
    for word, _ in words.most_common():
        if len(tokens) == base + spaced_words:
            break
        if word in tokens and word[0].isalpha() and space + word not in tokens:
            tokens[space + word] = len(tokens)
            merges.append((space, word))
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = _byte_level(WORDS)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    assert tokenizer.get_vocab_size() <= vocab, "the tokenizer outgrew the model"
    return tokenizer


def _byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# --- data --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each whether the model learns to write it."""

    ids: list[int]
    learnt: list[bool]


def encode(tokenizer: Tokenizer, pieces: list[Piece]) -> Example:
    """The pieces as tokens."""
    ids: list[int] = []
    learnt: list[bool] = []
    for text, learn in pieces:
        new = tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        marks = [learn is not Learn.NOTHING] * len(new)
        if learn is Learn.ALL_BUT_FIRST:
            marks[0] = False
        learnt += marks
    return Example(ids, learnt)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length; `where` are the positions whose next token is learnt, `targets` those tokens."""

    ids: Tensor
    where: Tensor
    targets: Tensor


def collate(examples: list[Example]) -> Batch:
    """Examples padded at the end, which a causal model never looks at."""
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    where: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        for at in range(1, len(example.ids)):
            if example.learnt[at]:
                where.append(row * width + at - 1)
                targets.append(example.ids[at])
    return Batch(ids, torch.tensor(where), torch.tensor(targets))


def pool(tokenizer: Tokenizer, recipe: Recipe, index: int, context: int) -> list[Batch]:
    """The batches of one pool; they depend on nothing but the seed and the index."""
    rng = random.Random(recipe.seed * 1_000_003 + index)
    examples: list[Example] = []
    total = 0
    drill_share = recipe.drill_share(index)
    batch_tokens = recipe.batch_tokens // recipe.processes
    while total < recipe.pool_batches * batch_tokens:
        example = encode(
            tokenizer,
            demo_corpus.sample(
                rng,
                plain_share=recipe.plain_share,
                json_share=recipe.json_share,
                sum_share=recipe.sum_share,
                drill_share=drill_share,
            ),
        )
        if len(example.ids) <= context:
            examples.append(example)
            total += len(example.ids)
    examples.sort(key=lambda example: len(example.ids))
    rows: list[list[Example]] = [[]]
    for example in examples:
        if (len(rows[-1]) + 1) * len(example.ids) > batch_tokens and rows[-1]:
            rows.append([])
        rows[-1].append(example)
    rng.shuffle(rows)
    return [collate(row) for row in rows]


def batches(
    tokenizer: Tokenizer, recipe: Recipe, context: int, place: tuple[int, int]
) -> Iterator[tuple[Batch, tuple[int, int]]]:
    """Batches from a place (pool, batch in it) on, each with the place that follows it."""
    index, at = place
    while True:
        current = pool(tokenizer, recipe, index, context)
        while at < len(current):
            at += 1
            yield current[at - 1], (index, at)
        index, at = index + 1, 0


# --- network -----------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Scales a vector to unit mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The scaled vector, in the type it came in."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normalized queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attention over the row; written out, because the fused kernel's backward is slower on CPU."""
        rows, width, _ = x.shape
        heads, kv_heads, size = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        group = heads // kv_heads
        q = self.q_norm(self.q_proj(x).view(rows, width, heads, size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, width, kv_heads, size)).transpose(1, 2)
        v = self.v_proj(x).view(rows, width, kv_heads, size).transpose(1, 2)
        q = _rotate(q, cos, sin) * size**-0.5
        k = _rotate(k, cos, sin)
        scores = q.reshape(rows, kv_heads, group * width, size) @ k.transpose(2, 3)
        scores = scores.view(rows, kv_heads, group, width, width) + mask
        weights = scores.softmax(-1, dtype=v.dtype).view(rows, kv_heads, group * width, width)
        mixed = (weights @ v).view(rows, heads, width, size).transpose(1, 2)
        out: Tensor = self.o_proj(mixed.reshape(rows, width, heads * size))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class Mlp(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention, then the feed-forward layer, each added to what came in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, norm: everything but the head, under Hugging Face's name `model`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class DemoModel(nn.Module):
    """A Qwen3 causal language model; its head is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), frequencies)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._start_small()

    def _start_small(self) -> None:
        depth_scale = (2 * self.shape.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale if "embed" in name else scale / math.sqrt(weight.shape[1]))

    def hidden(self, ids: Tensor) -> Tensor:
        """The last layer's output, normalized."""
        x = self.model.embed_tokens(ids)
        width = ids.shape[1]
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = self.cos[:width].to(kind), self.sin[:width].to(kind)
        mask = torch.full((width, width), float("-inf"), dtype=kind).triu(1)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        """Logits, at some positions of the flattened rows or at all."""
        x = self.hidden(ids)
        if where is not None:
            x = x.flatten(0, 1)[where]
        return functional.linear(x, self.model.embed_tokens.weight)


# --- training ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """Where the run stands; with the weights, all that a checkpoint holds."""

    step: int = 0
    place: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    tokens: int = 0
    loss: float = 0.0


class Trainer:
    """The run: a model, its optimizers, and the way from one checkpoint to the next.

    Several processes may each hold one; they take turns at the batches and share their gradients, and
    since all else is computed alike in each, their weights never part.
    """

    def __init__(
        self, shape: ModelShape, recipe: Recipe, work_dir: Path, rank: int = 0, start_from: Path | None = None
    ) -> None:
        """`start_from` is the directory of an exported model whose weights a run without a checkpoint starts from."""
        torch.manual_seed(recipe.seed)
        torch.set_num_threads(1)
        self.rank = rank
        self.shape, self.recipe, self.work_dir = shape, recipe, work_dir
        self.start_from = start_from
        self.tokenizer = load_tokenizer(work_dir, shape, recipe)
        self.model = DemoModel(shape)
        self.progress = Progress()
        self.is_stopping = self.is_stopped = False  # Asked to stop; agreed by all processes to stop.
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        vectors = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            self._matrix_optimizer(matrices),
            torch.optim.AdamW(vectors, recipe.vector_lr * recipe.rate_factor, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def _matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        recipe = self.recipe
        rate, decay = recipe.matrix_lr * recipe.rate_factor, recipe.weight_decay
        if recipe.is_mixed:
            return torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return torch.optim.AdamW(matrices, rate, betas=(0.9, 0.98), weight_decay=decay)  # Muon computes in bfloat16.

    def resume(self) -> None:
        """Continue from the checkpoint of the work directory, or from the weights of `start_from`, where there is one."""
        path = self.work_dir / "checkpoint.pt"
        if not path.exists():
            if self.start_from is not None:
                self.model.load_state_dict(load_file(self.start_from / "model.safetensors"))
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        self.progress = Progress(**state["progress"])
        self.progress.place = (self.progress.place[0], self.progress.place[1])
        print(f"resumed at step {self.progress.step}, {self.progress.seconds / 60:.1f} min", flush=True)

    def save(self) -> None:
        """Writes the checkpoint in one move."""
        if self.rank > 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": torch.get_rng_state(),
            "progress": asdict(self.progress),
        }
        path = self.work_dir / "checkpoint.pt"
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def stop(self, *_: object) -> None:
        """After the step at hand, save and end: what the first Ctrl-C does."""
        self.is_stopping = True

    def share_done(self) -> float:
        """How much of the budget is used, from 0 to 1."""
        if self.recipe.steps:
            return self.progress.step / self.recipe.steps
        return self.progress.seconds / (60 * self.recipe.minutes)

    def rate(self) -> float:
        """The factor on the learning rates: up, level, and down to zero at the end."""
        warm = min(1.0, (self.progress.step + 1) / self.recipe.warmup_steps)
        return warm * min(1.0, max(0.0, 1 - self.share_done()) / self.recipe.decay_share)

    def train(self, between_pools: Callable[[], None]) -> None:
        """Steps until the budget is used."""
        saved_at = clock = time.monotonic()
        seconds_before = self.progress.seconds
        losses: list[float] = []
        stream = batches(self.tokenizer, self.recipe, self.shape.context, self.progress.place)
        while self.share_done() < 1 and not self.is_stopped:
            turns = list(islice(stream, self.recipe.processes))
            place = turns[-1][1]
            losses.append(self._step(turns[self.rank][0], seconds_before + time.monotonic() - clock))
            if place[0] != self.progress.place[0]:
                between_pools()
            self.progress.step += 1
            self.progress.place = place
            self.progress.tokens += sum(batch.ids.numel() for batch, _ in turns)
            if self.progress.step % 50 == 0:
                self.progress.loss = sum(losses) / len(losses)
                losses.clear()
                self._report()
            if time.monotonic() - saved_at > 60 * self.recipe.checkpoint_minutes:
                self.save()
                saved_at = time.monotonic()
        self.save()

    def _step(self, batch: Batch, seconds: float) -> float:
        rate = self.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.is_mixed):
            logits = self.model(batch.ids, batch.where)
        loss = functional.cross_entropy(logits.float(), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        mean_loss, self.progress.seconds = self._share(loss.item(), seconds)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return mean_loss

    def _share(self, loss: float, seconds: float) -> tuple[float, float]:
        """Averages the gradients of all processes; gives the mean loss and the first one's clock."""
        if self.recipe.processes == 1:
            self.is_stopped = self.is_stopping
            return loss, seconds
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        first_clock = seconds * self.recipe.processes if self.rank == 0 else 0.0
        facts = torch.tensor([loss, first_clock, float(self.is_stopping)], dtype=torch.float64)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        distributed.all_reduce(facts)
        flat /= self.recipe.processes
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.is_stopped = float(facts[2]) > 0
        return float(facts[0]) / self.recipe.processes, float(facts[1]) / self.recipe.processes

    def _report(self) -> None:
        if self.rank > 0:
            return
        progress = self.progress
        speed = progress.tokens / max(progress.seconds, 1e-9)
        print(
            f"step {progress.step}  loss {progress.loss:.4f}  {progress.seconds / 60:.1f} min"
            f"  {progress.tokens / 1e6:.2f} Mtok  {speed:.0f} tok/s  rate {self.rate():.2f}",
            flush=True,
        )


def load_tokenizer(work_dir: Path, shape: ModelShape, recipe: Recipe, start_from: Path | None = None) -> Tokenizer:
    """Return the tokenizer of the work directory; first copy it from `start_from`, or train it, where there is none."""
    path = work_dir / "tokenizer.json"
    if start_from is not None and not path.exists():
        shutil.copyfile(start_from / "tokenizer.json", path)
    if not path.exists():
        print("training the tokenizer", flush=True)
        tokenizer = train_tokenizer(shape.vocab, recipe.seed)
        tokenizer.save(str(path.with_suffix(".new")))
        path.with_suffix(".new").replace(path)
    return Tokenizer.from_file(str(path))


# --- export ------------------------------------------------------------------------------------


def export(trainer: Trainer, target: Path) -> None:
    """Writes the model as Hugging Face and our own CPU engine load it; each file in one move."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in trainer.model.named_parameters()}
    save_file(weights, target / "model.safetensors.new", metadata={"format": "pt"})
    (target / "model.safetensors.new").chmod(0o644)
    (target / "model.safetensors.new").replace(target / "model.safetensors")
    vocabulary = trainer.tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
    _write(target / "tokenizer.json", trainer.tokenizer.to_str(pretty=False))
    _write_json(target / "config.json", model_config(trainer.shape, ids))
    _write_json(target / "tokenizer_config.json", tokenizer_config(trainer.tokenizer, trainer.shape))
    _write_json(target / "generation_config.json", generation_config(ids))
    progress, recipe = trainer.progress, trainer.recipe
    facts = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "minutes": round(progress.seconds / 60, 1),
        "steps": progress.step,
        "tokens": progress.tokens,
        "loss": round(progress.loss, 4),
        "seed": recipe.seed,
    }
    _write_json(trainer.work_dir / "run.json", facts)
    print(f"exported step {progress.step} to {target.name}", flush=True)


def model_config(shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def tokenizer_config(tokenizer: Tokenizer, shape: ModelShape) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *VISIBLE_TOKENS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "chat_template": demo_corpus.CHAT_TEMPLATE,
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """`generation_config.json`: cool sampling, since nearly every answer has one right form."""
    return {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 20,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def check_export(trainer: Trainer, target: Path) -> float:
    """The largest difference between transformers' logits and ours on one conversation."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    rng = random.Random(0)
    text = "".join(piece for piece, _ in demo_corpus.pieces(demo_corpus.tool_conversation(rng, thinking=True)))
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0].tolist() == trainer.tokenizer.encode(text).ids, "the tokenizers differ"
    ours = DemoModel(trainer.shape).eval()
    rounded = {name: p.to(torch.bfloat16).float() for name, p in trainer.model.state_dict().items()}
    ours.load_state_dict(rounded)
    with torch.no_grad():
        difference = float((theirs(ids).logits - ours(ids)).abs().max())
    assert difference < 1e-2, f"transformers computes other logits: {difference}"
    return difference


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo model that is bundled with dynamo-serve.",
        epilog="The work directory keeps the tokenizer, the checkpoint and run.json. Start the command again to go on "
        "where it was stopped; give more --minutes to go on after it has ended (the rate rises again, then falls). "
        "Then run tools/eval_demo_model.py, which measures the export and writes the model card.",
    )
    default = Recipe()
    parser.add_argument("--work-dir", type=Path, required=True, help="where checkpoints and the tokenizer are kept")
    parser.add_argument(
        "--out", type=Path, default=PACKAGE_DIR, help="where the model is exported (default: the package)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=default.minutes,
        help="budget of training time, all starts together (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=0, help="a budget in steps instead: the same run on every machine")
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="seed of weights, corpus and order (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=default.batch_tokens, help="tokens in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--decay-share",
        type=float,
        default=default.decay_share,
        help="last part of the budget, in which the rate falls",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=default.processes,
        help="processes that share each step, one thread each (default: %(default)s)",
    )
    parser.add_argument(
        "--start-from", type=Path, help="exported model whose tokenizer and weights a new work directory starts from"
    )
    parser.add_argument(
        "--rate-factor", type=float, default=1.0, help="factor on the learning rates (default: %(default)s)"
    )
    parser.add_argument(
        "--plain-share",
        type=float,
        default=default.plain_share,
        help="examples that are texts without turns (default: %(default)s)",
    )
    parser.add_argument(
        "--json-share",
        type=float,
        default=default.json_share,
        help="examples under a JSON schema (default: %(default)s)",
    )
    parser.add_argument(
        "--sum-share", type=float, default=default.sum_share, help="drills of sums among those (default: %(default)s)"
    )
    parser.add_argument(
        "--float32", action="store_true", help="compute in float32: for a processor without bfloat16 instructions"
    )
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint as it is and stop")
    return parser.parse_args(arguments)


def keep_memory() -> Callable[[], None]:
    """Lets glibc keep freed memory, which doubles the speed; the result gives the surplus back.

    Rows of ever new lengths leave holes between them, so now and then the surplus must go.
    """
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: never map a block of its own.
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink unasked.

    def give_back() -> None:
        libc.malloc_trim(0)

    return give_back


def run(rank: int, given: argparse.Namespace, recipe: Recipe) -> None:
    """One process of the run; the first one also exports and checks."""
    give_back = keep_memory()
    trainer = Trainer(ModelShape(), recipe, given.work_dir, rank, given.start_from)
    trainer.resume()
    if not given.export_only:
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, trainer.stop if rank == 0 else signal.SIG_IGN)
        if recipe.processes > 1:
            meeting = (given.work_dir / f"meeting-{os.getppid() if rank else os.getpid()}").resolve()
            distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=recipe.processes)
        trainer.train(give_back)
        if recipe.processes > 1:
            distributed.destroy_process_group()
            meeting.unlink(missing_ok=True)
    if rank == 0:
        export(trainer, given.out)
        print(f"transformers agrees within {check_export(trainer, given.out):.1e}", flush=True)


def main() -> None:
    """Train or go on, then export and check."""
    given = parse()
    given.work_dir.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(
        seed=given.seed,
        minutes=given.minutes,
        steps=given.steps,
        batch_tokens=given.batch_tokens,
        decay_share=given.decay_share,
        processes=given.processes,
        rate_factor=given.rate_factor,
        plain_share=given.plain_share,
        json_share=given.json_share,
        sum_share=given.sum_share,
        is_mixed=not given.float32,
    )
    load_tokenizer(given.work_dir, ModelShape(), recipe, given.start_from)
    others = []
    if not given.export_only:
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=run, args=(rank, given, recipe), daemon=True) for rank in range(1, recipe.processes)
        ]
    for other in others:
        other.start()
    run(0, given, recipe)
    for other in others:
        other.join()


if __name__ == "__main__":
    main()
