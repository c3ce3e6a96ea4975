"""Classify engine: the embedding engine with a classification head and text input."""

import time
from typing import Any

import numpy as np

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.cpu.attention import F32
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.embedder import Embedder, Job, Pooling
from dynamo.cpu.embedding_engine import EmbeddingEngine, to_job
from dynamo.cpu.model import TransformerModel
from dynamo.protocols.embeddings import ClassifyRequest, EmbeddingWork, inputs_of
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply
from dynamo.text.tokenizer.tokenizer import Tokenizer


class ClassifyEngine(EmbeddingEngine):
    """Engine that returns the label of a text: `/v1/classify`."""

    def __init__(self, config: CpuConfig) -> None:
        super().__init__(config)
        self._labels: tuple[str, ...] = ()
        self._tokenizer: Tokenizer

    def embedder_of(self, model: TransformerModel, path: str) -> Embedder:
        if not model.shape.labels:
            raise ConfigError(f"{path}: the model has no labels; --classify-worker requires a classification model")
        self._labels = model.shape.labels
        self._tokenizer = Tokenizer.from_dir(path)
        return Embedder(model, Pooling.LAST, self._config.max_num_batched_tokens, model.score)

    def kind(self, name: str) -> dict[str, Any]:
        return {
            "health_check_payload": {"input": "a", "model": name},
            "model_type": "Classify",
            "model_input": "Text",
            "request_type": ClassifyRequest,
        }

    def job_of(self, request: PreprocessedRequest | EmbeddingWork | ClassifyRequest) -> Job:
        assert isinstance(request, ClassifyRequest), "the worker decodes requests by the engine's configuration"
        if request.truncation_side == "left":
            raise InvalidArgument("truncation_side left is not supported by this engine", param="truncation_side")
        special = request.add_special_tokens is not False
        work = EmbeddingWork(
            token_ids=[
                self._tokenizer.encode(one, add_special_tokens=special) if isinstance(one, str) else one
                for one in inputs_of(request.input)
            ],
            model=request.model,
        )
        if request.truncate_prompt_tokens is not None:
            work.truncate_prompt_tokens = request.truncate_prompt_tokens
        job = to_job(work, self._limits)
        job.is_activated = request.use_activation is not False
        return job

    def answer_to(self, job: Job, reply: Reply) -> object:
        tokens = sum(len(text) for text in job.texts)
        return {
            "id": f"classify-{reply.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._config.name,
            "data": [self._entry(index, scores, job) for index, scores in enumerate(job.vectors) if scores is not None],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _entry(self, index: int, scores: F32, job: Job) -> dict[str, Any]:
        probs = probabilities(scores) if job.is_activated else scores
        return {
            "index": index,
            "label": self._labels[int(np.argmax(probs))],
            "probs": [float(one) for one in probs],
            "num_classes": len(self._labels),
        }


def probabilities(scores: F32) -> F32:
    """Return the sigmoid for a single label, the softmax for several labels."""
    if len(scores) == 1:
        return (1 / (1 + np.exp(-scores))).astype(np.float32)
    weights = np.exp(scores - scores.max())
    shares: F32 = weights / weights.sum()
    return shares
