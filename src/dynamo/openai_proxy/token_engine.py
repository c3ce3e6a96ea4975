"""TokenEngine: the frontend tokenizes; the server receives and returns tokens."""

import asyncio
from typing import Any

from dynamo.backend.disagg import (
    DisaggregationMode,
    prefill_output,
    prefill_request,
    prefill_result_of,
)
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.listeners import kv_listener
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.http_client import HttpResponse
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.engine_subscriber import EngineListener
from dynamo.model_card.card import architectural_context_length, read_json
from dynamo.model_card.hub import resolve_model
from dynamo.openai_proxy.completions import CompletionsFormat, CompletionsResponseParser
from dynamo.openai_proxy.config import TokenApi
from dynamo.openai_proxy.engine import ProxyEngine, chunks_of
from dynamo.openai_proxy.facts import BLOCK_TOKENS, ServerFacts, token_api_of
from dynamo.openai_proxy.native import LlamaCppFormat, SglangFormat
from dynamo.openai_proxy.tokens import ProxyLimits, ServerRequest, TokenFormat, TokenResponseParser
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply

KEY = "kv_transfer_params"
PREFILL_TRANSFER_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which vLLM's NIXL connector keeps a prompt's blocks for transfer."""


def form_of(api: TokenApi, facts: ServerFacts) -> TokenFormat:
    """Return the request and response format of an API."""
    match api:
        case TokenApi.SGLANG:
            return SglangFormat()
        case TokenApi.LLAMA_CPP:
            return LlamaCppFormat()
        case _:
            return CompletionsFormat(returns_ids=api is TokenApi.TOKEN_IDS, version=facts.version)


class TokenEngine(ProxyEngine):
    """`dynamo.backend.engine.LLMEngine` for requests in tokens."""

    _form: TokenFormat
    _limits: ProxyLimits

    async def describe(self) -> EngineConfig:
        config, facts, offer = self._config, self._facts, self._offer
        assert config.model_path is not None, "checked by the configuration"
        path = await asyncio.to_thread(resolve_model, config.model_path, weights=False)
        length = offer.context_length or architectural_context_length(read_json(f"{path}/config.json"))
        if length is None:
            raise ConfigError("--context-length is missing: neither the server nor the model's files specify it")
        api = token_api_of(config, facts)
        if config.role is not DisaggregationMode.AGGREGATED and api is not TokenApi.TOKEN_IDS:
            raise ConfigError(f"--disaggregation-mode {config.role.value}: requires a vLLM server from 0.10.2 on")
        if config.kv_events_endpoint is not None and not facts.total_blocks:
            raise ConfigError("--total-kv-blocks is missing: the server does not report the size of its cache")
        self._form = form_of(api, facts)
        self._limits = ProxyLimits(model=offer.model, context_length=length, ranks=facts.ranks)
        return EngineConfig(
            model_path=path,
            served_model_name=offer.name,
            context_length=length,
            kv_cache_block_size=facts.block_tokens or BLOCK_TOKENS,
            total_kv_blocks=facts.total_blocks or 0,
            max_num_seqs=config.max_connections,
            max_num_batched_tokens=length,
            data_parallel_size=facts.ranks,
            publishes_kv_events=config.kv_events_endpoint is not None,
        )

    def listen(self, tasks: TaskOwner) -> None:
        config, facts = self._config, self._facts
        if config.kv_events_endpoint is None or not config.role.publishes_cache:
            return
        block = facts.block_tokens or BLOCK_TOKENS
        listeners = kv_listeners(
            config.kv_events_endpoint, config.kv_events_replay_endpoint, facts.ranks, block, self._host
        )
        for listener in listeners:
            tasks.start(listener.run(), f"KV events of {listener.endpoint}")

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self._config.role is DisaggregationMode.PREFILL:
            self._submit_prefill(prefill_request(request), reply)
            return
        server_request, answer = self._form.server_request(request, self._limits), self._form.answer(request)
        params = transferred(request) if self._config.role is DisaggregationMode.DECODE else None

        async def read(response: HttpResponse) -> None:
            await stream(response, answer, reply)

        self.begin(reply, self._placed(with_transfer(server_request, params)), read, is_movable=params is not None)

    def _submit_prefill(self, request: PreprocessedRequest, reply: Reply) -> None:
        """Request one token and the prompt's blocks, whose location the server reports only without streaming."""
        server_request = with_transfer(self._form.server_request(request, self._limits), PREFILL_TRANSFER_PARAMS)
        body = {name: value for name, value in server_request.body.items() if name not in ("stream", "stream_options")}
        answer = self._form.answer(request)
        assert isinstance(answer, CompletionsResponseParser), "checked by the configuration"

        async def read(response: HttpResponse) -> None:
            async for whole in chunks_of(response):
                answer.take(whole)
            piece = answer.end()
            params = {} if answer.kv_transfer_params is None else {KEY: answer.kv_transfer_params}
            reason = "length" if piece.finish_reason == "length" else "stop"
            reply.item(prefill_output(piece.token_ids, params, piece.completion_usage, finish_reason=reason))

        self.begin(reply, self._placed(ServerRequest(server_request.path, body, server_request.headers)), read)

    def _placed(self, server_request: ServerRequest) -> ServerRequest:
        """Return the request with its path below the server's URL."""
        return (
            ServerRequest(self._config.api(server_request.path), server_request.body, server_request.headers)
            if self._form.is_api_path
            else server_request
        )


async def stream(response: HttpResponse, answer: TokenResponseParser, reply: Reply) -> None:
    """Write the server's output to the reply; single responses of bare tokens use the fast path."""
    async for chunk in chunks_of(response):
        for piece in answer.take(chunk):
            if piece.finish_reason is None and piece.log_probs is None and piece.index == 0:
                for token in piece.token_ids:
                    reply.token(token)
            else:
                reply.item(piece)
    reply.item(answer.end())


def transferred(request: PreprocessedRequest) -> dict[str, Any] | None:
    """Return the decode server's transfer parameters; None if it computes the prompt. Raises `InvalidArgument`."""
    result = prefill_result_of(request)
    if result is None:
        return None
    params = result.disaggregated_params.get(KEY) if isinstance(result.disaggregated_params, dict) else None
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument(f"prefill_result: {KEY} is {str(params)[:80]!r}, expected a map", param="prefill_result")
    return params


def with_transfer(server_request: ServerRequest, params: dict[str, Any] | None) -> ServerRequest:
    """Return the request with transfer parameters of remote blocks."""
    return (
        server_request
        if params is None
        else ServerRequest(server_request.path, {**server_request.body, KEY: params}, server_request.headers)
    )


def kv_listeners(
    endpoint: str, replay_endpoint: str | None, ranks: int, block_tokens: int, host: EngineHost
) -> list[EngineListener]:
    """Return a listener for each rank; ranks use consecutive ports. Raises `ConfigError`."""
    listeners = []
    for rank in range(ranks):
        replay = None if replay_endpoint is None else at_rank(replay_endpoint, rank)
        listeners.append(kv_listener(at_rank(endpoint, rank), replay, rank, block_tokens, host))
    return listeners


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank. Raises `ConfigError` for an endpoint without a port."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise ConfigError(f"--kv-events-endpoint {endpoint}: expected tcp://host:port for a server of several ranks")
    return f"{address}:{int(port) + rank}"
