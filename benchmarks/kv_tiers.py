"""KV tiers: TTFT of a repeated prompt, and bandwidth compared with memcpy, in one run.

    python -m benchmarks.kv_tiers [--quick] [--disk-dir DIR]

The embedded engine's core runs a random Qwen3 model. A prompt of 2,000 tokens is sent, others evict it from the cache,
and it is sent again: recomputed, from the host, from disk, and from a directory as object store. All responses are
compared.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import number, print_line, table, write_result
from dynamo.core.config import environ, exit_on_config_error, load, option
from dynamo.cpu import blas

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2_000
OUTPUT_TOKENS = 8
PATIENCE_S = 60.0
AIM_HOST, AIM_DISK = 3.0, 2.0
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """Benefit of KV tiers for the embedded engine."""

    quick: bool = option(False, "--quick", None, "Fewer rounds, and no results file")
    disk_dir: str | None = option(
        None, "--disk-dir", None, "Directory of the disk tier; the system's temporary directory"
    )
    threads: int = option(blas.cores(), "--threads", None, "Threads of the matrix products")

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 5


class NullReply:
    """Reply that keeps its tokens."""

    request_id = "benchmark"
    is_cancelled = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_cancel(self, callback: Callable[[], None]) -> None: ...
    def token(self, token_id: int) -> None: ...
    def item(self, value: Any) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Engine:
    """Engine core with a cache that holds one prompt, and the tiers of a case."""

    def __init__(self, path: str, disk_dir: str, **tiers: Any) -> None:
        from dynamo.core.metrics import MetricsRegistry
        from dynamo.cpu.architecture import Architecture
        from dynamo.cpu.blocks import KvBlockPool
        from dynamo.cpu.core import Core
        from dynamo.cpu.model import TransformerModel, load_weights
        from dynamo.cpu.scheduler import Scheduler
        from dynamo.cpu.tiers import open_tiers
        from dynamo.kvbm.config import KvbmConfig

        shape = Architecture.read(path)
        blocks = PROMPT_TOKENS // BLOCK_TOKENS + 2
        model = TransformerModel(
            shape,
            load_weights(path, shape),
            slots=blocks * BLOCK_TOKENS,
            rows_max=512,
            longest=shape.context_length,
        )
        self.tiers = None
        if tiers:
            config = KvbmConfig(disk_dir=disk_dir, disk_filter=False, onboard_timeout_s=PATIENCE_S, **tiers)
            self.tiers = open_tiers(config, path, model.cache, BLOCK_TOKENS, "1", lambda: None)
            self.tiers.start(MetricsRegistry())
        pool = KvBlockPool(blocks, notes_evicted=self.tiers is not None)
        scheduler = Scheduler(pool, sequences_max=8, batched_tokens_max=512, tiers=self.tiers)
        self.core = Core(model, scheduler, BLOCK_TOKENS, self.tiers)

    def send_request(self, prompt: list[int]) -> tuple[float, int, list[int]]:
        """Return the seconds to the first token, the number of uncomputed prompt tokens, and the output."""
        from dynamo.cpu.generation import ActiveGeneration, GeneratedChoice, StopRules
        from dynamo.cpu.sampler import Sampling
        from dynamo.cpu.sequence import TokenSequence

        rules = StopRules(max_tokens=OUTPUT_TOKENS)
        sequence = TokenSequence(prompt, BLOCK_TOKENS)
        generation = ActiveGeneration(NullReply(), [GeneratedChoice(0, sequence, Sampling(temperature=0.0), rules)])
        began = time.perf_counter()
        self.core.add(generation)
        first = 0.0
        while self.core.has_work:
            if self.core.step().outputs and not first:
                first = time.perf_counter() - began
        self.settle()
        return first, sequence.cached_tokens or 0, sequence.tokens[len(prompt) :]

    def settle(self) -> None:
        """Return when no block is in transit to a slower tier."""
        if self.tiers is None:
            return
        book = self.tiers.manager.book
        deadline = time.monotonic() + PATIENCE_S
        while any(book.waiting(tier) for tier in book.lower) or any(pool.held() for pool in book.lower.values()):
            assert time.monotonic() < deadline, "the blocks never arrived"
            time.sleep(0.002)

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()


def make_checkpoint(path: str) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    hidden, inner, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    q, kv = SHAPE["num_attention_heads"] * dim, SHAPE["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def gain(size: int) -> Any:
        return np.ones(size, np.float32)

    tensors = {"model.embed_tokens.weight": matrix(SHAPE["vocab_size"], hidden) * 4, "model.norm.weight": gain(hidden)}
    for at in range(SHAPE["num_hidden_layers"]):
        for name, tensor in {
            "input_layernorm": gain(hidden),
            "post_attention_layernorm": gain(hidden),
            "self_attn.q_proj": matrix(q, hidden),
            "self_attn.k_proj": matrix(kv, hidden),
            "self_attn.v_proj": matrix(kv, hidden),
            "self_attn.q_norm": gain(dim),
            "self_attn.k_norm": gain(dim),
            "self_attn.o_proj": matrix(hidden, q),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }.items():
            tensors[f"model.layers.{at}.{name}.weight"] = tensor
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(SHAPE, file)
    save_file(tensors, os.path.join(path, "model.safetensors"))


def returning(path: str, scratch: str, rounds: int) -> tuple[dict[str, float], bool]:
    """Return the median TTFT of a repeated prompt in seconds by source, and whether all outputs are equal."""
    import numpy as np

    blocks = PROMPT_TOKENS // BLOCK_TOKENS + 4
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, SHAPE["vocab_size"], (rounds, PROMPT_TOKENS)).tolist()
    cases: dict[str, dict[str, Any]] = {
        "computed": {},
        "G2, host": {"cpu_blocks": blocks * rounds},
        "G3, disk": {"cpu_blocks": blocks * 2, "disk_blocks": blocks * rounds},
        "G3, disk through the page cache": {
            "cpu_blocks": blocks * 2,
            "disk_blocks": blocks * rounds,
            "disk_direct": False,
        },
        "G4, a directory": {
            "cpu_blocks": blocks * 2,
            "object_enabled": True,
            "object_endpoint": f"file://{scratch}/objects",
        },
    }
    found: dict[str, float] = {}
    answers: dict[int, list[int]] = {}
    agrees = True
    for number_, (name, tiers) in enumerate(cases.items()):
        engine = Engine(path, os.path.join(scratch, f"disk{number_}"), **tiers)
        for at, prompt in enumerate(prompts):
            _, _, answer = engine.send_request(prompt)
            agrees &= answers.setdefault(at, answer) == answer
        times = []
        # With a small host tier the last prompts are still there; they are sent again at the end of the next round.
        for at, prompt in enumerate(prompts[: max(1, rounds - 2)] if tiers and "host" not in name else prompts):
            first, cached, answer = engine.send_request(prompt)
            agrees &= answers[at] == answer
            is_whole = cached == (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            agrees &= is_whole if tiers else cached == 0
            times.append(first)
        engine.close()
        found[name] = statistics.median(times)
    return found, agrees


def copying(path: str, scratch: str, rounds: int) -> dict[str, float]:
    """Return gigabytes per second of each transport, and of memcpy for the same bytes."""
    import numpy as np

    from dynamo.cpu.attention import KvCache
    from dynamo.kvbm.logical.blocks import BlockIdentity
    from dynamo.kvbm.physical.disk import Disk
    from dynamo.kvbm.physical.host import HostArena
    from dynamo.kvbm.physical.layout import BlockLayout
    from dynamo.kvbm.physical.objects import LocalObjects, ObjectBlocks

    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    cache = KvCache(SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"], blocks * BLOCK_TOKENS, SHAPE["head_dim"])
    layout = BlockLayout(cache.between(0, BLOCK_TOKENS).shape, "float32", "benchmark")
    arena, other = HostArena(layout, blocks), HostArena(layout, blocks)
    cache.between(0, blocks * BLOCK_TOKENS)[...] = np.float32(1.5)
    other.memory[:] = 1
    objects = ObjectBlocks(LocalObjects(os.path.join(scratch, "copied")), layout, PATIENCE_S)

    def out() -> None:
        for at in range(blocks):
            arena.array(at)[...] = cache.between(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS)

    def back() -> None:
        for at in range(blocks):
            cache.between(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS)[...] = arena.array(at)

    written = 0

    def put_objects() -> None:
        nonlocal written
        for at in range(blocks):
            objects.write(BlockIdentity(written * blocks + at, at), arena.raw(at))
        written += 1

    def get_objects() -> None:
        for at in range(blocks):
            objects.read(at, other.raw(at), PATIENCE_S)

    def on_disk(disk: Disk) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def write() -> None:
            for first in range(0, blocks, 16):
                part = range(first, min(blocks, first + 16))
                disk.write([(at, BlockIdentity(at + 1, at), arena.padded(at)) for at in part])

        def read() -> None:
            for first in range(0, blocks, 16):
                part = range(first, min(blocks, first + 16))
                assert not any(disk.read([(at, at + 1, other.padded(at)) for at in part])), "a block is corrupt"

        return write, read

    direct = Disk(os.path.join(scratch, "direct"), layout, blocks)
    cached = Disk(os.path.join(scratch, "cached"), layout, blocks, is_direct=False)
    ways: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: np.copyto(other.memory, arena.memory),
        "G1 to G2": out,
        "G2 to G1": back,
    }
    for name, disk in (("direct I/O" if direct.is_direct else "no direct I/O here", direct), ("page cache", cached)):
        ways[f"G2 to G3, {name}"], ways[f"G3 to G2, {name}"] = on_disk(disk)
    ways["G2 to G4, a directory"], ways["G4 to G2, a directory"] = put_objects, get_objects
    found: dict[str, list[float]] = {name: [] for name in ways}
    out()
    for _ in range(rounds + 1):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            found[name].append(blocks * layout.block_bytes / (time.perf_counter() - began) / 1e9)
    direct.close()
    cached.close()
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


def main() -> int:
    config = load(TiersConfig, sys.argv[1:], environ(), prog="python -m benchmarks.kv_tiers")
    blas.prepare(config.threads, environ())
    with tempfile.TemporaryDirectory(dir=config.disk_dir) as scratch:
        path = os.path.join(scratch, "model")
        os.makedirs(path)
        make_checkpoint(path)
        rates = copying(path, scratch, config.rounds)
        memcpy = rates["memcpy"]
        rows = [[name, number(rate), number(rate / memcpy)] for name, rate in rates.items()]
        print_line(table(["copied", "GB/s", "of memcpy"], rows))
        firsts, agrees = returning(path, scratch, 3 if config.quick else 5)
    computed = firsts["computed"]
    gains = {name: computed / seconds for name, seconds in firsts.items()}
    rows = [[name, number(seconds * 1e3), number(gains[name])] for name, seconds in firsts.items()]
    print_line(f"\nfirst token of a prompt of {PROMPT_TOKENS:,} tokens that comes back, {config.threads} threads")
    print_line(table(["from", "ms", "times sooner"], rows))
    reached = gains["G2, host"] >= AIM_HOST and gains["G3, disk"] >= AIM_DISK
    print_line(f"aim: {AIM_HOST:g}x from G2, {AIM_DISK:g}x from G3; {'reached' if reached else 'missed'}")
    print_line("all answers agree" if agrees else "error: answers differ, or blocks were computed that a tier had")
    if agrees:
        found = {"gigabytes_per_second": rates, "first_token_s": firsts, "threads": config.threads}
        print_line(write_result("kv_tiers", found, is_whole=not config.quick))
    return 0 if agrees else 1


if __name__ == "__main__":
    exit_on_config_error(main)
