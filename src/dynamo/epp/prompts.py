"""PromptReader: the bodies of requests that are routed by their content, decoded and converted as a frontend does.

A picker keeps no responses: the items of a response's own request are its prompt, without stored ones.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from dynamo.api.anthropic import convert as anthropic
from dynamo.api.anthropic.errors import error_body as anthropic_error
from dynamo.api.responses.fitting import fitting_chat
from dynamo.core.config import read_bool, setting
from dynamo.protocols.anthropic import decode_messages
from dynamo.protocols.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    decode_classify,
    decode_embedding,
    decode_pooling,
    decode_rerank,
)
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, decode_chat, decode_completion
from dynamo.protocols.response_items import ItemReference
from dynamo.protocols.response_requests import decode_response_request, with_items
from dynamo.serving.bodies import decoded
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models
from dynamo.serving.prompt_count import counted_model

GenerationRequest = ChatCompletionRequest | CompletionRequest
PooledRequest = ClassifyRequest | PoolingRequest | RerankRequest
RoutedRequest = GenerationRequest | EmbeddingRequest | PooledRequest

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/chat/completions", "/completions", "/responses", "/messages"
"""Ends of the paths; a gateway may add a prefix."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Decoders of all APIs."""

    models: Models
    strips_preamble: bool
    ignores_unknown: bool

    @classmethod
    def from_environment(cls, models: Models) -> "PromptReader":
        """Return a reader with the settings that frontends read."""
        return cls(
            models,
            setting("DYN_STRIP_ANTHROPIC_PREAMBLE", True, read_bool),
            setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool),
        )

    async def read(self, path: str, body: bytearray) -> RoutedRequest | None:
        """Return the request to a path; None if its content does not affect its routing. Raise `InvalidArgument`."""
        readers: tuple[tuple[str, Callable[[bytearray], Awaitable[RoutedRequest]]], ...] = (
            (CHAT, self._chat),
            (COMPLETIONS, self._completion),
            (RESPONSES, self._response),
            (MESSAGES, self._message),
            ("/embeddings", self._embedding),
            ("/classify", self._classify),
            ("/pooling", self._pooling),
            ("/rerank", self._rerank),
        )
        for end, reader in readers:
            if path.endswith(end):
                return await reader(body)
        return None

    async def _chat(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_chat, ignore_unsupported=self.ignores_unknown), "chat")

    async def _completion(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_completion, ignore_unsupported=self.ignores_unknown), "completion")

    async def _response(self, body: bytearray) -> RoutedRequest:
        decode = partial(decode_response_request, ignore_unknown=self.ignores_unknown)
        request, given = await decoded(body, partial(with_items, decode), "responses")
        items = [one for one in given if not isinstance(one, ItemReference)]
        answer_tokens = request.max_output_tokens or 1
        return await fitting_chat(
            request, items, answer_tokens, lambda name: counted_model(self.models, name, None).preprocessor
        )

    async def _message(self, body: bytearray) -> RoutedRequest:
        request = await decoded(body, partial(decode_messages, ignore_unknown=self.ignores_unknown), "messages")
        return anthropic.to_chat(request, strip_preamble=self.strips_preamble)

    async def _embedding(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_embedding, ignore_unknown=self.ignores_unknown), "embeddings")

    async def _classify(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_classify, ignore_unknown=self.ignores_unknown), "classify")

    async def _pooling(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_pooling, ignore_unknown=self.ignores_unknown), "pooling")

    async def _rerank(self, body: bytearray) -> RoutedRequest:
        return await decoded(body, partial(decode_rerank, ignore_unknown=self.ignores_unknown), "rerank")


def kind_of(request: RoutedRequest) -> str:
    """Return the type of the models that serve a request."""
    kinds: dict[type, str] = {
        ChatCompletionRequest: "Chat",
        CompletionRequest: "Completions",
        EmbeddingRequest: "Embedding",
        ClassifyRequest: "Classify",
        PoolingRequest: "Pooling",
        RerankRequest: "Rerank",
    }
    return kinds[type(request)]


def error_body(path: str, error: ErrorAnswer) -> bytes:
    """Return an error in the form of the path's API."""
    return anthropic_error(error) if path.partition("?")[0].endswith(MESSAGES) else error.body()
