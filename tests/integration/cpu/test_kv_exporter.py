"""Concurrent prefill and decode: blocks are transferred as they become complete, and the tokens equal those of one
engine.
"""

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.integration.cpu.test_disagg import (
    KINDS,
    Reply,
    Side,
    begin,
    decode_request,
    model,
    prefill_request,
    send_request,
)

from dynamo.cpu.disagg import meeting_of
from dynamo.kvbm.transfer import sessions
from dynamo.protocols.engine import BootstrapInfo, PreprocessedRequest

__all__ = ["begin", "model"]  # Fixtures.
Begin = Callable[..., Any]
LONG = [(11 * place) % 89 for place in range(150)]
SMALL_STEPS = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
TRANSPORTS = ("shm", "tcp")


async def pair(begin: Begin, **options: Any) -> tuple[Side, Side, tuple[str, int]]:
    prefill = await begin("prefill", bootstrap_port=0, **(SMALL_STEPS | options))
    found = prefill.engine._parts.exporter.server
    return prefill, await begin("decode", **options), (found.host, found.port)


def meet(request: PreprocessedRequest, where: tuple[str, int]) -> PreprocessedRequest:
    """Return the requests as a frontend sends them to both workers."""
    return msgspec.structs.replace(
        request, bootstrap_info=BootstrapInfo(*where, random.getrandbits(63), random.randbytes(16))
    )


async def at_once(prefill: Side, decode: Side, request: PreprocessedRequest) -> Reply:
    _, answer = await asyncio.gather(prefill.answer(prefill_request(request)), decode.answer(request))
    return answer


def outcomes(decode: Side, outcome: str) -> float:
    return decode.host.number("dynamo_component_kv_fetches_total", outcome=outcome)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_disaggregated_tokens_equal_those_of_one_engine(begin: Begin, kind: str, transport: str) -> None:
    alone = await begin()
    prefill, decode, where = await pair(begin, kv_transfer=[transport])
    request = send_request(**({"prompt": LONG} | KINDS[kind]))
    want = await alone.answer(request)
    got = await at_once(prefill, decode, meet(request, where))
    for index in range(request.sampling_options.n or 1):
        assert got.tokens_of(index) == want.tokens_of(index)
    await decode.until(lambda: outcomes(decode, "ok") + outcomes(decode, "aborted") == 1, "nothing was fetched")
    await prefill.is_clean()
    await decode.is_clean()


async def test_blocks_are_transferred_while_the_prompt_is_computed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, where = await pair(begin)
    words: list[sessions.TransferPart | sessions.TransferEnd] = []
    attend = sessions.attend

    def listen(*given: Any) -> Any:
        for word in attend(*given):
            words.append(word)
            yield word

    monkeypatch.setattr("dynamo.cpu.kv_fetcher.attend", listen)
    await at_once(prefill, decode, meet(send_request(LONG), where))
    parts = [word for word in words if isinstance(word, sessions.TransferPart)]
    assert [part.first for part in parts] == list(range(0, 36, 4))
    assert isinstance(words[-1], sessions.TransferEnd)
    assert len(words[-1].params["kv"]["blocks"]) == 2


async def test_concurrent_requests_have_equal_output(begin: Begin) -> None:
    alone = await begin()
    prefill, decode, where = await pair(begin)
    requests = [send_request([(place * (at + 3)) % 90 for place in range(30 + 7 * at)]) for at in range(12)]
    want = [(await alone.answer(request)).tokens for request in requests]
    got = await asyncio.gather(*(at_once(prefill, decode, meet(request, where)) for request in requests))
    assert [one.tokens for one in got] == want
    await decode.until(lambda: outcomes(decode, "ok") == 12, "they were not fetched")
    await prefill.is_clean()
    await decode.is_clean()


async def test_prefill_and_decode_requests_may_arrive_in_any_order(begin: Begin) -> None:
    alone = await begin()
    want = (await alone.answer(send_request())).tokens
    prefill, decode, where = await pair(begin)
    request = meet(send_request(), where)
    await prefill.answer(prefill_request(request))
    assert (await decode.answer(request)).tokens == want
    request, reply = meet(send_request(LONG), where), Reply()
    decode.engine.submit(request, reply)
    await decode.until(lambda: bool(prefill.engine._parts.exporter.server._sessions), "no session was opened")  # type: ignore[union-attr]
    await prefill.answer(prefill_request(request))
    await reply.end()
    await decode.until(lambda: outcomes(decode, "ok") == 2, "they were not fetched")
    await prefill.is_clean()
    await decode.is_clean()


