"""Classify engine: a text gets the label of a naive implementation."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.cpu.checkpoint import read_json
from dynamo.cpu.classify_engine import ClassifyEngine, probabilities
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.engine import CpuEngine
from dynamo.protocols.embeddings import ClassifyRequest


class Host:
    """A worker that receives no calls."""

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


@pytest.fixture
def write_classifier(write_model: Callable[..., str], write_letters: Callable[[Path], None]) -> Callable[..., str]:
    """A model that separates the named labels."""

    def write(*labels: str) -> str:
        path = Path(write_model(id2label={str(number): label for number, label in enumerate(labels)}))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"]}))
        tensors = load_file(path / "model.safetensors")
        del tensors["lm_head.weight"]
        rng = np.random.default_rng(3)
        tensors["score.weight"] = rng.standard_normal((len(labels), 32)).astype(np.float32)
        save_file(tensors, path / "model.safetensors")
        write_letters(path)
        return str(path)

    return write


@asynccontextmanager
async def running(path: str) -> AsyncIterator[tuple[ClassifyEngine, Any]]:
    engine = ClassifyEngine(CpuConfig(model_path=path, model_name="c", classify_worker=True))
    try:
        yield engine, await engine.start(Host())  # type: ignore[arg-type]
    finally:
        await engine.stop()


async def send_request(engine: ClassifyEngine, reply: Any, **fields: Any) -> Any:
    engine.submit(ClassifyRequest(**{"model": "c", **fields}), reply)
    async with asyncio.timeout(30):
        await engine.drain()
    assert reply.is_finished
    return reply.messages[0]


async def test_classifier_labels_and_scores_equal_those_of_a_naive_model(
    write_classifier: Callable[..., str],
    naive_logits: Callable[..., Any],
    receiver_type: type[Any],
    letters: str,
) -> None:
    path = write_classifier("good", "bad", "neither")
    async with running(path) as (engine, config):
        assert (config.model_type, config.model_input, config.request_type) == ("Classify", "Text", ClassifyRequest)
        output = await send_request(engine, receiver_type("r"), input=["Hello there", "x"])
        raw = await send_request(
            engine, receiver_type("s"), input=[letters.index(one) for one in "Hello there"], use_activation=False
        )
    tensors = load_file(f"{path}/model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("score.weight")
    ids = [letters.index(one) for one in "Hello there"]
    want = naive_logits(ids, read_json(f"{path}/config.json"), tensors)[-1]
    first, second = output["data"]
    assert raw["data"][0]["probs"] == pytest.approx(want, abs=1e-3)
    assert first["probs"] == pytest.approx(np.exp(want) / np.exp(want).sum(), abs=1e-4)
    assert first["label"] == ("good", "bad", "neither")[int(np.argmax(want))]
    assert (second["index"], second["num_classes"], sum(second["probs"])) == (1, 3, pytest.approx(1))
    assert (output["id"], output["usage"]["prompt_tokens"]) == ("classify-r", 12)


async def test_classifier_truncates_or_refuses_long_texts_as_requested(
    write_classifier: Callable[..., str], receiver_type: type[Any]
) -> None:
    async with running(write_classifier("yes")) as (engine, _):
        output = await send_request(engine, receiver_type(), input="x" * 300, truncate_prompt_tokens=7)
        assert output["usage"]["prompt_tokens"] == 7
        for fields, param in (
            ({"input": "x" * 300}, "input"),
            ({"input": "x", "truncation_side": "left"}, "truncation_side"),
        ):
            with pytest.raises(InvalidArgument) as refusal:
                engine.submit(ClassifyRequest(model="c", **fields), receiver_type())  # type: ignore[arg-type]
            assert refusal.value.param == param


async def test_classifier_model_requires_labels_and_the_classify_flag(
    write_classifier: Callable[..., str], write_model: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match="no labels"):
        async with running(write_model()):
            pass
    path = write_classifier("a", "b")
    with pytest.raises(ConfigError, match="--classify-worker"):
        await CpuEngine(CpuConfig(model_path=path)).start(Host())  # type: ignore[arg-type]


def test_classifier_uses_sigmoid_for_one_label_and_softmax_for_several() -> None:
    assert probabilities(np.array([0.0], np.float32)).tolist() == [0.5]
    shares = probabilities(np.array([1000.0, 1000.0], np.float32))
    assert shares.tolist() == [0.5, 0.5]


def test_classifier_worker_has_one_task() -> None:
    with pytest.raises(ConfigError, match="--classify-worker"):
        CpuConfig(embedding_worker=True, classify_worker=True)
