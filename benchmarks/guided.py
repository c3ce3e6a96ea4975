"""Cost of guided decoding for the embedded engine, in microseconds of processor time per token.

    python -m benchmarks.guided [--tokens 2000] [--rounds 3]

Two vocabularies: the bundled demo model's, and that of the model of the other benchmarks, which has a realistic size.
For each kind of constraint, the median of the rounds:

    compile   milliseconds until the grammar is compiled, with the vocabulary already read
    mask      allowed next tokens
    take      the grammar's next state
    draw      sampling among the allowed tokens, and
    free      sampling without a constraint

Logits are noise, so that texts are as unusual as possible.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.corpus import bench_model
from benchmarks.report import write_result
from dynamo.cpu.config import DEMO_MODEL
from dynamo.cpu.guided import Grammars, Guide, key_of
from dynamo.cpu.sampler import Draw, Sampling, sample
from dynamo.protocols.engine import GuidedDecoding

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["dry", "wet", "windy"]}, "maxItems": 3},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
CALL = {"begin": "<function=get_weather>", "schema": WEATHER, "end": "</function>"}
CONSTRAINTS = {
    "JSON schema": GuidedDecoding(json=WEATHER),
    "pattern": GuidedDecoding(regex="[a-z ]{200}"),
    "choice": GuidedDecoding(choice=["yes", "no, never", "perhaps"]),
    "structural tag": GuidedDecoding(structural_tag={"structures": [CALL], "triggers": ["<function"]}),
}
TEXT_TOKENS_MAX = 200


@dataclass
class Cost:
    """Seconds, and the number of tokens."""

    compile_s: float = 0.0
    mask_s: float = 0.0
    take_s: float = 0.0
    draw_s: float = 0.0
    free_s: float = 0.0
    tokens: int = 0

    def row(self) -> tuple[float, ...]:
        """Return milliseconds to compile, then microseconds per token."""
        per_token = (seconds / self.tokens * 1e6 for seconds in (self.mask_s, self.take_s, self.draw_s, self.free_s))
        return (self.compile_s * 1e3, *per_token)


def measure(grammars: Grammars, guided: GuidedDecoding, vocab_size: int, tokens: int, seed: int) -> Cost:
    """Measure sequential texts under one constraint."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((16, vocab_size)).astype(np.float32)
    cost = Cost()
    clock = time.process_time
    began = clock()
    kept = grammars.compile(guided, key_of(guided, None))
    cost.compile_s = clock() - began
    guide, output = kept.fresh(), 0
    while cost.tokens < tokens:
        if guide.is_complete or output == TEXT_TOKENS_MAX:
            guide, output = kept.fresh(), 0
        logits, sampling = noise[cost.tokens % 16], Sampling(seed=cost.tokens, temperature=0.8, top_p=0.9)
        began = clock()
        allowed = guide.allowed(())
        masked = clock()
        cost.mask_s += masked - began
        if allowed is None:
            guide, output = kept.fresh(), 0
            continue
        token = sample(logits, Draw(sampling, output, allowed=allowed)).token
        drawn = clock()
        guide.take(token)
        taken = clock()
        sample(logits, Draw(sampling, output))
        cost.free_s += clock() - taken
        cost.draw_s += drawn - masked
        cost.take_s += taken - drawn
        cost.tokens += 1
        output += 1
    return cost


def vocab_size_of(model: str) -> int:
    """Return the number of logits of a step."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        return int(json.load(file)["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Guided decoding of the embedded engine, in µs per token.")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, and no result file")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for model in (DEMO_MODEL, bench_model()):
        size = vocab_size_of(model)
        grammars = Grammars(model, size)
        warm: Guide = grammars.compile(CONSTRAINTS["choice"], b"warm")
        assert not warm.is_complete
        print(f"\n{size:,} tokens       compile ms   mask µs   take µs   draw µs   free µs")
        for name, guided in CONSTRAINTS.items():
            rows = [
                measure(grammars, guided, size, options.tokens, seed).row()
                for seed in range(1 if options.quick else options.rounds)
            ]
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            found.setdefault(f"{size} tokens", {})[name] = medians
            print(
                f"{name:16}"
                + "".join(f"{value:{width}.1f}" for value, width in zip(medians, (16, 10, 10, 10, 10), strict=True))
            )
    columns = ["compile_ms", "mask_us", "take_us", "draw_us", "free_us"]
    print(write_result("guided", {"columns": columns, "medians": found}, is_whole=not options.quick))


if __name__ == "__main__":
    main()
