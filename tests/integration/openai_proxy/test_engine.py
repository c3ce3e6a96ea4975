"""Engines: requests through a scripted server, in text and in tokens, and its failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.openai_proxy.conftest import ReceivedRequest, Server
from tests.settle import until
from tests.unit.backend.recorded_reply import RecordedReply
from tests.unit.openai_proxy.hosts import DEADLINE_S, Host
from tests.unit.openai_proxy.requests import request

from dynamo.backend.engine import EngineConfig
from dynamo.backend.worker import make_card
from dynamo.core.errors import (
    CannotConnect,
    ConfigError,
    Disconnected,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    ResponseTimeout,
    StreamIncomplete,
    Unknown,
    WorkerOverloaded,
    WorkerUnavailable,
)
from dynamo.cpu.config import DEMO_MODEL
from dynamo.openai_proxy.config import ProxyConfig, TokenApi
from dynamo.openai_proxy.engine import ProxyEngine
from dynamo.openai_proxy.facts import ModelOffer, ServerFacts, ServerKind
from dynamo.openai_proxy.text_engine import TextEngine
from dynamo.openai_proxy.token_engine import TokenEngine
from dynamo.protocols.engine import PrefillResult
from dynamo.protocols.load import WorkerLoad

CHAT: dict[str, Any] = {"model": "ours", "messages": [{"role": "user", "content": "hi"}], "stream": True}
FACTS = ServerFacts(health_path="/health")
VLLM = replace(FACTS, kind=ServerKind.VLLM, version=(0, 32, 0), has_metrics=True, total_blocks=100)
OFFER = ModelOffer(model="theirs", name="ours", context_length=100)


@asynccontextmanager
async def started(engine: ProxyEngine) -> AsyncIterator[tuple[EngineConfig, Host]]:
    host = Host()
    config = await engine.start(host)
    try:
        yield config, host
    finally:
        await engine.stop()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("openai_proxy")]


def text(server: Server, **options: Any) -> TextEngine:
    return TextEngine(ProxyConfig(url=server.url, **options), FACTS, OFFER)


def tokens(server: Server, facts: ServerFacts = VLLM, **options: Any) -> TokenEngine:
    return TokenEngine(ProxyConfig(url=server.url, model_path=DEMO_MODEL, **options), facts, OFFER)


def says(*chunks: Any) -> Any:
    async def serve(requested: ReceivedRequest) -> None:
        await requested.begin()
        await requested.send_event(*chunks)
        await requested.finish()

    return serve


def piece(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"id": "i", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}]}


def ids(*token_ids: int, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(token_ids), "finish_reason": reason}]}


async def ended(engine: ProxyEngine, given: Any, request_id: str = "r1") -> tuple[RecordedReply, BaseException | None]:
    """Send one request and wait for its end."""
    received = RecordedReply(request_id)
    engine.submit(given, received)  # type: ignore[attr-defined] - both kinds have it
    error = await received.end()
    await engine.drain()
    return received, error


async def test_chunks_are_returned_unchanged(server: Server) -> None:
    server.pages["/v1/chat/completions"] = says(piece("a"), piece("b", "stop"), {"choices": [], "usage": {}})
    engine = text(server, headers=["X-Team: a"])
    async with started(engine) as (config, _):
        received, error = await ended(engine, CHAT)
    assert (config.model_input, config.model_path, config.served_model_name) == ("Text", "", "ours")
    assert error is None
    assert [item["choices"][0]["delta"]["content"] for item in received.items] == ["a", "b"]
    (requested,) = server.sent_at_s("/v1/chat/completions")
    assert requested.body["model"] == "theirs"
    assert (requested.headers["x-request-id"], requested.headers["x-team"]) == ("r1", "a")


async def test_response_without_stream_is_one_chunk(server: Server) -> None:
    message = {"role": "assistant", "content": "all"}
    server.page("/v1/chat/completions", {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    engine = text(server)
    async with started(engine):
        received, error = await ended(engine, CHAT)
    assert error is None
    assert received.items[0]["choices"][0]["delta"] == message


async def test_embedding_vectors_are_returned_unchanged(server: Server) -> None:
    server.page("/v1/embeddings", {"data": [{"embedding": [1.0]}], "model": "theirs", "usage": {}})
    engine = TextEngine(ProxyConfig(url=server.url), FACTS, replace(OFFER, embeds=True))
    async with started(engine) as (config, _):
        received, error = await ended(engine, {"model": "ours", "input": "a"})
    assert config.model_type == "Embedding"
    assert error is None
    assert received.items == [{"data": [{"embedding": [1.0]}], "model": "ours", "usage": {}}]
    assert "stream" not in server.sent_at_s("/v1/embeddings")[0].body


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_refusal_keeps_its_status(server: Server, status: int) -> None:
    server.page("/v1/chat/completions", {"error": {"message": "no"}}, status)
    engine = text(server)
    async with started(engine):
        _, error = await ended(engine, CHAT)
    assert isinstance(error, HttpError)
    assert (error.code, error.message) == (status, "no")


async def test_busy_server_is_a_retryable_error(server: Server) -> None:
    server.page("/v1/chat/completions", b"busy", 503)
    engine = text(server)
    async with started(engine):
        _, error = await ended(engine, CHAT)
    assert isinstance(error, WorkerUnavailable)
    assert error.retry_elsewhere


async def breaks(requested: ReceivedRequest) -> None:
    await requested.begin()
    await requested.send_event(piece("a"))
    requested.writer.transport.abort()


async def stops_short(requested: ReceivedRequest) -> None:
    await requested.begin()
    await requested.send_event(piece("a"))
    await requested.finish()


async def writes_garbage(requested: ReceivedRequest) -> None:
    await requested.begin()
    await requested.send_event(b"{nonsense")
    await requested.finish()


async def refuses_late(requested: ReceivedRequest) -> None:
    await requested.begin()
    await requested.send_event(piece("a"), {"error": {"message": "out of blocks", "code": 500}})
    await requested.finish()


async def hangs(requested: ReceivedRequest) -> None:
    await requested.begin()
    await requested.send_event(piece("a"))
    await requested.left.wait()


async def never_begins(requested: ReceivedRequest) -> None:
    await requested.left.wait()


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        (breaks, Disconnected), (stops_short, StreamIncomplete), (writes_garbage, Unknown), (refuses_late, HttpError),
        (hangs, ResponseTimeout), (never_begins, ResponseTimeout),
    ],
)  # fmt: skip
async def test_each_failure_has_its_error_class(server: Server, page: Any, kind: type[Exception]) -> None:
    server.pages["/v1/chat/completions"] = page
    timeout_s = 0.2 if kind is ResponseTimeout else DEADLINE_S
    engine = text(server, stream_timeout_s=timeout_s, first_byte_timeout_s=timeout_s)
    async with started(engine):
        _, error = await ended(engine, CHAT)
    assert type(error) is kind


async def test_unreachable_server_is_named() -> None:
    engine = TextEngine(ProxyConfig(url="http://127.0.0.1:1"), FACTS, OFFER)
    async with started(engine):
        _, error = await ended(engine, CHAT)
    assert isinstance(error, CannotConnect)


@pytest.mark.parametrize("page", [hangs, never_begins])
async def test_cancelled_request_closes_the_connection_to_the_server(server: Server, page: Any) -> None:
    server.pages["/v1/chat/completions"] = page
    engine = text(server)
    async with started(engine):
        received = RecordedReply()
        engine.submit(CHAT, received)
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: server.sent_at_s("/v1/chat/completions"))
            engine.cancel(received)
            await server.sent_at_s("/v1/chat/completions")[0].left.wait()
            await engine.drain()
        assert not received.ended.done()
        engine.cancel(received)  # A second call has no effect.


async def test_concurrent_requests_are_limited(server: Server) -> None:
    server.pages["/v1/chat/completions"] = hangs
    engine = text(server, max_connections=1)
    async with started(engine):
        first = RecordedReply()
        engine.submit(CHAT, first)
        with pytest.raises(WorkerOverloaded):
            engine.submit(CHAT, RecordedReply())
        engine.cancel(first)
        async with asyncio.timeout(DEADLINE_S):
            await engine.drain()
        engine.submit(CHAT, RecordedReply())


async def test_stopped_engine_refuses_requests(server: Server) -> None:
    engine = text(server)
    with pytest.raises(EngineShutdown):
        engine.submit(CHAT, RecordedReply())
    await engine.stop()
    async with started(engine):
        with pytest.raises(InvalidArgument):
            engine.submit({"model": "ours"}, RecordedReply())
    await engine.stop()
    with pytest.raises(EngineShutdown):
        engine.submit(CHAT, RecordedReply())


async def test_token_engine_sends_and_receives_token_ids(server: Server) -> None:
    server.pages["/v1/completions"] = says(ids(5), ids(6, 7), ids(8, reason="length"), {"choices": [], "usage": {}})
    engine = tokens(server)
    async with started(engine) as (config, _):
        received, error = await ended(engine, request(max_tokens=4))
    assert (config.model_path, config.context_length, config.total_kv_blocks) == (DEMO_MODEL, 100, 100)
    assert not config.publishes_kv_events
    assert error is None
    assert received.tokens == [5, 6, 7, 8]
    assert received.items[-1].finish_reason == "length"
    assert received.items[-1].completion_usage.completion_tokens == 4
    assert server.sent_at_s("/v1/completions")[0].body["prompt"] == [1, 2, 3]


async def test_interrupted_token_stream_is_migratable(server: Server) -> None:
    async def page(requested: ReceivedRequest) -> None:
        await requested.begin()
        await requested.send_event(ids(5))
        requested.writer.transport.abort()

    server.pages["/v1/completions"] = page
    engine = tokens(server)
    async with started(engine):
        received, error = await ended(engine, request())
    assert received.tokens == [5]
    assert isinstance(error, Disconnected)


@pytest.mark.parametrize(
    ("api", "path", "chunks"),
    [
        (TokenApi.SGLANG, "/generate", [{
            "output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}},
        }]),
        (TokenApi.LLAMA_CPP, "/completion", [{"tokens": [5]}, {"tokens": [6], "stop": True, "stop_type": "limit"}]),
    ],
)  # fmt: skip
async def test_token_engine_requests_the_path_of_each_server_kind(
    server: Server, api: TokenApi, path: str, chunks: Any
) -> None:
    server.pages[path] = says(*chunks)
    engine = tokens(server, token_api=api.value)
    async with started(engine):
        received, error = await ended(engine, request())
    assert error is None
    assert received.tokens == [5, 6]


async def test_prefill_response_contains_the_kv_transfer_params(server: Server) -> None:
    whole = {**ids(5, reason="length"), "kv_transfer_params": {"remote_host": "h"}, "usage": {"completion_tokens": 1}}
    server.page("/v1/completions", whole)
    engine = tokens(server, disaggregation_mode="prefill")
    async with started(engine):
        received, error = await ended(engine, request(max_tokens=50, n=2))
    assert error is None
    (item,) = received.items
    assert item.disaggregated_params == {"kv_transfer_params": {"remote_host": "h"}}
    assert (item.token_ids, item.finish_reason) == ([5], "length")
    body = server.sent_at_s("/v1/completions")[0].body
    assert (body["max_tokens"], body["n"], body["kv_transfer_params"]["do_remote_decode"]) == (1, 1, True)
    assert "stream" not in body


async def test_decode_request_carries_the_kv_transfer_params(server: Server) -> None:
    server.pages["/v1/completions"] = says(ids(6, reason="length"))
    engine = tokens(server, disaggregation_mode="decode")
    async with started(engine):
        given = request(prefill_result=PrefillResult({"kv_transfer_params": {"remote_host": "h"}}))
        received, error = await ended(engine, given)
        with pytest.raises(InvalidArgument, match="prefill_result"):
            engine.submit(request(), RecordedReply())
        alone, _ = await ended(engine, request(annotations=["x-bypass-remote-prefill"]))
    assert error is None
    assert received.tokens == alone.tokens == [6]
    first, second = server.sent_at_s("/v1/completions")
    assert first.body["kv_transfer_params"] == {"remote_host": "h"}
    assert "kv_transfer_params" not in second.body


async def test_failed_kv_transfer_is_a_retryable_error(server: Server) -> None:
    server.page("/v1/completions", {"error": {"message": "no blocks"}}, 500)
    engine = tokens(server, disaggregation_mode="decode")
    async with started(engine):
        given = request(prefill_result=PrefillResult({"kv_transfer_params": {"remote_host": "h"}}))
        _, error = await ended(engine, given)
    assert isinstance(error, WorkerUnavailable)


async def test_load_is_read_from_the_server_or_counted_from_requests(server: Server) -> None:
    page = b"""vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
    server.page("/metrics", page)
    engine = tokens(server, load_interval_s=1000.0)
    async with started(engine) as (_, host):
        await engine.publish_loads()
        await engine.publish_loads()
        expected = WorkerLoad(
            kv_total_blocks=100, running_requests=3, waiting_requests=1, kv_used_blocks=25, active_decode_blocks=25
        )
        assert host.loads == [expected]
        server.page("/metrics", b"", 500)
        await engine.publish_loads()
        assert host.loads[-1] == WorkerLoad(kv_total_blocks=100)


