"""Embedder: a text's vector does not depend on the other texts of its batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dynamo.core.errors import ConfigError
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.checkpoint import read_json
from dynamo.cpu.embedder import Embedder, Job, Pooling, read_pooling, unit
from dynamo.cpu.model import TransformerModel, load_weights


def run(embedder: Embedder, *jobs: Job) -> list[Job]:
    for job in jobs:
        embedder.add(job)
    done: list[Job] = []
    while embedder.has_work:
        done += embedder.step()
    return done


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("rows", [8, 128])
def test_embedder_vector_equals_that_of_a_naive_model(
    write_model: Callable[..., str], naive_logits: Callable[..., Any], pooling: Pooling, rows: int
) -> None:
    path = write_model()
    config, tensors = read_json(f"{path}/config.json"), load_file(f"{path}/model.safetensors")
    tensors["lm_head.weight"] = np.eye(config["hidden_size"], dtype=np.float32)  # Then logits are the states.
    texts = [np.random.default_rng(size).integers(0, 96, size).tolist() for size in (1, 20, 3, 8, 9)]
    shape = Architecture.read(path)
    model = TransformerModel(shape, load_weights(path, shape), slots=128, rows_max=rows, longest=128)
    job = Job(texts)
    assert run(Embedder(model, pooling, rows), job) == [job]
    for text, vector in zip(texts, job.vectors, strict=True):
        states = naive_logits(text, config, tensors)
        want = {Pooling.MEAN: states.mean(0), Pooling.LAST: states[-1], Pooling.CLS: states[0]}[pooling]
        assert np.abs(vector - want / np.linalg.norm(want)).max() < 1e-5


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(list(Pooling)),
    st.sampled_from([4, 16, 128]),
    st.sets(st.integers(0, 3)),
)
@settings(max_examples=30)
def test_embedder_computes_every_job_once_as_if_alone(
    tiny_model: TransformerModel, sizes: list[list[int]], pooling: Pooling, rows: int, closed: set[int]
) -> None:
    rng = np.random.default_rng(5)
    jobs = [Job([rng.integers(0, 96, size).tolist() for size in texts]) for texts in sizes]
    for number in closed & set(range(len(jobs))):
        jobs[number].is_open = False
    done = run(Embedder(tiny_model, pooling, rows), *jobs)
    assert sorted(map(id, done)) == sorted(id(job) for job in jobs if job.is_open)
    for job in done:
        for text, vector in zip(job.texts, job.vectors, strict=True):
            alone = Job([text])
            run(Embedder(tiny_model, pooling, 128), alone)
            assert vector is not None
            assert np.allclose(vector, alone.vectors[0], atol=1e-4)
            assert abs(float(np.dot(vector, vector)) - 1) < 1e-4


def test_embedder_small_request_does_not_wait_for_a_large_one(tiny_model: TransformerModel) -> None:
    embedder = Embedder(tiny_model, Pooling.LAST, 16)
    large, small = Job([[1] * 10] * 20), Job([[2] * 10])
    embedder.add(large)
    embedder.add(small)
    steps = 0
    while small not in embedder.step():
        steps += 1
    assert steps < 3
    assert large.left > 10


def test_embedder_skips_a_dropped_job(tiny_model: TransformerModel) -> None:
    embedder = Embedder(tiny_model, Pooling.MEAN, 4)
    job = Job([[1] * 10, [2]])
    embedder.add(job)
    assert embedder.step() == []
    job.is_open = False
    assert run(embedder) == []
    assert job.left == 2


def test_embedder_truncated_dimensions_are_normalized(tiny_model: TransformerModel) -> None:
    whole, cut = Job([[1, 2, 3]]), Job([[1, 2, 3]], dimensions=8)
    run(Embedder(tiny_model, Pooling.LAST, 16), whole, cut)
    assert whole.vectors[0] is not None
    assert cut.vectors[0] is not None
    assert len(cut.vectors[0]) == 8
    assert np.allclose(cut.vectors[0], unit(whole.vectors[0][:8]), atol=1e-6)


def test_embedder_zero_vector_stays_zero() -> None:
    assert not unit(np.zeros(4, np.float32)).any()


def test_embedder_pooling_is_chosen_by_the_model(tmp_path: Path) -> None:
    assert read_pooling(str(tmp_path), "auto") is Pooling.LAST
    assert read_pooling(str(tmp_path), "cls") is Pooling.CLS
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(
        json.dumps({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    )
    assert read_pooling(str(tmp_path), "auto") is Pooling.MEAN
    assert read_pooling(str(tmp_path), "last") is Pooling.LAST
    for output in ("{", "[]", "{}", '{"pooling_mode_max_tokens": true}'):
        file.write_text(output)
        with pytest.raises(ConfigError, match="1_Pooling"):
            read_pooling(str(tmp_path), "auto")
