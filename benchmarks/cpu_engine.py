"""The embedded engine against `transformers`: the same checkpoint, threads and dtype, in one run.

    python benchmarks/cpu_engine.py [--threads N] [--rounds N] [--hidden N --layers N ...]

Makes a Qwen3 checkpoint with random weights and measures decode steps at batch 1, 8 and 16, the prefill of 512 tokens, and that of
1,536 tokens, by the engine in chunks of 512, its default, and in one shot.
The engine is measured as it serves, with its scheduler, paged cache and sampler; `transformers` by its bare forward
pass with a cache and an argmax, without the overhead of `generate()`. The two take turns, and medians are compared,
because the machine is rarely quiet.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.report import write_result
from dynamo.core.config import environ
from dynamo.cpu import blas

PROMPT_TOKENS = 128
DECODE_STEPS = 32
PREFILL_TOKENS = 512
LONG_TOKENS = 1536
BLOCK_TOKENS = 16
BATCHES = (1, 8, 16)
AIM = 1.0
CHUNKED_AIM = 1.1

HOW_TO_GET = """\
This benchmark compares with PyTorch and transformers, which the project itself does not need:
    .venv/bin/pip install -e '.[test]'      (or make test, which does it)"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=blas.cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="two rounds, and no result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


class TransformersModel:
    """Forward pass of transformers, without `generate()`."""

    def __init__(self, path: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def prefill(self, prompts: list[list[int]]) -> Any:
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1:].argmax(-1)

    def decode(self, prompts: list[list[int]]) -> float:
        """Return the seconds per step."""
        cache, tokens = self.prefill(prompts)
        start = time.perf_counter()
        with self.torch.inference_mode():
            for _ in range(DECODE_STEPS):
                out = self.model(tokens, past_key_values=cache, use_cache=True)
                tokens = out.logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) / DECODE_STEPS


