"""VllmEmbeddingEngine: vLLM's pooling models behind a worker; token ids in, a vector for each input out."""

import asyncio
import logging
from base64 import b64encode
from functools import partial
from typing import Any

import numpy as np

from dynamo.backend.engine import EngineConfig
from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import EngineShutdown, InvalidArgument, Unknown
from dynamo.protocols.embeddings import EmbeddingOutput, EmbeddingWork
from dynamo.runtime.request_plane.base import Reply
from dynamo.vllm.engine import VllmEngine

logger = logging.getLogger(__name__)


class VllmEmbeddingEngine(VllmEngine):
    """A vLLM engine that returns embeddings."""

    def adjust(self, args: Any) -> None:
        if args.runner == "auto":
            args.runner = "pooling"

    def describe(self, config: EngineConfig) -> EngineConfig:
        from dataclasses import replace

        return replace(
            config,
            model_type="Embedding",
            request_type=EmbeddingWork,
            publishes_kv_events=False,
            health_check_payload={"token_ids": [[1]], "model": config.served_model_name},
        )

    def submit(self, request: Any, reply: Reply) -> None:
        if not self.is_running:
            raise EngineShutdown("the engine is not running")
        assert isinstance(request, EmbeddingWork), "the worker decodes the configuration's request_type"
        texts = texts_of(request, self._limits.context_length)
        self.begin(self._embed(texts, request.dimensions, reply), reply)

    async def _embed(self, texts: list[list[int]], dimensions: int | None, reply: Reply) -> None:
        """Embed all inputs concurrently: vLLM batches them into as many steps as necessary."""
        library = self._library
        with ErrorBoundary(partial(self.answer_error, reply)):
            params = library.PoolingParams(task="embed", dimensions=dimensions)
            vectors = await asyncio.gather(
                *(self._vector(text, params, f"{reply.request_id}-{place}") for place, text in enumerate(texts))
            )
            tokens = sum(map(len, texts))
            reply.item(EmbeddingOutput(embeddings=list(vectors), prompt_tokens=tokens, total_tokens=tokens))
            reply.finish()

    async def _vector(self, tokens: list[int], params: Any, request_id: str) -> str:
        """Return the vector as little-endian float32 in base64. Raise vLLM's errors."""
        prompt = {"type": "token", "prompt_token_ids": tokens}
        data: Any = None
        async for output in self._llm.encode(prompt, params, request_id):
            if output.error is not None:
                raise InvalidArgument(output.error.message)
            data = output.outputs.data
        if data is None:
            raise Unknown("vLLM returned no vector")
        return b64encode(np.asarray(data.float().cpu(), "<f4").tobytes()).decode()


def texts_of(request: EmbeddingWork, context_length: int) -> list[list[int]]:
    """Return the inputs, truncated if the request sets a limit. Raise `InvalidArgument` that names the input."""
    cut = request.truncate_prompt_tokens
    texts: list[list[int]] = []
    for place, given in enumerate(request.token_ids):
        ids = given[: context_length if cut == -1 else cut] if isinstance(cut, int) else given
        if not ids:
            raise InvalidArgument(f"input[{place}] has no tokens", param="input")
        if len(ids) > context_length:
            raise InvalidArgument(
                f"input[{place}] has {len(ids)} tokens, the maximum of this model is {context_length}; "
                "set truncate_prompt_tokens to shorten it",
                param="input",
            )
        texts.append(ids)
    if not texts:
        raise InvalidArgument("input must not be empty", param="input")
    return texts
