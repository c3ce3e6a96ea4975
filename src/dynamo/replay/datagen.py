"""Datagen: statistics of a trace, and synthesis of similar traces.

    datagen analyze --input-file F
    datagen synthesize --input-file F --num-requests N [--prefix-len-multiplier 4] …

Synthesis: the trace's prompts form a tree. Nodes visited by more than one request are its core; the rest of a prompt is
unique. New prompts walk the core with the probabilities of the visits and end in unique blocks, with lengths drawn from
the trace. Answer lengths and pauses are drawn from the trace as well.
"""

import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.report import percentile
from dynamo.replay.trace import read

REFUSALS_MAX = 100  # Rejected prompts per request before `--max-isl` is reported as too small.


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeConfig:
    """Prints statistics of a trace: lengths, and the share of prompts that earlier requests contained."""

    input_file: str | None = option(None, "--input-file", None, "Trace in Mooncake's format")
    block_size: int = option(512, "--block-size", None, "Tokens per hash id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesizeConfig:
    """Generates a trace with the statistics of another, optionally longer, busier or with more shared prefixes."""

    input_file: str | None = option(None, "--input-file", None, "Trace in Mooncake's format")
    num_requests: int = option(100_000, "--num-requests", None, "Number of requests to generate")
    speedup_ratio: float = option(1.0, "--speedup-ratio", None, "Divides the pauses between requests")
    prefix_len_multiplier: float = option(
        1.0, "--prefix-len-multiplier", None, "Multiplies the length of shared prefixes"
    )
    prefix_root_multiplier: int = option(
        1, "--prefix-root-multiplier", None, "Number of copies of the tree of shared prefixes"
    )
    prompt_len_multiplier: float = option(
        1.0, "--prompt-len-multiplier", None, "Multiplies the length of unshared prompt parts"
    )
    max_isl: int | None = option(None, "--max-isl", None, "Maximum prompt tokens")
    block_size: int = option(512, "--block-size", None, "Tokens per hash id")
    output_file: str | None = option(None, "--output-file", None, "Output file (default: the terminal)")
    seed: int = option(0, "--random-seed", None, "Random seed", aliases=("--seed",))

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-requests", self.num_requests),
            ("--speedup-ratio", self.speedup_ratio),
            ("--prefix-root-multiplier", self.prefix_root_multiplier),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: expected more than 0")
        if self.prefix_len_multiplier <= 0 or self.prompt_len_multiplier < 0:
            raise ConfigError("--prefix-len-multiplier and --prompt-len-multiplier must be more than 0")


def turns_of(path: str | None, block_tokens: int) -> list[Turn]:
    """Return the requests of a trace. Raise `ConfigError` if it is missing or empty."""
    if path is None:
        raise ConfigError("--input-file is missing")
    sessions: list[ReplaySession] = read([path], "mooncake", block_tokens)
    turns = [turn for session in sessions for turn in session.turns]
    if not turns:
        raise ConfigError(f"{path}: no requests found")
    return sorted(turns, key=lambda turn: turn.at_ms or 0.0)


# Statistics.


def analysis(turns: Sequence[Turn], block_tokens: int) -> dict[str, Any]:
    """Return length statistics, and the hit rate of an infinite cache."""
    counts: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    paths = [_path(turn.hash_ids) for turn in turns]
    for path in paths:
        for block in path:
            counts[block] = counts.get(block, 0) + 1
    hits = total = 0
    contexts, uniques, rates = [], [], []
    for turn, path in zip(turns, paths, strict=True):
        found = next((at for at, block in enumerate(path) if block not in seen), len(path))
        seen.update(path)
        hits += found
        total += len(path)
        rates.append(found / len(path) if path else 0.0)
        shared = next((at for at, block in enumerate(path) if counts[block] < 2), len(path))
        contexts.append(float(min(turn.input_tokens, shared * block_tokens)))
        uniques.append(turn.input_tokens - contexts[-1])
    return {
        "requests": len(turns),
        "blocks": total,
        "unique_blocks": len(seen),
        "unique_prefix_ratio": len(seen) / total if total else 0.0,
        "theoretical_hit_rate": hits / total if total else 0.0,
        "input_length": _spread([float(turn.input_tokens) for turn in turns]),
        "output_length": _spread([float(turn.output_tokens) for turn in turns]),
        "context_length": _spread(contexts),
        "unique_prompt_length": _spread(uniques),
        "hit_rate_by_request": _spread(rates),
        "duration_s": ((turns[-1].at_ms or 0.0) - (turns[0].at_ms or 0.0)) / 1000,
    }


def _path(hash_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return blocks with their prefix, so that equal names after different prefixes are different blocks."""
    path, before = [], 0
    for name in hash_ids:
        path.append((before, name))
        before = hash((before, name))
    return path


def _spread(values: list[float]) -> dict[str, float]:
    known = sorted(values)
    mean = sum(known) / len(known)
    return {
        "min": known[0],
        "avg": mean,
        "max": known[-1],
        "std": (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5,
        "p50": percentile(known, 0.5),
        "p99": percentile(known, 0.99),
    }


# Synthesis.


@dataclass(slots=True)
class PrefixSegment:
    """Consecutive blocks of the core without a branch."""

    length: int = 1
    children: dict[int, "PrefixSegment"] = field(default_factory=dict)
    visits: int = 1
    ends: int = 0
    """Requests that leave the core at its end."""
    first: int = -1
    """First of its new block names, by copy of the core."""


@dataclass(slots=True)
class TraceModel:
    """The distributions from which a trace is drawn."""

    root: PrefixSegment
    tails: list[int]
    """Lengths of the unshared ends of prompts in tokens."""
    outputs: list[int]
    pauses: list[float]


def learned(turns: Sequence[Turn], block_tokens: int) -> TraceModel:
    """Return the model of a trace."""
    root = PrefixSegment(length=0, visits=0)
    for turn in turns:
        node = root
        node.visits += 1
        for name in turn.hash_ids:
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = PrefixSegment()
            else:
                child.visits += 1
            node = child
    tails = []
    for turn in turns:
        node, depth = root, 0
        for name in turn.hash_ids:
            child = node.children[name]
            if child.visits < 2:
                break
            node, depth = child, depth + 1
        node.ends += 1
        tails.append(max(0, turn.input_tokens - depth * block_tokens))
    _prune(root)
    times = [turn.at_ms or 0.0 for turn in turns]
    pauses = [after - before for before, after in itertools.pairwise(times)] or [0.0]
    return TraceModel(root, tails, [turn.output_tokens for turn in turns], pauses)


def _prune(root: PrefixSegment) -> None:
    """Remove unshared blocks and join nodes without a branch."""
    rest = [root]
    while rest:
        node = rest.pop()
        node.children = {name: child for name, child in node.children.items() if child.visits > 1}
        for child in node.children.values():
            inner = {name: deeper for name, deeper in child.children.items() if deeper.visits > 1}
            while len(inner) == 1 and child.ends == 0:
                (deeper,) = inner.values()
                child.length += deeper.length
                child.children, child.ends = deeper.children, deeper.ends
                inner = {name: one for name, one in child.children.items() if one.visits > 1}
            rest.append(child)


def synthesized(model: TraceModel, config: SynthesizeConfig) -> list[dict[str, Any]]:
    """Return the rows of a new trace."""
    rng = random.Random(config.seed)
    fresh = _rename(model.root, config)
    copies = fresh
    fresh *= config.prefix_root_multiplier
    rows: list[dict[str, Any]] = []
    at_ms, refused = 0.0, 0
    while len(rows) < config.num_requests:
        shift = copies * rng.randrange(config.prefix_root_multiplier)
        ids: list[int] = []
        node = model.root
        while True:
            children = list(node.children.values())
            step = rng.choices([*children, None], [*(child.visits for child in children), node.ends or 0])[0]
            if step is None:
                break
            ids += range(shift + step.first, shift + step.first + step.length)
            node = step
        tail = round(rng.choice(model.tails) * config.prompt_len_multiplier)
        tokens = max(1, len(ids) * config.block_size + tail)
        at_ms += rng.choice(model.pauses) / config.speedup_ratio
        output = rng.choice(model.outputs)
        if config.max_isl is not None and tokens > config.max_isl:
            refused += 1
            if refused > REFUSALS_MAX * config.num_requests:
                raise ConfigError(f"--max-isl {config.max_isl}: too small; nearly all generated prompts are longer")
            continue
        blocks = -(-tokens // config.block_size) - len(ids)
        ids += range(fresh, fresh + blocks)
        fresh += blocks
        rows.append({"timestamp": round(at_ms), "input_length": tokens, "output_length": output, "hash_ids": ids})
    return rows


def _rename(root: PrefixSegment, config: SynthesizeConfig) -> int:
    """Assign a name to every block of the stretched core; return the number of names."""
    count, rest = 0, [root]
    while rest:
        node = rest.pop()
        for child in node.children.values():
            child.length = max(1, round(child.length * config.prefix_len_multiplier))
            child.first = count
            count += child.length
            rest.append(child)
    return count


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.datagen") -> int:
    """Run `datagen analyze` or `datagen synthesize`."""
    word, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if word in {"--help", "-h"}:
        print(__doc__)
        return 0
    if word == "analyze":
        config = load(AnalyzeConfig, rest, prog=f"{prog} analyze")
        found = analysis(turns_of(config.input_file, config.block_size), config.block_size)
        print(json.dumps(found, indent=2))
        return 0
    if word == "synthesize":
        synthesis = load(SynthesizeConfig, rest, prog=f"{prog} synthesize")
        model = learned(turns_of(synthesis.input_file, synthesis.block_size), synthesis.block_size)
        write_rows(synthesis.output_file, synthesized(model, synthesis))
        return 0
    raise ConfigError(f"unknown command {word}: expected analyze or synthesize")


def write_rows(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSONL to a file or the terminal. Raise `ConfigError` if it cannot be written."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path is None:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
