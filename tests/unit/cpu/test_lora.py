"""LoRA adapters from their files to logits: their output equals that of merged weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.unit.cpu.conftest import BLOCK_TOKENS, CONFIG, merged, random_adapter, random_tensors

from dynamo.core.errors import ConfigError
from dynamo.cpu.adapter import Adapter
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.core import Core
from dynamo.cpu.generation import ActiveGeneration
from dynamo.cpu.lora import TARGETS, read_adapter
from dynamo.cpu.model import TransformerModel

Write = Callable[..., str]
PROMPT = [5, 17, 3, 88, 41, 2, 9, 60, 33, 71, 4]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Adapter]:
    """Reads an adapter of the tiny model."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(CONFIG), base / "model.safetensors")
    shape = Architecture.read(str(base))

    def of(path: str, *, name: str = "tuned", rank_max: int = 16) -> Adapter:
        return read_adapter(path, name, 1, model_path=str(base), shape=shape, rank_max=rank_max)

    return of


def answers(core: Core, run: Any, *generations: ActiveGeneration) -> list[list[int]]:
    for generation in generations:
        core.add(generation)
    run(core)
    return [generation.reply.tokens for generation in generations]  # type: ignore[attr-defined]


def greedily(naive_logits: Any, tensors: dict[str, Any], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(naive_logits(tokens, CONFIG, tensors)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "targets", [TARGETS, ("q_proj", "v_proj"), ("k_proj",), ("gate_proj", "down_proj"), ("up_proj",)]
)
def test_lora_output_equals_that_of_merged_weights(
    targets: tuple[str, ...],
    read: Any,
    write_adapter: Write,
    make_core: Any,
    make_generation: Any,
    run: Any,
    naive_logits: Any,
) -> None:
    tensors = random_adapter(CONFIG, targets=targets)
    adapter = read(write_adapter(tensors, target_modules=list(targets)))
    want = greedily(naive_logits, merged(random_tensors(CONFIG), tensors, 8 / 4), PROMPT, 12)
    assert answers(make_core(), run, make_generation(PROMPT, adapter=adapter)) == [want]
    assert answers(make_core(), run, make_generation(PROMPT)) != [want], "an adapter that does nothing proves nothing"


@pytest.mark.parametrize(
    ("settings_of", "scale"),
    [
        ({"use_rslora": True}, 8 / 4**0.5),
        ({"alpha_pattern": {"q_proj": 2, "layers.0.self_attn.v_proj": 2}}, 2 / 4),
        ({"rank_pattern": {".*_proj": 4}, "rank": 9}, 8 / 4),
    ],
)
def test_lora_scales_equal_those_of_peft(
    settings_of: dict[str, Any],
    scale: float,
    read: Any,
    write_adapter: Write,
    naive_logits: Any,
    tiny_model: TransformerModel,
) -> None:
    tensors = {
        name: tensor
        for name, tensor in random_adapter(CONFIG, targets=("q_proj", "v_proj")).items()
        if "v_proj" not in name or "layers.0" in name
    }
    adapter = read(write_adapter(tensors, **settings_of))
    down, up = (tensors[f"base_model.model.model.layers.0.self_attn.v_proj.lora_{half}.weight"] for half in "AB")
    gain = random_tensors(CONFIG)["model.layers.0.input_layernorm.weight"]
    delta = adapter.layers[0].qkv
    assert delta is not None
    found = (delta.down @ delta.up)[:, -len(up) :].T
    np.testing.assert_allclose(found, scale * (up @ (down * gain)), rtol=1e-4, atol=1e-6)
    assert adapter.layers[1].qkv is not None
    assert not adapter.layers[1].qkv.up[:, -len(up) :].any(), "this projection of this layer is left alone"


@pytest.mark.parametrize("rows_max", [512, 7])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requested=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24)), min_size=2, max_size=8),
    adapters_max=st.integers(1, 3),
)
def test_lora_mixed_batch_equals_separate_runs(
    requested: list[tuple[int, int]],
    adapters_max: int,
    rows_max: int,
    read: Any,
    write_adapter: Write,
    make_core: Any,
    make_generation: Any,
    run: Any,
    tmp_path: Path,
) -> None:
    """Also if the rows of a step are divided into blocks, so that an adapter's rows are in several of them."""
    adapters = [None, *_adapters(read, write_adapter, tmp_path)]
    prompts = [[*PROMPT, *PROMPT, *PROMPT][:length] for _, length in requested]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamo.cpu.rows.BLOCK_ROWS_MAX", rows_max)
        patch.setattr("dynamo.cpu.rows.SHARE_ROWS_MIN", rows_max)
        together = answers(
            make_core(adapters_max=adapters_max),
            run,
            *(
                make_generation(prompt, adapter=adapters[who])
                for prompt, (who, _) in zip(prompts, requested, strict=True)
            ),
        )
    for prompt, (who, _), found in zip(prompts, requested, together, strict=True):
        assert answers(make_core(), run, make_generation(prompt, adapter=adapters[who])) == [found]


