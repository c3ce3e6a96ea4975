"""A new indexer loads its state from the first peer that answers."""

import asyncio

import pytest
from tests.integration.routing.services.test_indexed_models import PLACE, PROMPT, full

from dynamo.core.codec import json_encode
from dynamo.core.errors import CannotConnect, HttpError
from dynamo.routing.services import indexer_peers
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.routing.services.indexer_peers import Peers, fetch


async def test_indexer_recovery_uses_the_first_responding_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    source = IndexedModels()
    full(source)
    requested = []

    async def answer(url: str) -> bytes:
        requested.append(url)
        if url == "http://dead":
            raise CannotConnect("connection refused")
        return b"x" if url == "http://mad" else json_encode(source.dump())

    monkeypatch.setattr(indexer_peers, "fetch", answer)
    fresh = IndexedModels()
    await Peers(["http://dead", "http://mad", "http://good", "http://spare"]).recover(fresh)
    assert requested == ["http://dead", "http://mad", "http://good"]
    assert fresh.find(PLACE, PROMPT) == source.find(PLACE, PROMPT)
    await source.close()
    await fresh.close()


async def test_indexer_recovery_works_without_peers() -> None:
    fresh = IndexedModels()
    await Peers().recover(fresh)
    assert fresh.models == {}
    await fresh.close()


def test_peers_refuse_an_invalid_url_and_too_many_peers() -> None:
    with pytest.raises(HttpError, match="invalid peer URL"):
        Peers(["file:///etc/passwd"])
    peers = Peers([f"http://h{number}" for number in range(256)])
    with pytest.raises(HttpError, match="maximum of 256"):
        peers.add("http://one-more")


async def test_fetch_reports_a_peer_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:1"):
        await fetch("http://127.0.0.1:1")
