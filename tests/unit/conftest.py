"""Small models that the tests train themselves: three kinds of byte-level BPE, and one in sentencepiece's manner."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.scripted_engine.stack import ScriptedStackPool
from tests.unit_guards import no_sockets
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ORDINARY = ["<think>", "</think>"]

CORPUS = [
    "The worker asks the router which instance holds the longest prefix of the prompt, and the router answers.",
    "def place(self, request: RouteRequest, now: float) -> Placed:\n    return self.cheapest(request)\n\n\n" * 2,
    "It's 3.14159 or 2718281828; don't say they're equal, we've measured: 100% of I'll, he'd, I'm.",
    'JSON: {"role": "user", "content": "hello\\nworld"} <tag attr="x">&amp;</tag>',
    "Быстрая лиса прыгает через ленивую собаку. 快速的棕色狐狸跳过了懒狗。すばやい茶色の狐。빠른 갈색 여우.",
    "naïve café — “quoted” … ½ of 2² 😀😃 €100 \u00a0\u3000 end",
]

TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def byte_level(pattern: str | None, *, nfc: bool = True, bos: bool = False) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer that splits with a regex, or with GPT-2's where that is None."""
    library = tokenizers.Tokenizer(models.BPE())
    if nfc:
        library.normalizer = normalizers.NFC()
    if pattern is None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer=trainer)
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos:
        bos_id = library.token_to_id(SPECIALS[0])
        library.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], bos_id)]),
            ]
        )
    return library


def sentencepiece() -> tokenizers.Tokenizer:
    """A BPE tokenizer in the manner of Llama 2: spaces as U+2581, one token for each byte."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    library.train_from_iterator(CORPUS[:4], trainer=trainer)
    spec = json.loads(library.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def write_model(path: Path, library: tokenizers.Tokenizer, **tokenizer_config: Any) -> Path:
    """A model directory with everything but weights."""
    path.mkdir(parents=True, exist_ok=True)
    library.save(str(path / "tokenizer.json"))
    eos = library.token_to_id("<|im_end|>")
    config = {"model_type": "qwen3", "max_position_embeddings": 512, "eos_token_id": eos}
    (path / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [eos, library.token_to_id("<|endoftext|>")], "temperature": 0.6, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(generation))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, **tokenizer_config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(autouse=True)
def _without_sockets() -> Iterator[None]:
    """Make tests that open network sockets fail."""
    with no_sockets():
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Qwen's manner."""
    return write_model(tmp_path_factory.mktemp("qwen"), byte_level(QWEN))


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Path]:
    """One model of each byte-level kind."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen": model_dir,
        "llama": write_model(root / "llama", byte_level(LLAMA, nfc=False, bos=True)),
        "o200k": write_model(root / "o200k", byte_level(O200K, nfc=False)),
        "gpt2": write_model(root / "gpt2", byte_level(None, nfc=False)),
    }


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Llama 2's manner."""
    path = write_model(tmp_path_factory.mktemp("sentencepiece"), sentencepiece())
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2, "max_position_embeddings": 512}))
    return path


@pytest.fixture(scope="session")
def stacks() -> Iterator[ScriptedStackPool]:
    """Pipelines with the scripted engine, one plain and one with parsers."""
    with asyncio.Runner() as runner:
        stacks = ScriptedStackPool(runner)
        yield stacks
        stacks.run(stacks.exits.aclose())


KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


@pytest.fixture(scope="session")
def special_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tool calls are written in special tokens, which are skipped unless a parser needs them."""
    library = byte_level(QWEN)
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in KIMI_MARKERS])
    return write_model(tmp_path_factory.mktemp("special"), library)
