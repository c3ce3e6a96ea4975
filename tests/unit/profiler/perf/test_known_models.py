import pytest

from dynamo.profiler.perf.known_models import SIZES, known_config
from dynamo.profiler.perf.model_shape import model_shape

BILLIONS = {
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-235B-A22B": 235.1,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "deepseek-ai/DeepSeek-R1": 671.0,
    "MiniMaxAI/MiniMax-M2.5": 229.0,
}
"""Parameters as published with the models."""


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes_add_up_to_the_published_number_of_parameters(name: str) -> None:
    shape = model_shape(known_config(name) or {}, name)
    embeddings = shape.hidden * shape.vocab * (1 if shape.ties_embeddings else 2)
    found = (shape.dense_params + shape.routed_params + embeddings) / 1e9
    assert found == pytest.approx(BILLIONS[name], rel=0.005)


def test_every_model_of_the_table_has_a_shape() -> None:
    for name in SIZES:
        assert model_shape(known_config(name) or {}, name).max_context >= 32768


def test_other_models_are_not_known() -> None:
    assert known_config("someone/model") is None
