"""Embedding engine: requests become vectors, or refusals that name the field."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument, WorkerOverloaded
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.embedding_engine import EmbeddingEngine, EmbeddingLimits, to_job
from dynamo.protocols.embeddings import EmbeddingWork
from dynamo.serving.embeddings import from_base64

LIMITS = EmbeddingLimits(vocab_size=96, context_length=10, width=32)


class Host:
    """A worker that only records whether the engine failed."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = error


def work(*texts: list[int], **more: Any) -> EmbeddingWork:
    return EmbeddingWork(token_ids=list(texts), model="m", **more)


@asynccontextmanager
async def running(path: str, host: Host | None = None, **options: Any) -> AsyncIterator[tuple[EmbeddingEngine, Any]]:
    engine = EmbeddingEngine(CpuConfig(model_path=path, embedding_worker=True, **options))
    try:
        yield engine, await engine.start(host or Host())  # type: ignore[arg-type]
    finally:
        await engine.stop()


async def test_embedding_engine_returns_vectors_in_order(
    write_model: Callable[..., str], receiver_type: type[Any]
) -> None:
    async with running(write_model(), max_num_batched_tokens=32) as (engine, config):
        assert (config.model_type, config.request_type) == ("Embedding", EmbeddingWork)
        replies = [receiver_type(str(number)) for number in range(3)]
        engine.submit(work([1, 2, 3], [4] * 50), replies[0])
        engine.submit(work([4] * 50, dimensions=8), replies[1])
        engine.submit(msgspec.convert(config.health_check_payload, EmbeddingWork), replies[2])
        async with asyncio.timeout(30):
            await engine.drain()
        assert all(reply.is_finished for reply in replies)
        (first,), (second,) = replies[0].messages, replies[1].messages
        assert (first.prompt_tokens, first.total_tokens, len(first.embeddings)) == (53, 53, 2)
        assert [len(from_base64(one)) for one in (*first.embeddings, *second.embeddings)] == [32, 32, 8]


async def test_embedding_engine_sends_nothing_to_a_cancelled_request(
    write_model: Callable[..., str], receiver_type: type[Any]
) -> None:
    async with running(write_model()) as (engine, _):
        left, stays = receiver_type(), receiver_type()
        engine.submit(work(*[[1] * 100] * 20), left)
        engine.submit(work([1]), stays)
        engine.cancel(left)
        engine.cancel(left)
        async with asyncio.timeout(30):
            await engine.drain()
        assert (left.messages, left.is_finished, left.error) == ([], False, None)
        assert stays.is_finished


async def test_embedding_engine_refuses_requests_beyond_its_queue(
    write_model: Callable[..., str], receiver_type: type[Any]
) -> None:
    async with running(write_model(), max_num_seqs=1, max_waiting_requests=0) as (engine, _):
        engine.submit(work([1] * 200), receiver_type())
        with pytest.raises(WorkerOverloaded):
            engine.submit(work([1]), receiver_type())


async def test_embedding_engine_fails_running_requests_at_stop_as_retryable(
    write_model: Callable[..., str], receiver_type: type[Any]
) -> None:
    reply = receiver_type()
    async with running(write_model()) as (engine, _):
        engine.submit(work(*[[1] * 200] * 200), reply)
    assert isinstance(reply.error, EngineShutdown)
    with pytest.raises(EngineShutdown):
        engine.submit(work([1]), receiver_type())


async def test_embedding_engine_model_failure_ends_the_worker(
    write_model: Callable[..., str], receiver_type: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, reply, failed = Host(), receiver_type(), asyncio.Event()
    async with running(write_model(), host) as (engine, _):
        monkeypatch.setattr(engine._embedder, "step", lambda: 1 / 0)
        monkeypatch.setattr(reply, "fail", lambda _error: failed.set())
        engine.submit(work([1]), reply)
        async with asyncio.timeout(30):
            await failed.wait()
        assert isinstance(host.failure, ZeroDivisionError)


async def test_embedding_engine_refuses_a_context_beyond_the_model(write_model: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        async with running(write_model(), max_model_len=100_000):
            pass


@pytest.mark.parametrize(
    ("requested", "param"),
    [
        (work([1], dimensions=0), "dimensions"),
        (work([1], dimensions=33), "dimensions"),
        (work([1] * 11), "input"),
        (work([1], []), "input"),
        (work([96]), "input"),
        (work([-1]), "input"),
        (work(), "input"),
        (work([1], truncate_prompt_tokens=11), "truncate_prompt_tokens"),
    ],
)
def test_embedding_engine_refuses_unsupported_options_by_name(requested: EmbeddingWork, param: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        to_job(requested, LIMITS)
    assert refusal.value.param == param


@pytest.mark.parametrize(("cut", "left"), [(3, 3), (-1, 10), (10, 10)])
def test_embedding_engine_truncates_long_texts_on_request(cut: int, left: int) -> None:
    (text,) = to_job(work(list(range(40)), truncate_prompt_tokens=cut), LIMITS).texts
    assert list(text) == list(range(left))