async def test_interrupted_prefill_is_computed_by_the_decode_worker(begin: Begin) -> None:
    alone = await begin()
    want = (await alone.answer(send_request(LONG))).tokens
    prefill, decode, where = await pair(begin)
    request, lost, reply = meet(send_request(LONG), where), Reply(), Reply()
    prefill.engine.submit(prefill_request(request), lost)
    prefill.engine.cancel(lost)
    decode.engine.submit(request, reply)
    await reply.end()
    assert reply.tokens == want
    await decode.until(lambda: outcomes(decode, "failed") == 1, "it was fetched")
    await prefill.is_clean()
    await decode.is_clean()


async def test_prefill_worker_that_exits_during_transfer_only_delays_the_response(begin: Begin) -> None:
    alone = await begin()
    want = (await alone.answer(send_request(LONG))).tokens
    prefill, decode, where = await pair(begin)
    reply = Reply()
    decode.engine.submit(meet(send_request(LONG), where), reply)
    await decode.until(lambda: bool(prefill.engine._parts.exporter.server._sessions), "no session was opened")  # type: ignore[union-attr]
    await prefill.engine.stop()
    await reply.end()
    assert reply.tokens == want
    await decode.is_clean()


@pytest.mark.parametrize("is_silent", [True, False])
async def test_unresponsive_prefill_worker_is_replaced_by_local_prefill(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    alone, decode = await begin(), await begin("decode")
    monkeypatch.setattr(sessions, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        if not is_silent:
            listener.close()
        got = await decode.answer(meet(send_request(), where))
    assert got.tokens == (await alone.answer(send_request())).tokens
    outcome = "timeout" if is_silent else "unreachable"
    await decode.until(lambda: outcomes(decode, outcome) == 1, "it was fetched")
    await decode.is_clean()


async def test_decode_worker_does_not_wait_for_a_missing_prompt(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ARRIVAL_S", 0.1)
    monkeypatch.setattr(sessions, "BEAT_S", 0.05)
    prefill, decode, where = await pair(begin)
    alone = await begin()
    assert (await decode.answer(meet(send_request(), where))).tokens == (await alone.answer(send_request())).tokens
    await prefill.is_clean()


async def test_exported_blocks_of_cancelled_requests_are_freed(begin: Begin) -> None:
    prefill, decode, where = await pair(begin, kv_hold_timeout=1000.0)
    request, reply = meet(send_request(LONG), where), Reply()
    decode.engine.submit(request, reply)
    decode.engine.cancel(reply)
    await decode.is_clean()
    await prefill.until(
        lambda: not any(one.visitors for one in prefill.engine._parts.exporter.server._sessions.values()), "stays"
    )  # type: ignore[union-attr]
    meeting = meeting_of(request.bootstrap_info)  # type: ignore[arg-type]
    found = prefill.engine._parts.exporter.server._sessions.get((meeting.room, meeting.key))  # type: ignore[union-attr]
    assert found is None or found.is_left
    if found is not None:
        await prefill.answer(prefill_request(request))
        await prefill.is_clean()


async def test_prompt_without_a_transfer_session_is_transferred_at_once(begin: Begin) -> None:
    alone = await begin()
    prefill, decode, _ = await pair(begin)
    first = await prefill.answer(prefill_request(send_request(LONG)))
    (output,) = first.outputs
    assert output.disaggregated_params is not None
    got = await decode.answer(decode_request(send_request(LONG), output.disaggregated_params))
    assert got.tokens == (await alone.answer(send_request(LONG))).tokens


async def test_cache_too_small_for_chunks_falls_back_to_local_prefill(begin: Begin) -> None:
    alone = await begin()
    prefill, decode, where = await pair(begin)
    prefill.engine._parts.exporter._source._leases._blocks_max = 6  # type: ignore[union-attr]
    got = await at_once(prefill, decode, meet(send_request(LONG), where))
    assert got.tokens == (await alone.answer(send_request(LONG))).tokens
    await prefill.is_clean()
