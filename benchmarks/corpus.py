"""Corpus: a model directory without weights, and prompts of an exact number of tokens, out of Python's own sources.

Any machine that can run the benchmark has Python's standard library: prose in its docstrings, code around them.
A tokenizer of the size and manner of the small Qwen models is trained on it once and kept in the cache; both stacks
serve that directory.
"""

import functools
import glob
import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dynamo.core.config import setting

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

VOCABULARY = 16384
CORPUS_CHARS = 12_000_000  # More text of the same kind does not change the merges of a 16k vocabulary.
FILE_BYTES_MAX = 400_000  # Larger sources are tables, not text.
RECIPE = "1"  # Part of the cache's file names; increase it when a change below alters the files.

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization pattern of the Qwen2 family, as public checkpoints state it in their tokenizer.json."""

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TURN = "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
CHAT_TEMPLATE = TURN + "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"

PROMPTS = 2048  # More words than any cache of recent words holds; each text is repeated with another nonce.
PROMPT_TRIES = 40
NONCE_WORDS = 4
NONCE_WORD_CHARS = 5  # With the space; equal lengths, so that Content-Length does not depend on the nonce.


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that have an exact number of tokens with a nonce of four words in front."""

    texts: list[str]
    words: list[str]


def cache_dir() -> str:
    """Return the directory of all files that the benchmarks create."""
    return setting("DYNAMO_BENCH_CACHE", os.path.join(ROOT, ".cache", "bench"), str)


def bench_model() -> str:
    """Return the benchmark's model directory; the first call creates it."""
    path = os.path.join(cache_dir(), f"model-{RECIPE}")
    if not os.path.exists(os.path.join(path, "config.json")):
        write_model(path, list(read_sources(CORPUS_CHARS)))
    return path


def read_sources(chars_max: int) -> Iterator[str]:
    """Return the standard library's modules, in an order that does not depend on the file system."""
    library = os.path.dirname(os.__file__)
    paths = sorted(glob.glob(os.path.join(library, "**", "*.py"), recursive=True))
    own = [path for path in paths if "site-packages" not in path and os.path.getsize(path) < FILE_BYTES_MAX]
    random.Random(0).shuffle(own)
    chars = 0
    for path in own:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        chars += len(text)
        yield text
        if chars > chars_max:
            return


def write_model(path: str, texts: Sequence[str]) -> None:
    """Train the tokenizer and write the directory in Hugging Face layout; config.json is written last and marks it as
    complete.
    """
    os.makedirs(path, exist_ok=True)
    special = [END_OF_TEXT, TURN_START, TURN_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY - len(special)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    ids = {word: vocabulary[word] for word in special}
    _write_json(path, "tokenizer_config.json", _tokenizer_config(ids))
    _write_json(
        path,
        "generation_config.json",
        {"bos_token_id": ids[END_OF_TEXT], "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]], "do_sample": True},
    )
    _write_json(path, "config.json", _model_config(ids, len(vocabulary)))


def _write_json(path: str, name: str, value: object) -> None:
    with open(os.path.join(path, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)


def _tokenizer_config(ids: dict[str, int]) -> dict[str, object]:
    added = {
        str(number): {
            "content": word,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for word, number in ids.items()
    }
    return {
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": 32768,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _model_config(ids: dict[str, int], vocabulary: int) -> dict[str, object]:
    """Return the shape of a very small Qwen3: a mocker reads only its sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    }


def read_prompts(model: str, tokens: int, *, is_chat: bool = True, count: int = PROMPTS) -> Prompts:
    """Return prompts whose rendered form has exactly `tokens` tokens; kept in the cache."""
    with open(os.path.join(model, "tokenizer.json"), "rb") as file:
        mark = hashlib.sha256(file.read()).hexdigest()[:12]
    name = f"prompts-{RECIPE}-{mark}-{tokens}-{'chat' if is_chat else 'text'}-{count}.json"
    path = os.path.join(cache_dir(), name)
    if not os.path.exists(path):
        made = make_prompts(_tokenizer(model), list(read_sources(CORPUS_CHARS // 3)), tokens, count, is_chat=is_chat)
        os.makedirs(cache_dir(), exist_ok=True)
        _write_json(cache_dir(), name, {"texts": made.texts, "words": made.words})
    with open(path, encoding="utf-8") as file:
        return Prompts(**json.load(file))


@functools.cache
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_file(os.path.join(model, "tokenizer.json"))


def render(content: str) -> str:
    """Render one user turn as `CHAT_TEMPLATE` does."""
    return f"{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n"


def nonce_words(tokenizer: Tokenizer) -> list[str]:
    """Return words of one length that are one token each between spaces."""
    words = [" " + word[1:] for word in tokenizer.get_vocab() if _is_plain(word)]
    return sorted(word for word in words if len(tokenizer.encode(word + word).ids) == 2)


def _is_plain(word: str) -> bool:
    """Byte-level tokenizers spell a leading space as a G with a dot above it."""
    return len(word) == NONCE_WORD_CHARS and word[0] == "\u0120" and word[1:].isascii() and word[1:].islower()


def make_prompts(
    tokenizer: Tokenizer, texts: Sequence[str], tokens: int, count: int, *, is_chat: bool, seed: int = 7
) -> Prompts:
    """Cut slices of the texts until their rendered length fits; skip slices that cannot fit."""
    words = nonce_words(tokenizer)
    source = "\n".join(texts)
    draw = random.Random(seed)
    found: list[str] = []
    while len(found) < count:
        start = draw.randrange(max(len(source) - tokens * 8, 1))
        text = _fit(tokenizer, source[start : start + tokens * 8], tokens, words, is_chat=is_chat)
        if text is not None:
            found.append(text)
    return Prompts(found, words)


def _fit(tokenizer: Tokenizer, source: str, tokens: int, words: Sequence[str], *, is_chat: bool) -> str | None:
    """Return the longest prefix of `source` that gives exactly `tokens`, including nonce and template."""
    offsets = tokenizer.encode(source, add_special_tokens=False).offsets
    nonce = "".join(words[:NONCE_WORDS])
    take = tokens
    for _ in range(PROMPT_TRIES):
        if not 0 < take <= len(offsets):
            return None
        text = "\n" + source[: offsets[take - 1][1]]
        whole = render(nonce + text) if is_chat else nonce + text
        excess = len(tokenizer.encode(whole, add_special_tokens=False).ids) - tokens
        if excess == 0:
            return text
        take -= excess
    return None
