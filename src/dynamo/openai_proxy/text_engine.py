"""TextEngine: forwards the client's requests to the server in text form, and its chunks back."""

from typing import Any

from dynamo.backend.engine import EngineConfig
from dynamo.core.errors import StreamIncomplete, Unknown
from dynamo.core.http_client import HttpResponse
from dynamo.openai_proxy.convert import ChunkConverter, TextRequest, text_request
from dynamo.openai_proxy.engine import ProxyEngine, chunks_of
from dynamo.openai_proxy.tokens import ServerRequest
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply


class TextEngine(ProxyEngine):
    """`dynamo.backend.engine.LLMEngine` for requests in text."""

    async def describe(self) -> EngineConfig:
        config, offer = self._config, self._offer
        canary: dict[str, Any] = {"model": offer.name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        if offer.embeds:
            canary = {"model": offer.name, "input": "a"}
        return EngineConfig(
            model_path="",
            served_model_name=offer.name,
            context_length=config.context_length or 0,  # Servers with different lengths may share one model name.
            kv_cache_block_size=0,
            total_kv_blocks=0,
            max_num_seqs=config.max_connections,
            max_num_batched_tokens=0,
            health_check_payload=canary,
            model_type="Embedding" if offer.embeds else None,
            model_input="Text",
            request_type=dict,
            publishes_kv_events=False,
        )

    def submit(self, request: PreprocessedRequest | dict[str, Any], reply: Reply) -> None:
        assert isinstance(request, dict), "the worker decodes requests as the engine's configuration specifies"
        server_request = text_request(request, self._offer.model)

        async def read(answer: HttpResponse) -> None:
            await (
                self._stream(answer, server_request, reply) if server_request.is_stream else self._whole(answer, reply)
            )

        accept = {"accept": "text/event-stream"} if server_request.is_stream else {}
        self.begin(reply, ServerRequest(self._config.api(server_request.path), server_request.body, accept), read)

    async def _stream(self, answer: HttpResponse, server_request: TextRequest, reply: Reply) -> None:
        """Forward a stream. Raises `StreamIncomplete` if it ends before all choices have finished."""
        chunks = ChunkConverter(server_request, self._offer.name)
        async for one in chunks_of(answer):
            chunk = chunks.take(one)
            if chunk is not None:
                reply.item(chunk)
        if not chunks.is_finished:
            raise StreamIncomplete("the server closed the stream before the end of the response")

    async def _whole(self, answer: HttpResponse, reply: Reply) -> None:
        async for whole in chunks_of(answer):
            if not isinstance(whole, dict):
                raise Unknown("malformed response from the server: expected an object")
            reply.item({**whole, "model": self._offer.name})