class EmbeddedEngine:
    """Engine core, without its thread."""

    def __init__(self, path: str) -> None:
        from dynamo.cpu.architecture import Architecture
        from dynamo.cpu.model import TransformerModel, load_weights

        shape = Architecture.read(path)
        self.blocks = 1024
        self.model = TransformerModel(
            shape,
            load_weights(path, shape),
            slots=self.blocks * BLOCK_TOKENS,
            rows_max=LONG_TOKENS,
            longest=shape.context_length,
        )

    def begin(self, prompts: list[list[int]], step_tokens: int = PREFILL_TOKENS) -> Any:
        from dynamo.cpu.blocks import KvBlockPool
        from dynamo.cpu.core import Core
        from dynamo.cpu.generation import ActiveGeneration, GeneratedChoice, StopRules
        from dynamo.cpu.sampler import Sampling
        from dynamo.cpu.scheduler import Scheduler
        from dynamo.cpu.sequence import TokenSequence

        pool = KvBlockPool(self.blocks)
        core = Core(self.model, Scheduler(pool, sequences_max=32, batched_tokens_max=step_tokens), BLOCK_TOKENS)
        rules = StopRules(max_tokens=2 * DECODE_STEPS)
        for prompt in prompts:
            choice = GeneratedChoice(0, TokenSequence(prompt, BLOCK_TOKENS), Sampling(temperature=0.0), rules)
            core.add(ActiveGeneration(NullReply(), [choice]))
        return core

    def prefill(self, prompts: list[list[int]], step_tokens: int = PREFILL_TOKENS) -> None:
        """Compute the prompts in steps of at most so many tokens."""
        core = self.begin(prompts, step_tokens)
        steps = -(-sum(map(len, prompts)) // step_tokens)
        outputs = [len(core.step().outputs) for _ in range(steps)]
        assert outputs == [0] * (steps - 1) + [len(prompts)], "the prompts took another number of steps"

    def decode(self, prompts: list[list[int]]) -> float:
        """Return the seconds per step."""
        core = self.begin(prompts)
        while len(core.step().outputs) < len(prompts):
            pass
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            core.step()
        return (time.perf_counter() - start) / DECODE_STEPS


class NullReply:
    """Reply that discards its output."""

    request_id = "benchmark"
    is_cancelled = False

    def on_cancel(self, callback: Callable[[], None]) -> None: ...
    def token(self, token_id: int) -> None: ...
    def item(self, value: Any) -> None: ...
    def finish(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


def make_checkpoint(path: str, args: argparse.Namespace) -> int:
    """Write a model with random weights and return their number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of both: the tokens that a call computes, and what returns its seconds."""

    name: str
    tokens: int
    ours: Callable[[], float]
    theirs: Callable[[], float]

    def medians(self, rounds: int) -> tuple[float, float]:
        """Print one line and return the median seconds of ours and theirs, which take turns."""
        self.ours(), self.theirs()
        pairs = [(self.ours(), self.theirs()) for _ in range(rounds)]
        our_s, their_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        rates = f"{self.tokens / our_s:12.0f} {self.tokens / their_s:14.0f}"
        print(f"{self.name:22s} {rates} {their_s / our_s:9.2f}x", flush=True)
        return our_s, their_s


def cases_of(ours: EmbeddedEngine, theirs: TransformersModel, vocab: int) -> list[Case]:
    """Return the comparisons with `transformers`."""
    import numpy as np  # After `blas.prepare`.

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocab, (max(BATCHES), PROMPT_TOKENS)).tolist()
    cases = [
        Case(f"decode {batch}", batch, partial(ours.decode, prompts[:batch]), partial(theirs.decode, prompts[:batch]))
        for batch in BATCHES
    ]
    for tokens in (PREFILL_TOKENS, LONG_TOKENS):
        long = rng.integers(0, vocab, (1, tokens)).tolist()
        run = partial(timed, partial(ours.prefill, long)), partial(timed, partial(theirs.prefill, long))
        cases.append(Case(f"prefill {tokens}", tokens, *run))
    return cases


def chunked_over_one_shot(ours: EmbeddedEngine, vocab: int, rounds: int) -> float:
    """Print and return the time of a prefill in chunks over that of the same prompt in one step."""
    import numpy as np  # After `blas.prepare`.

    long = np.random.default_rng(1).integers(0, vocab, (1, LONG_TOKENS)).tolist()

    def once(step_tokens: int) -> float:
        return timed(lambda: ours.prefill(long, step_tokens))

    once(PREFILL_TOKENS), once(LONG_TOKENS)
    pairs = [(once(PREFILL_TOKENS), once(LONG_TOKENS)) for _ in range(rounds)]
    chunked_s, whole_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"prefill {LONG_TOKENS} in chunks of {PREFILL_TOKENS}: {chunked_s * 1e3:.0f} ms, "
        f"in one shot {whole_s * 1e3:.0f} ms, {chunked_s / whole_s:.2f}x",
        flush=True,
    )
    return chunked_s / whole_s


def main() -> int:
    args = arguments()
    blas.prepare(args.threads, environ())
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"{error}\n{HOW_TO_GET}", file=sys.stderr)
        return 2
    import numpy as np

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as path:
        weights = make_checkpoint(path, args)
        ours, theirs = EmbeddedEngine(path), TransformersModel(path, args.threads)
    print(
        f"Qwen3, {weights / 1e6:.0f} M random weights, float32, {args.threads} threads; numpy {np.__version__}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(f"{'tokens per second':22s} {'dynamo.cpu':>12s} {'transformers':>14s} {'ratio':>10s}")
    seconds = {case.name: case.medians(args.rounds) for case in cases_of(ours, theirs, args.vocab)}
    ratios = {name: their_s / our_s for name, (our_s, their_s) in seconds.items()}
    chunked = chunked_over_one_shot(ours, args.vocab, args.rounds)
    print(f"aim: {AIM}x in each; {'reached' if min(ratios.values()) >= AIM else 'missed'}")
    print(f"aim of chunks: at most {CHUNKED_AIM}x; {'reached' if chunked <= CHUNKED_AIM else 'missed'}")
    found = {
        "ratios": ratios,
        "chunked_over_one_shot": chunked, "chunk_tokens": PREFILL_TOKENS, "long_tokens": LONG_TOKENS,
        "weights": weights, "threads": args.threads, "rounds": args.rounds, "aim": AIM,
        "numpy": np.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    print(write_result("cpu_engine", found, is_whole=not args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
