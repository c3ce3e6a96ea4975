"""A tiny model with random weights, the same model computed naively, and the parts of an engine around it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dynamo.cpu.adapter import Adapter
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.core import Core, StepOutcome
from dynamo.cpu.generation import ActiveGeneration, GeneratedChoice, StopRules
from dynamo.cpu.model import TransformerModel, load_weights
from dynamo.cpu.sampler import History, Sampling
from dynamo.cpu.scheduler import Scheduler
from dynamo.cpu.sequence import TokenSequence as Tokens

BLOCK_TOKENS = 4
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def random_tensors(config: dict[str, Any], *, has_qk_norm: bool = True, has_bias: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    def gain(size: int) -> Any:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4,
        "model.norm.weight": gain(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden) * 4
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        tensors[f"{layer}.input_layernorm.weight"] = gain(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = gain(hidden)
        for kind, size in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{layer}.self_attn.{kind}_proj.weight"] = matrix(size, hidden)
            if has_bias:
                tensors[f"{layer}.self_attn.{kind}_proj.bias"] = gain(size) - 1
        if has_qk_norm:
            tensors[f"{layer}.self_attn.q_norm.weight"] = gain(dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = gain(dim)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(hidden, q)
        tensors[f"{layer}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{layer}.mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, inner)
    return tensors


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., str]:
    def write(*, has_qk_norm: bool = True, has_bias: bool = False, **changes: Any) -> str:
        config = CONFIG | changes
        path = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        tensors = random_tensors(config, has_qk_norm=has_qk_norm, has_bias=has_bias)
        save_file(tensors, path / "model.safetensors")
        return str(path)

    return write


def random_adapter(
    config: dict[str, Any], *, targets: Sequence[str], rank: int = 4, seed: int = 3, strength: float = 1.0
) -> dict[str, Any]:
    """Tensors as PEFT names them. Both halves are random, so that the adapter does something."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        "q_proj": ("self_attn", q, hidden), "k_proj": ("self_attn", kv, hidden), "v_proj": ("self_attn", kv, hidden),
        "o_proj": ("self_attn", hidden, q), "gate_proj": ("mlp", inner, hidden), "up_proj": ("mlp", inner, hidden),
        "down_proj": ("mlp", hidden, inner),
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    for number in range(config["num_hidden_layers"]):
        for target in targets:
            block, outputs, inputs = sizes[target]
            name = f"base_model.model.model.layers.{number}.{block}.{target}"
            tensors[f"{name}.lora_A.weight"] = (rng.standard_normal((rank, inputs)) / inputs**0.5).astype(np.float32)
            up = rng.standard_normal((outputs, rank)) / rank**0.5 * strength
            tensors[f"{name}.lora_B.weight"] = up.astype(np.float32)
    return tensors


def merged(tensors: dict[str, Any], adapter: dict[str, Any], scale: float) -> dict[str, Any]:
    """Return the model's weights merged with an adapter's, computed naively."""
    found = dict(tensors)
    for name, down in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = adapter[name.replace("lora_A", "lora_B")]
            found[f"{module}.weight"] = found[f"{module}.weight"] + np.float32(scale) * (up @ down)
    return found


@pytest.fixture
def write_adapter(tmp_path: Path) -> Callable[..., str]:
    """Writes an adapter of the tiny model, and returns its path."""

    def write(tensors: dict[str, Any], *, rank: int = 4, alpha: float = 8, **config: Any) -> str:
        path = tmp_path / f"adapter{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        reported = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
        (path / "adapter_config.json").write_text(json.dumps(reported))
        save_file(tensors, path / "adapter_model.safetensors")
        return str(path)

    return write