async def test_worker_deregisters_with_its_server_and_registers_again(server: Server) -> None:
    engine = text(server, health_interval_s=0.01)
    async with started(engine) as (_, host):
        server.page("/health", b"", 503)
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: host.service == ["left"])
            server.page("/health", b"")
            await until(lambda: host.service == ["left", "back"])


async def test_text_worker_has_a_model_card_without_files(server: Server) -> None:
    engine = text(server)
    async with started(engine) as (config, _):
        card = make_card(ProxyConfig(url=server.url), config)
    assert (card.display_name, card.model_input, card.model_type) == ("ours", "Text", "Chat | Completions")
    assert (card.model_info, card.worker_type) == (None, "aggregated")
    assert not card.runtime_config.kv_event_publishing_enabled


async def test_engine_closes_the_connection_of_a_cancelled_prefill(server: Server) -> None:
    server.pages["/v1/completions"] = never_begins
    engine = tokens(server, disaggregation_mode="prefill")
    async with started(engine):
        received = RecordedReply()
        engine.submit(request(), received)
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: server.sent_at_s("/v1/completions"))
            engine.cancel(received)
            await server.sent_at_s("/v1/completions")[0].left.wait()
            await engine.drain()
        assert received.items == []


async def test_kv_events_require_the_cache_size(server: Server) -> None:
    options: dict[str, Any] = {"kv_events_endpoint": "tcp://127.0.0.1:1"}
    engine = tokens(server, replace(VLLM, total_blocks=None), **options)
    with pytest.raises(ConfigError, match="--total-kv-blocks"):
        await engine.start(Host())
    await engine.stop()
    engine = tokens(server, **options)
    async with started(engine) as (config, _):
        assert config.publishes_kv_events


async def test_only_vllm_servers_support_disaggregation(server: Server) -> None:
    engine = tokens(server, token_api="sglang", disaggregation_mode="prefill")
    with pytest.raises(ConfigError, match="vLLM"):
        await engine.start(Host())
    await engine.stop()
