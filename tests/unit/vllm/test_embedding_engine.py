"""VllmEmbeddingEngine: a vector for each input."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.backend.recorded_reply import RecordedReply
from tests.unit.vllm.conftest import Start

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.embeddings import EmbeddingWork
from dynamo.vllm.embedding_engine import VllmEmbeddingEngine, texts_of


class Tensor:
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def float(self) -> "Tensor":
        return self

    def cpu(self) -> Any:
        return np.array(self.values)


def pooled(*values: float) -> Any:
    return SimpleNamespace(outputs=SimpleNamespace(data=Tensor(list(values))), error=None)


async def test_embedding_engine_returns_one_vector_per_input(start: Start) -> None:
    running = await start(VllmEmbeddingEngine, embedding_worker=True)
    assert running.config.model_type == "Embedding"
    reply, error = await running.send_request(EmbeddingWork(token_ids=[[1, 2], [3]], model="m"), pooled(0.5, 1.0))
    assert error is None
    (output,) = reply.items
    assert output.embeddings == ["AAAAPwAAgD8="] * 2
    assert output.prompt_tokens == 3
    assert [one.prompt["prompt_token_ids"] for one in running.llm.received_requests] == [[1, 2], [3]]


async def test_embedding_input_refused_by_vllm_is_an_invalid_argument(start: Start) -> None:
    running = await start(VllmEmbeddingEngine, embedding_worker=True)
    _, error = await running.send_request(
        EmbeddingWork(token_ids=[[1]], model="m"), ValueError("dimensions must be at least 1")
    )
    assert isinstance(error, InvalidArgument)
    with pytest.raises(InvalidArgument, match=r"input\[0\]"):
        running.engine.submit(EmbeddingWork(token_ids=[[]], model="m"), RecordedReply())


def test_embedding_inputs_are_truncated_on_request() -> None:
    assert texts_of(EmbeddingWork(token_ids=[[1, 2, 3]], model="m", truncate_prompt_tokens=2), 8) == [[1, 2]]
    assert texts_of(EmbeddingWork(token_ids=[[1, 2, 3]], model="m", truncate_prompt_tokens=-1), 2) == [[1, 2]]
    with pytest.raises(InvalidArgument, match="maximum of this model is 2"):
        texts_of(EmbeddingWork(token_ids=[[1, 2, 3]], model="m"), 2)
    with pytest.raises(InvalidArgument, match="must not be empty"):
        texts_of(EmbeddingWork(token_ids=[], model="m"), 2)
