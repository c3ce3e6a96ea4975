"""TiktokenModel: conversion of a tiktoken file (`tiktoken.model`, `qwen.tiktoken`) to a `tokenizer.json`.

A tiktoken file is a list of tokens by rank. It merges the neighbours that form the token of the lowest rank; a BPE
model with every pair that forms a token, in the order of the tokens, does the same. The split pattern and the special
tokens are not in the file: they come from the model's configuration, or from tables of model families. Pure but for
reading files.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.model_card.card import ModelFiles, read_bytes, read_json
from dynamo.text.tokenizer.word_tokenizer import byte_of_char

RESERVED_TOKENS = 256  # Ids after the ranks that have names, possibly only `<|reserved_token_…|>`.

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(but: str = "") -> str:
    """Return the pattern of words with capitals first, with the allowed characters before and after them."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{before}{upper}*{lower}+{_ENDINGS}?|{before}{upper}+{lower}*{_ENDINGS}?"


_NOT_HAN = r"&&[^\p{Han}]"
QWEN = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
O200K = rf"{_cased()}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
KIMI = rf"[\p{{Han}}]+|{_cased(_NOT_HAN)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"

PATTERNS: Mapping[str, str] = {
    **dict.fromkeys(("kimi", "kimi_k2", "kimi_k25", "kimi_k3", "kimi_linear", "deepseek_v3"), KIMI),
    "qwen": QWEN,
    "gpt_oss": O200K,
}
"""Split pattern by the `model_type` of config.json. Kimi's models use DeepSeek's architecture, whose own models have a
tokenizer.json."""

HARMONY_BASE = 199_998
HARMONY = {
    0: "<|startoftext|>",
    1: "<|endoftext|>",
    4: "<|return|>",
    5: "<|constrain|>",
    7: "<|channel|>",
    8: "<|start|>",
    9: "<|end|>",
    10: "<|message|>",
    14: "<|call|>",
    20: "<|endofprompt|>",
}
"""gpt-oss's special tokens after the ranks of o200k; the other ids are reserved."""
HARMONY_TOKENS = 1090

QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
"""Special tokens after the ranks of the first Qwen, which its files do not list."""


def is_tiktoken(path: str) -> bool:
    """Return whether a tokenizer file is a tiktoken file, by its name."""
    return not path.endswith(".json")


def tokenizer_json(files: ModelFiles) -> bytes:
    """Return the `tokenizer.json` of a model with a tiktoken file. Raise `ConfigError` with the path."""
    config = read_json(files.config)
    tokenizer_config = read_json(files.tokenizer_config) if files.tokenizer_config else {}
    model_type = str(config.get("model_type"))
    pattern = tokenizer_config.get("pat_str") or PATTERNS.get(model_type)
    if not isinstance(pattern, str):
        raise ConfigError(
            f"{files.tokenizer}: the split pattern for model_type {model_type!r} is unknown; known: "
            f"{', '.join(sorted(PATTERNS))}. Set `pat_str` in tokenizer_config.json, or add a tokenizer.json"
        )
    ranks = read_ranks(files.tokenizer)
    return convert(ranks, pattern, special_tokens(ranks, tokenizer_config, model_type))


def read_ranks(path: str) -> dict[bytes, int]:
    """Return the tokens of a tiktoken file: one per line, base64 and rank. Raise `ConfigError` with the path."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            token, rank = words
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"{path}: line {number} is not a token in base64 and its rank") from None
    if not ranks:
        raise ConfigError(f"{path}: the file has no tokens")
    return ranks


def special_tokens(
    ranks: Mapping[bytes, int], tokenizer_config: Mapping[str, Any], model_type: str = ""
) -> dict[int, tuple[str, bool]]:
    """Return id to text and whether it is special: configured names, and reserved names up to `RESERVED_TOKENS`."""
    first = max(ranks.values()) + 1
    named: dict[int, tuple[str, bool]] = {}
    given = tokenizer_config.get("added_tokens_decoder")
    if isinstance(given, dict):
        for token_id, token in given.items():
            if isinstance(token, dict) and str(token_id).isdecimal() and token.get("content"):
                named[int(token_id)] = (str(token["content"]), bool(token.get("special", True)))
    elif model_type == "qwen":
        return {first + place: (text, True) for place, text in enumerate(QWEN_SPECIALS)}
    elif model_type == "gpt_oss":
        return {
            HARMONY_BASE + place: (HARMONY.get(place, f"<|reserved_{HARMONY_BASE + place}|>"), True)
            for place in range(HARMONY_TOKENS)
        }
    for token_id in range(first, first + RESERVED_TOKENS):
        named.setdefault(token_id, (f"<|reserved_token_{token_id}|>", True))
    return named


def convert(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[int, tuple[str, bool]]) -> bytes:
    """Return the `tokenizer.json`."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    spelled = {token: "".join([char_of[byte] for byte in token]) for token in ranks}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": text, **flags, "special": is_special}
            for token_id, (text, is_special) in sorted(specials.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            # Special tokens too: tokens missing here get new ids, and there may be gaps after the ranks.
            "vocab": {text: token_id for token_id, (text, _) in specials.items()}
            | {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks)],
        },
    }
    return msgspec.json.encode(spec)


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield every pair of tokens that forms a token, in the order of the results."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                yield left, right
