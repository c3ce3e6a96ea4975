"""Tokenizer cost: ours against `tokenizers` and, where it is installed, `fastokens`, in one run.

`ours` is the frontend's tokenizer with each of its encoders: the compiled one, `fastokens` behind a check where that is
installed, and words in Python.

    python -m benchmarks.tokenizer [--model DIR] [--tokens 512] [--rounds 3]

Prompts are cut from Python's own library and rendered as chats (`corpus.py`). Three cases, each in microseconds of
processor time per prompt, the median of the rounds, every implementation in a new process in each round:

    cold        the first prompts of the process
    warm words  new prompts, most of whose words are cached
    seen text   the same prompts again, as the earlier turns of a conversation are

All implementations must give the same ids, or the run fails.
"""

import argparse
import importlib.util
import multiprocessing
import os
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import tokenizers

from benchmarks.corpus import bench_model, read_prompts, render
from benchmarks.report import write_result
from dynamo.text.tokenizer.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]

CASES = ("cold", "warm words", "seen text")
COLD_PROMPTS = 8  # A cold cache is warm after 4,000 tokens.
WARMING_PROMPTS = 256
PROMPTS = 512


def implementations(model: str) -> dict[str, Callable[[], Encode]]:
    """Return a factory for each implementation."""
    path = os.path.join(model, "tokenizer.json")

    def library() -> Encode:
        encode = tokenizers.Tokenizer.from_file(path).encode
        return lambda text: list(encode(text, add_special_tokens=False).ids)

    made: dict[str, Callable[[], Encode]] = {"tokenizers": library}
    if importlib.util.find_spec("fastokens") is not None:
        import fastokens

        def fast() -> Encode:
            encode = fastokens.Tokenizer.from_file(path).encode
            return lambda text: list(encode(text, add_special_tokens=False).ids)

        made["fastokens"] = fast
        made["ours, over fastokens"] = lambda: Tokenizer.from_dir(model, ["fastokens"]).encode
    if importlib.util.find_spec("dynamo.text.tokenizer._compiled_words") is not None:
        made["ours, compiled"] = lambda: Tokenizer.from_dir(model, ["compiled"]).encode
    made["ours, words"] = lambda: Tokenizer.from_dir(model, ["words"]).encode
    return made


def cost_us(encode: Encode, texts: Sequence[str]) -> tuple[float, list[list[int]]]:
    """Return microseconds of processor time per text, and the ids."""
    start = time.process_time_ns()
    ids = [encode(text) for text in texts]
    return (time.process_time_ns() - start) / 1000 / len(texts), ids


def measure(model: str, name: str, prompts: Sequence[str]) -> tuple[list[float], int]:
    """Measure the three cases of one implementation; return the costs, and a checksum of the ids.

    Runs in a new process.
    """
    encode = implementations(model)[name]()
    cold, unseen = prompts[:COLD_PROMPTS], prompts[WARMING_PROMPTS:]
    costs: list[float] = []
    checksum = 0
    for is_counted, texts in ((1, cold), (0, prompts[COLD_PROMPTS:WARMING_PROMPTS]), (1, unseen), (1, unseen)):
        cost, ids = cost_us(encode, texts)
        checksum = zlib.crc32(repr(ids).encode(), checksum)
        if is_counted:
            costs.append(cost)
    return costs, checksum


def measure_round(model: str, names: Sequence[str], prompts: Sequence[str]) -> dict[str, list[float]]:
    """Measure each implementation in a process of its own. Raises `SystemExit` if their ids differ."""
    fresh = multiprocessing.get_context("spawn")
    costs: dict[str, list[float]] = {}
    first: int | None = None
    for name in names:
        with ProcessPoolExecutor(1, fresh) as pool:
            costs[name], checksum = pool.submit(measure, model, name, prompts).result()
        first = checksum if first is None else first
        if checksum != first:
            sys.exit(f"{name} gives other ids than {names[0]}")
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory with tokenizer.json; made for the purpose where none is given")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, and no result file")
    options = parser.parse_args()
    model = options.model or bench_model()
    prompts = [render(text) for text in read_prompts(model, options.tokens, count=PROMPTS).texts]
    random.Random(0).shuffle(prompts)
    names = list(implementations(model))
    rounds = [measure_round(model, names, prompts) for _ in range(1 if options.quick else options.rounds)]
    medians = {
        name: [statistics.median(costs) for costs in zip(*(each[name] for each in rounds), strict=True)]
        for name in names
    }
    print(f"{options.tokens} tokens a prompt; microseconds of processor time a prompt (ratio to tokenizers)")
    print(f"{'':22}" + "".join(f"{case:>20}" for case in CASES))
    for name, row in medians.items():
        cells = (f"{cost:9.1f} ({cost / base:4.2f}x)" for cost, base in zip(row, medians["tokenizers"], strict=True))
        print(f"{name:22}" + "".join(f"{cell:>20}" for cell in cells))
    found = {"tokens": options.tokens, "cases": CASES, "us": medians, "rounds": rounds}
    print(write_result("tokenizer", found, is_whole=not options.quick and not options.model))


if __name__ == "__main__":
    main()
