"""The embedded engine's output equals that of `transformers`, on checkpoints with random weights.

The weights are drawn wide enough that attention prefers some positions and that the likeliest token is clearly above
the next: with the usual narrow ones, a wrong rotation would hardly show.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.cpu.architecture import Architecture
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.core import Core
from dynamo.cpu.generation import ActiveGeneration, GeneratedChoice, StopRules
from dynamo.cpu.model import Batch, TransformerModel, load_weights
from dynamo.cpu.sampler import Sampling
from dynamo.cpu.scheduler import Scheduler
from dynamo.cpu.sequence import TokenSequence
from dynamo.cpu.spans import TokenSpan

pytestmark = [pytest.mark.integration, pytest.mark.reference, pytest.mark.filterwarnings("default")]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BLOCK_TOKENS = 16
LONGEST = 256
NEW_TOKENS = 64
VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
PAIRS = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "multi-head": ("Llama", {"num_key_value_heads": 4}),
    "multi-query": ("Qwen2", {"num_key_value_heads": 1}),
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope-short": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1 + 0.1 * pair for pair in range(PAIRS)],
        "long_factor": [2 + 0.3 * pair for pair in range(PAIRS)],
    },
    "longrope-long": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1 + 0.1 * pair for pair in range(PAIRS)],
        "long_factor": [2 + 0.3 * pair for pair in range(PAIRS)],
    },
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Pair = tuple[TransformerModel, Any]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small are not worth a second thread, least of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """Return our model and the one of transformers, from one checkpoint."""

    def make(name: str, changes: dict[str, Any], *, dtype: str = "f32", seed: int = 0, **saving: Any) -> Pair:
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in made.parameters():
            if parameter.dim() == 1:  # Gains of one and biases of zero would verify little.
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        made.to(DTYPES[dtype]).save_pretrained(tmp_path, **saving)
        theirs = type(made).from_pretrained(tmp_path, dtype=torch.float32).eval()
        shape = Architecture.read(str(tmp_path))
        weights = load_weights(str(tmp_path), shape)
        return TransformerModel(shape, weights, slots=64 * BLOCK_TOKENS, rows_max=LONGEST, longest=LONGEST), theirs

    return make


def prompt(length: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def our_logits(model: TransformerModel, tokens: list[int]) -> Any:
    rows = np.arange(len(tokens))
    return model.forward(
        Batch(np.array(tokens), rows, rows, [TokenSpan(0, len(tokens), len(tokens), [(0, len(tokens))])], rows)
    )


def their_logits(model: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def their_text(model: Any, tokens: list[int]) -> list[int]:
    """Return the likeliest tokens, each from a forward pass with a cache."""
    output: list[int] = []
    cache, following = None, torch.tensor([tokens])
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            out = model(following, past_key_values=cache, use_cache=True)
            cache, following = out.past_key_values, out.logits[:, -1:].argmax(-1)
            output.append(int(following))
    return output


class Reply:
    request_id = "request"
    is_cancelled = False

    def __init__(self) -> None:
        self.tokens: list[int] = []


def begin(tokens: list[int]) -> ActiveGeneration:
    choice = GeneratedChoice(
        0, TokenSequence(tokens, BLOCK_TOKENS), Sampling(temperature=0.0), StopRules(max_tokens=NEW_TOKENS)
    )
    reply: Any = Reply()
    return ActiveGeneration(reply, [choice])


def our_texts(core: Core, prompts: list[list[int]]) -> list[list[int]]:
    generations = [begin(tokens) for tokens in prompts]
    for generation in generations:
        core.add(generation)
    for _ in range(5000):
        if not core.has_work:
            break
        core.step()
        core.scheduler.validate()
    return [
        generation.choices[0].sequence.tokens[len(tokens) :]
        for generation, tokens in zip(generations, prompts, strict=True)
    ]


def core_of(model: TransformerModel, *, blocks: int = 64, batched_tokens_max: int = LONGEST) -> Core:
    scheduler = Scheduler(KvBlockPool(blocks), sequences_max=8, batched_tokens_max=batched_tokens_max)
    return Core(model, scheduler, BLOCK_TOKENS)


def check(pair: Pair, length: int = 100) -> None:
    ours, theirs = pair
    tokens = prompt(length)
    got, want = our_logits(ours, tokens), their_logits(theirs, tokens)
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()
    assert our_texts(core_of(ours), [tokens[:40]]) == [their_text(theirs, tokens[:40])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_output_equals_transformers_for_every_architecture_and_dtype(
    make_pair: Callable[..., Pair], name: str, dtype: str
) -> None:
    check(make_pair(name, ARCHITECTURES[name], dtype=dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_equals_transformers_for_every_variant(make_pair: Callable[..., Pair], variant: str) -> None:
    check(make_pair(*VARIANTS[variant]))


def test_output_equals_transformers_for_a_sharded_checkpoint(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair("Qwen3", ARCHITECTURES["Qwen3"], dtype="bf16", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(pair)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_output_equals_transformers_for_every_rope_scaling(make_pair: Callable[..., Pair], scaling: str) -> None:
    parameters = {"rope_theta": 10_000.0, **SCALINGS[scaling]}
    ours, theirs = make_pair("Llama", {"rope_parameters": parameters})
    tokens = prompt(200)
    got, want = our_logits(ours, tokens), their_logits(theirs, tokens)
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()
    plain, _ = make_pair("Llama", {})
    difference = np.abs(our_logits(plain, tokens) - want).max() / np.abs(want).max()
    assert scaling == "dynamic" or difference > 0.05, "the scaling shows"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batching_caching_and_chunking_change_no_token(make_pair: Callable[..., Pair], name: str) -> None:
    ours, theirs = make_pair(name, ARCHITECTURES[name])
    prompts = [prompt(length, seed=length) for length in (5, 16, 33, 90)]
    prompts.append(prompts[3][:64] + prompt(7))
    want = [their_text(theirs, tokens) for tokens in prompts]
    together = core_of(ours)
    assert our_texts(together, prompts) == want, "batched"
    assert our_texts(together, prompts) == want, "from the prefix cache"
    assert our_texts(core_of(ours, batched_tokens_max=11), prompts) == want, "in chunks"
    crowded = core_of(ours, blocks=17)
    assert our_texts(crowded, prompts) == want, "preempted"
    assert crowded.scheduler.preemptions > 0