def _adapters(read: Any, write_adapter: Write, tmp_path: Path) -> list[Adapter]:
    """Write three adapters once."""
    found = sorted(tmp_path.glob("adapter*"))
    if len(found) < 3:
        for seed, targets in enumerate((TARGETS, ("q_proj", "o_proj"), ("up_proj", "down_proj"))):
            write_adapter(random_adapter(CONFIG, targets=targets, rank=2 + seed, seed=seed), rank=2 + seed)
        found = sorted(tmp_path.glob("adapter*"))
    return [read(str(path), name=path.name) for path in found]


def test_lora_adapters_never_share_blocks(
    read: Any, write_adapter: Write, make_core: Any, make_generation: Any, run: Any
) -> None:
    old, new = (read(write_adapter(random_adapter(CONFIG, targets=TARGETS, seed=seed))) for seed in (1, 2))
    core = make_core()
    prompt = PROMPT * 2
    wanted = [
        answers(make_core(is_caching=False), run, make_generation(prompt, adapter=one))[0] for one in (None, old, new)
    ]
    for _ in range(2):
        for one, want in zip((None, old, new), wanted, strict=True):
            generation = make_generation(prompt, adapter=one)
            assert answers(core, run, generation) == [want]
    cached = [generation.choices[0].sequence.cached_tokens for generation in [generation]]
    assert cached == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS], "its own blocks are used again"


def test_lora_limits_concurrent_adapters_without_starvation(
    read: Any, write_adapter: Write, make_core: Any, make_generation: Any, run: Any, deliver: Any
) -> None:
    first, second = (read(write_adapter(random_adapter(CONFIG, targets=TARGETS, seed=seed))) for seed in (1, 2))
    core = make_core(adapters_max=1)
    requested = [make_generation(PROMPT, adapter=one) for one in (first, second, first, None)]
    for generation in requested:
        core.add(generation)
    core.step()
    assert [one.adapter for one in core.scheduler.running] == [first, None]
    while core.has_work:
        deliver(core.step())
        core.scheduler.validate()
        assert len({id(one.adapter) for one in core.scheduler.running if one.adapter}) <= 1
    assert all(generation.reply.is_finished for generation in requested)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"use_dora": True}, "use_dora is not supported"),
    ({"bias": "all"}, "bias 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules embed_tokens"),
    ({"target_modules": ["v_proj"]}, "not in target_modules"),
    ({"target_modules": r".*\.mlp\..*"}, "not in target_modules"),
    ({"target_modules": "("}, "not a valid regular expression"),
    ({"target_modules": 3}, "expected names"),
    ({"rank": 17}, "expected 1 to --max-lora-rank 16"),
    ({"rank": 3}, "has shape"),
    ({"rank": 2.5}, "rank 2.5"),
    ({"alpha": "x"}, "lora_alpha is 'x'"),
    ({"rank_pattern": [1]}, "rank_pattern"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS)
def test_lora_refuses_unsupported_adapters_by_name(
    config: dict[str, Any], message: str, read: Any, write_adapter: Write
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read(write_adapter(random_adapter(CONFIG, targets=("q_proj",)), **config))


@pytest.mark.parametrize(
    "target", ["all-linear", r"model\.layers\.\d+\.self_attn\.q_proj", ["q_proj"], ["self_attn.q_proj"]]
)
def test_lora_targets_have_the_names_of_peft(target: Any, read: Any, write_adapter: Write) -> None:
    adapter = read(write_adapter(random_adapter(CONFIG, targets=("q_proj",)), target_modules=target))
    assert all(layer.qkv is not None and layer.down is None for layer in adapter.layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {}, "empty"),
        (
            lambda tensors: tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(2, np.float32)},
            "embed",
        ),
        (lambda tensors: tensors | {"base_model.model.lm_head.lora_A.weight": np.ones(2, np.float32)}, "lm_head"),
        (lambda tensors: dict(list(tensors.items())[1:]), "only"),
        (lambda tensors: {name.replace("layers.1", "layers.7"): one for name, one in tensors.items()}, "2 layers"),
        (lambda tensors: {name: one * np.float32("nan") for name, one in tensors.items()}, "not finite"),
    ],
)
def test_lora_refuses_an_adapter_of_another_model(change: Any, message: str, read: Any, write_adapter: Write) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write_adapter(change(random_adapter(CONFIG, targets=("q_proj",)))))


def test_lora_refuses_a_truncated_file(read: Any, write_adapter: Write) -> None:
    path = Path(write_adapter(random_adapter(CONFIG, targets=TARGETS)))
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="truncated"):
        read(str(path))
    file.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        read(str(path))
