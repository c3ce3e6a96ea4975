"""Cost of LoRA adapters in a step of the embedded engine: decode rows with none, with one for all, with four for half.

    python -m benchmarks.lora_step [--rank 8] [--quick]

The cases alternate, so that background load affects all of them; printed are medians and tenth percentiles.
"""

import argparse
import os
import time
from collections.abc import Sequence

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from benchmarks.report import write_result
from dynamo.cpu.adapter import Adapted, Adapter, AdapterDelta, LayerDeltas, rows_of
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import DEMO_MODEL
from dynamo.cpu.model import Batch, TransformerModel, load_weights
from dynamo.cpu.spans import TokenSpan

CONTEXT = 100
SLOTS = 128
ADAPTERS = 4
QUICK_STEPS = 30


def adapter(shape: Architecture, rank: int, number: int) -> Adapter:
    """Return an adapter of all seven projections."""
    rng = np.random.default_rng(number)
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.heads * dim, shape.kv_heads * dim

    def delta(inputs: int, projections: int, outputs: int) -> AdapterDelta:
        ranks = rank * projections
        down, up = rng.standard_normal((inputs, ranks)), rng.standard_normal((ranks, outputs))
        return AdapterDelta((down * 0.01).astype(np.float32), (up * 0.01).astype(np.float32))

    layers = [
        LayerDeltas(
            delta(hidden, 3, q + 2 * kv), delta(q, 1, hidden), delta(hidden, 2, 2 * inner), delta(inner, 1, hidden)
        )
        for _ in range(shape.layers)
    ]
    return Adapter(str(number), number, number, layers)


def decoding(rows: int, adapted: Sequence[Adapted] = ()) -> Batch:
    """Return a step with one token for each of that many sequences."""
    spans = [TokenSpan(row, 1, CONTEXT, [(row * SLOTS, row * SLOTS + CONTEXT)]) for row in range(rows)]
    ids = np.arange(rows, dtype=np.intp)
    ones = np.ones(rows, dtype=np.intp)
    return Batch(ones, ones * (CONTEXT - 1), ids * SLOTS + CONTEXT - 1, spans, ids, adapted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--quick", action="store_true", help="few steps, and no results file")
    options = parser.parse_args()
    steps = QUICK_STEPS if options.quick else options.steps
    shape = Architecture.read(options.model)
    model = TransformerModel(
        shape, load_weights(options.model, shape), slots=32 * SLOTS, rows_max=64, longest=2 * CONTEXT
    )
    adapters = [adapter(shape, options.rank, number) for number in range(ADAPTERS)]
    print(f"{shape.layers} layers of {shape.hidden_size}, rank {options.rank}, {steps} steps of each")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for rows in (1, 8, 32):
        cases = {"none": decoding(rows), "one for all": decoding(rows, [Adapted(adapters[0], slice(0, rows))])}
        if rows >= 2 * ADAPTERS:
            parts = [Adapted(one, rows_of(range(at, rows, 2 * ADAPTERS))) for at, one in enumerate(adapters)]
            cases["four for half"] = decoding(rows, parts)
        took: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(steps):
            for name, batch in cases.items():
                began = time.perf_counter()
                model.forward(batch)
                took[name].append((time.perf_counter() - began) * 1e3)
        for name, times in took.items():
            tenth, median = map(float, np.percentile(times, [10, 50]))
            found.setdefault(f"{rows} rows", {})[name] = {"median_ms": median, "tenth_ms": tenth}
            print(f"{rows:3d} rows, adapters: {name:14s} median {median:6.2f} ms, tenth {tenth:6.2f} ms")
    result = {"rank": options.rank, "steps": steps, "steps_ms": found}
    print(f"written to {write_result('lora_step', result, is_whole=not options.quick)}")


if __name__ == "__main__":
    main()
