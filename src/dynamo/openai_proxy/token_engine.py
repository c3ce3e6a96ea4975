"""TokenEngine: the frontend makes tokens, the server is asked in them, and tells which it answers with."""

import asyncio
from typing import Any

from dynamo.backend.disagg import (
    DisaggregationMode,
    prefill_output,
    prefill_request,
    prefill_result_of,
)
from dynamo.backend.engine import EngineConfig
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.http_client import HttpAnswer
from dynamo.core.tasks import TaskOwner
from dynamo.model_card.card import architectural_context_length, read_json
from dynamo.model_card.hub import resolve_model
from dynamo.openai_proxy.completions import CompletionsAnswer, CompletionsForm
from dynamo.openai_proxy.config import TokenApi
from dynamo.openai_proxy.engine import ProxyEngine, chunks_of
from dynamo.openai_proxy.events import kv_listeners
from dynamo.openai_proxy.facts import BLOCK_TOKENS, Facts, token_api_of
from dynamo.openai_proxy.native import LlamaCppForm, SglangForm
from dynamo.openai_proxy.tokens import Asked, Form, Limits, TokenAnswer
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply

KEY = "kv_transfer_params"
ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's NIXL connector is told so that it keeps a prompt's blocks (serving-plane.md §5.7)."""


def form_of(api: TokenApi, facts: Facts) -> Form:
    """How the server is asked."""
    match api:
        case TokenApi.SGLANG:
            return SglangForm()
        case TokenApi.LLAMA_CPP:
            return LlamaCppForm()
        case _:
            return CompletionsForm(tells_ids=api is TokenApi.TOKEN_IDS, version=facts.version)


class TokenEngine(ProxyEngine):
    """`dynamo.backend.engine.LLMEngine` in tokens."""

    _form: Form
    _limits: Limits

    async def describe(self) -> EngineConfig:
        config, facts, offer = self._config, self._facts, self._offer
        assert config.model_path is not None, "the options were judged"
        path = await asyncio.to_thread(resolve_model, config.model_path, weights=False)
        length = offer.context_length or architectural_context_length(read_json(f"{path}/config.json"))
        if length is None:
            raise ConfigError("--context-length is missing: neither the server nor the model's files say it")
        api = token_api_of(config, facts)
        if config.role is not DisaggregationMode.AGGREGATED and api is not TokenApi.TOKEN_IDS:
            raise ConfigError(f"--disaggregation-mode {config.role.value} is for vLLM servers from 0.10.2 on")
        if config.kv_events_endpoint is not None and not facts.total_blocks:
            raise ConfigError("--total-kv-blocks is missing: the server does not say how large its cache is")
        self._form = form_of(api, facts)
        self._limits = Limits(model=offer.model, context_length=length, ranks=facts.ranks)
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
        if config.kv_events_endpoint is None or not config.role.tells_cache:
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
        asked, answer = self._form.asked(request, self._limits), self._form.answer(request)
        params = transferred(request) if self._config.role is DisaggregationMode.DECODE else None

        async def read(told: HttpAnswer) -> None:
            await stream(told, answer, reply)

        self.begin(reply, self._placed(with_transfer(asked, params)), read, is_movable=params is not None)

    def _submit_prefill(self, request: PreprocessedRequest, reply: Reply) -> None:
        """One token, and where the prompt's blocks lie: the server says that only in an answer that is no stream."""
        asked = with_transfer(self._form.asked(request, self._limits), ASKED_OF_PREFILL)
        body = {name: value for name, value in asked.body.items() if name not in ("stream", "stream_options")}
        answer = self._form.answer(request)
        assert isinstance(answer, CompletionsAnswer), "the configuration was judged"

        async def read(told: HttpAnswer) -> None:
            async for whole in chunks_of(told):
                answer.take(whole)
            piece = answer.end()
            params = {} if answer.kv_transfer_params is None else {KEY: answer.kv_transfer_params}
            reason = "length" if piece.finish_reason == "length" else "stop"
            reply.item(prefill_output(piece.token_ids, params, piece.completion_usage, finish_reason=reason))

        self.begin(reply, self._placed(Asked(asked.path, body, asked.headers)), read)

    def _placed(self, asked: Asked) -> Asked:
        """The same with its path below the server's URL."""
        return Asked(self._config.api(asked.path), asked.body, asked.headers) if self._form.is_api_path else asked


async def stream(told: HttpAnswer, answer: TokenAnswer, reply: Reply) -> None:
    """Writes what the server says; the bare tokens of a single answer the fast way."""
    async for chunk in chunks_of(told):
        for piece in answer.take(chunk):
            if piece.finish_reason is None and piece.log_probs is None and piece.index == 0:
                for token in piece.token_ids:
                    reply.token(token)
            else:
                reply.item(piece)
    reply.item(answer.end())


def transferred(request: PreprocessedRequest) -> dict[str, Any] | None:
    """What the decode server is told of the blocks; None where it computes the prompt. Raises `InvalidArgument`."""
    result = prefill_result_of(request)
    if result is None:
        return None
    params = result.disaggregated_params.get(KEY) if isinstance(result.disaggregated_params, dict) else None
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument(f"prefill_result: {KEY} is {str(params)[:80]!r}, expected a map", param="prefill_result")
    return params


def with_transfer(asked: Asked, params: dict[str, Any] | None) -> Asked:
    """The same with what the server is told of blocks elsewhere."""
    return asked if params is None else Asked(asked.path, {**asked.body, KEY: params}, asked.headers)
