from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynamo.core.errors import ConfigError
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.checkpoint import read_json
from dynamo.cpu.model import (
    Batch,
    TransformerModel,
    load_weights,
)
from dynamo.cpu.spans import TokenSpan
from dynamo.cpu.team import Team

Runs = list[tuple[int, int]]


def loaded(path: str, team: Team | None = None) -> TransformerModel:
    shape = Architecture.read(path)
    return TransformerModel(shape, load_weights(path, shape), slots=512, rows_max=128, longest=256, team=team)


def forward(model: TransformerModel, tokens: list[int], first: int, runs: Runs) -> Any:
    """Computes `tokens[first:]`; `runs` hold all of them."""
    slots = np.concatenate([np.arange(start, stop) for start, stop in runs])
    positions = np.arange(first, len(tokens))
    span = TokenSpan(0, len(positions), len(tokens), runs)
    return model.forward(Batch(np.array(tokens[first:]), positions, slots[first:], [span], np.arange(len(positions))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"architectures": ["Qwen2ForCausalLM"], "has_qk_norm": False, "has_bias": True},
        {"architectures": ["LlamaForCausalLM"], "has_qk_norm": False, "num_key_value_heads": 4},
        {"num_key_value_heads": 1},
    ],
)
def test_model_logits_equal_those_of_a_naive_model(
    write_model: Callable[..., str], naive_logits: Callable[..., Any], changes: dict[str, Any]
) -> None:
    path = write_model(**changes)
    tokens = np.random.default_rng(3).integers(0, 96, 70).tolist()
    want = naive_logits(tokens, read_json(f"{path}/config.json"), load_file(f"{path}/model.safetensors"))
    got = forward(loaded(path), tokens, 0, [(40, 60), (100, 150)])
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5


@pytest.mark.parametrize("threads", [1, 3])
def test_model_logits_do_not_depend_on_how_rows_are_divided(
    write_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    path = write_model()
    tokens = list(range(70))
    whole = forward(loaded(path, Team(1, print)), tokens, 0, [(0, 70)])
    monkeypatch.setattr("dynamo.cpu.rows.BLOCK_ROWS_MAX", 9)
    monkeypatch.setattr("dynamo.cpu.rows.SHARE_ROWS_MIN", 9)
    put: list[int] = []
    divided = forward(loaded(path, Team(threads, put.append)), tokens, 0, [(0, 70)])
    assert np.allclose(divided, whole, atol=1e-4)
    assert put == ([] if threads == 1 else [1, 3])


@pytest.mark.parametrize("wanted", [[69], [3, 4, 30], [69, 0], [30, 30]])
def test_model_logits_of_some_rows_equal_those_among_all_rows(tiny_model: TransformerModel, wanted: list[int]) -> None:
    tokens = list(range(70))
    whole = forward(tiny_model, tokens, 0, [(0, 70)])
    rows, span = np.arange(70), TokenSpan(0, 70, 70, [(0, 70)])
    some = tiny_model.forward(Batch(np.array(tokens), rows, rows, [span], np.array(wanted)))
    assert np.allclose(some, whole[wanted], atol=1e-4)


def test_model_logits_do_not_depend_on_chunking(tiny_model: TransformerModel) -> None:
    tokens = list(range(20))
    whole = forward(tiny_model, tokens, 0, [(0, 20)])
    runs: Runs = [(64, 76), (32, 40)]
    first = forward(tiny_model, tokens[:12], 0, [(64, 76)])
    rest = [forward(tiny_model, tokens[: end + 1], end, [(64, 76), (32, 21 + end)])[-1] for end in range(12, 20)]
    assert runs[1][1] == 40
    assert np.allclose(np.vstack([first, rest]), whole, atol=1e-4)


def test_model_sequences_of_a_batch_are_independent(tiny_model: TransformerModel) -> None:
    short, long, prompt = [5, 6, 7], list(range(40)), [9] * 10
    alone = [forward(tiny_model, tokens, 0, [(0, len(tokens))])[-1] for tokens in (short, long, prompt)]
    forward(tiny_model, short[:-1], 0, [(100, 102)])
    forward(tiny_model, long[:-1], 0, [(200, 239)])
    together = tiny_model.forward(
        Batch(
            tokens=np.array([short[-1], long[-1], *prompt]),
            positions=np.array([2, 39, *range(10)]),
            slots=np.array([102, 239, *range(300, 310)]),
            spans=[
                TokenSpan(0, 1, 3, [(100, 103)]),
                TokenSpan(1, 1, 40, [(200, 240)]),
                TokenSpan(2, 10, 10, [(300, 310)]),
            ],
            wanted=np.array([0, 1, 11]),
        )
    )
    assert np.allclose(together, alone, atol=1e-4)


def test_model_computes_logits_of_requested_rows_only(tiny_model: TransformerModel) -> None:
    nothing = np.array([], dtype=np.intp)
    batch = Batch(np.array([1, 2]), np.array([0, 1]), np.array([0, 1]), [TokenSpan(0, 2, 2, [(0, 2)])], nothing)
    assert tiny_model.forward(batch).shape == (0, 96)


def test_model_refuses_an_unexpected_tensor(write_model: Callable[..., str]) -> None:
    path = write_model()
    tensors = load_file(f"{path}/model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.experts.0": np.ones(3, np.float32)}, f"{path}/model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.0 \(one of 1\) is not used by a Qwen3ForCausalLM"):
        load_weights(path, Architecture.read(path))


def test_model_error_names_a_missing_tensor(write_model: Callable[..., str]) -> None:
    path = write_model()
    tensors = load_file(f"{path}/model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, f"{path}/model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_weights(path, Architecture.read(path))