@pytest.fixture
def naive_logits() -> Callable[..., Any]:
    """Return the logits of the whole prompt in float64, head by head and token by token, without optimizations."""

    def rms(x: Any, gain: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain

    def rotated(x: Any, position: int) -> Any:
        half = len(x) // 2
        angles = position * 10000.0 ** (-np.arange(half) / half)
        first, second = x[:half], x[half:]
        return np.concatenate(
            [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
        )

    def logits(tokens: list[int], config: dict[str, Any], tensors: dict[str, Any]) -> Any:
        weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        x = weights["model.embed_tokens.weight"][tokens]
        for number in range(config["num_hidden_layers"]):
            part = {k.split(f"layers.{number}.")[1]: v for k, v in weights.items() if f"layers.{number}." in k}
            normal = rms(x, part["input_layernorm.weight"])
            projected = {}
            for kind, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                rows = normal @ part[f"self_attn.{kind}_proj.weight"].T
                rows += part.get(f"self_attn.{kind}_proj.bias", 0)
                rows = rows.reshape(len(tokens), count, dim)
                if kind != "v":
                    if f"self_attn.{kind}_norm.weight" in part:
                        rows = rms(rows, part[f"self_attn.{kind}_norm.weight"])
                    rows = np.array([[rotated(head, at) for head in row] for at, row in enumerate(rows)])
                projected[kind] = rows
            attended = np.zeros((len(tokens), heads, dim))
            for at in range(len(tokens)):
                for head in range(heads):
                    group = head // (heads // kv_heads)
                    scores = projected["k"][: at + 1, group] @ projected["q"][at, head] / dim**0.5
                    shares = np.exp(scores - scores.max())
                    attended[at, head] = shares / shares.sum() @ projected["v"][: at + 1, group]
            x = x + attended.reshape(len(tokens), -1) @ part["self_attn.o_proj.weight"].T
            normal = rms(x, part["post_attention_layernorm.weight"])
            gate = normal @ part["mlp.gate_proj.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (normal @ part["mlp.up_proj.weight"].T)
            x = x + inner @ part["mlp.down_proj.weight"].T
        head_weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return rms(x, weights["model.norm.weight"]) @ head_weight.T

    return logits


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TransformerModel:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(CONFIG), path / "model.safetensors")
    shape = Architecture.read(str(path))
    return TransformerModel(shape, load_weights(str(path), shape), slots=128 * BLOCK_TOKENS, rows_max=128, longest=256)


class ReceivedOutput:
    """A reply that records every message."""

    def __init__(self, request_id: str = "request") -> None:
        self.request_id = request_id
        self.is_cancelled = False
        self.messages: list[Any] = []
        self.is_finished = False
        self.error: BaseException | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for word in self.messages for token in ([word] if isinstance(word, int) else word.token_ids)]

    def on_cancel(self, callback: Callable[[], None]) -> None: ...

    def token(self, token_id: int) -> None:
        self.messages.append(token_id)

    def item(self, value: Any) -> None:
        self.messages.append(value)

    def finish(self) -> None:
        assert not self.is_finished, "finished twice"
        self.is_finished = True

    def fail(self, error: BaseException) -> None:
        self.error = error


@pytest.fixture
def receiver_type() -> type[ReceivedOutput]:
    return ReceivedOutput


@pytest.fixture
def make_core(tiny_model: TransformerModel) -> Callable[..., Core]:
    def make(
        *,
        blocks: int = 128,
        sequences_max: int = 8,
        batched_tokens_max: int = 32,
        is_caching: bool = True,
        adapters_max: int | None = None,
    ) -> Core:
        pool = KvBlockPool(blocks, is_caching=is_caching)
        scheduler = Scheduler(
            pool, sequences_max=sequences_max, batched_tokens_max=batched_tokens_max, adapters_max=adapters_max
        )
        return Core(tiny_model, scheduler, BLOCK_TOKENS)

    return make


@pytest.fixture
def make_generation() -> Callable[..., ActiveGeneration]:
    def make(
        prompt: list[int], *, max_tokens: int = 12, choices: int = 1, adapter: Adapter | None = None, **sampling: Any
    ) -> ActiveGeneration:
        rules = StopRules(max_tokens=max_tokens, **sampling.pop("rules", {}))
        made: list[GeneratedChoice] = []
        for index in range(choices):
            leader = made[0].sequence if made else None
            chosen = Sampling(index=index, **({"temperature": 0.0} | sampling))
            history = History.of(prompt, CONFIG["vocab_size"]) if chosen.has_penalties else None
            made.append(
                GeneratedChoice(
                    index, Tokens(prompt, BLOCK_TOKENS, leader=leader, adapter=adapter), chosen, rules, history
                )
            )
        return ActiveGeneration(ReceivedOutput(), made)

    return make


def deliver_to_replies(outcome: StepOutcome) -> None:
    for output in outcome.outputs:
        reply: Any = output.generation.reply
        if isinstance(output.word, int):
            reply.token(output.word)
        elif isinstance(output.word, Exception):
            reply.fail(output.word)
        else:
            reply.item(output.word)
            if output.is_last:
                reply.finish()


@pytest.fixture
def deliver() -> Callable[[StepOutcome], None]:
    """Sends a step's results to their replies, as the engine would."""
    return deliver_to_replies


@pytest.fixture
def run() -> Callable[..., None]:
    """Step the engine until no work is left."""

    def run_to_end(core: Core, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if not core.has_work:
                return
            deliver_to_replies(core.step())
            core.scheduler.validate()
        raise AssertionError("the engine never came to an end")

    return run_to_end


@pytest.fixture(scope="session")
def letters() -> str:
    """The tokens of a tokenizer for the tiny model, each one letter, in the order of their ids; the 96th ends."""
    return "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "`") + "\n"


@pytest.fixture(scope="session")
def write_letters(letters: str) -> Callable[[Path], None]:
    """Writes that tokenizer into a model's directory."""

    def write(path: Path) -> None:
        names = {" ": "\u0120", "\n": "\u010a"}
        vocab = {names.get(letter, letter): number for number, letter in enumerate(letters)}
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = ByteLevelDecoder()
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.save(str(path / "tokenizer.json"))

    return write


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory: pytest.TempPathFactory, write_letters: Callable[[Path], None]) -> Path:
    """A directory with that tokenizer and no weights."""
    path = tmp_path_factory.mktemp("letters")
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_letters(path)
    return path
