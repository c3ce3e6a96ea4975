"""One member: the requests it receives, over which connection, and the handling of its responses."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dynamo.runtime.transports.etcd import client as module
from dynamo.runtime.transports.etcd.client import EtcdMember, Listing
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions
from dynamo.runtime.transports.etcd.protocol import (
    UNAUTHENTICATED,
    Compacted,
    EtcdRefused,
    EtcdUnavailable,
)

ADDRESS = Address("member", 2379, is_tls=False)
HEADER = {"revision": "9"}


class Wires:
    """Replaces `HttpConnection`: the requests on each connection, and the prepared responses."""

    def __init__(self) -> None:
        self.received_requests: list[tuple[int, str, Any, Mapping[str, str]]] = []
        self.answers: dict[str, list[Any]] = {}
        self.lines: list[Any] = []
        self.opened = 0
        self.closed: list[int] = []

    async def open(self, address: Address, tls: object, timeout_s: float) -> "Wire":
        self.opened += 1
        return Wire(self, self.opened)


class Wire:
    def __init__(self, wires: Wires, number: int) -> None:
        self._wires = wires
        self._number = number

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        self._wires.received_requests.append((self._number, path, json.loads(body), dict(headers)))
        answer = self._wires.answers.get(path, [{}]).pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        self._wires.received_requests.append((self._number, path, json.loads(body), dict(headers)))
        for line in self._wires.lines:
            yield json.dumps({"result": line}).encode()

    def close(self) -> None:
        self._wires.closed.append(self._number)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    made = Wires()
    monkeypatch.setattr(module, "HttpConnection", made)
    return made


async def member(wires: Wires, **settings: Any) -> EtcdMember:
    made = EtcdMember(ADDRESS, EtcdOptions(**settings), None, 1.0)
    await made.connect()
    return made


async def test_etcd_client_renews_a_lease_on_its_own_connection(wires: Wires) -> None:
    one = await member(wires)
    wires.answers["/v3/lease/keepalive"] = [{"result": {"ID": "5", "TTL": "10"}}, {"result": {"ID": "5"}}]
    await one.put(b"k", b"v", 5)
    assert [await one.renew(5), await one.renew(5)] == [10, 0]
    await one.delete(b"k")
    assert [(number, path) for number, path, _, _ in wires.received_requests] == [
        (1, "/v3/kv/put"),
        (2, "/v3/lease/keepalive"),
        (2, "/v3/lease/keepalive"),
        (1, "/v3/kv/deleterange"),
    ]
    assert wires.received_requests[0][2] == {"key": "aw==", "value": "dg==", "lease": 5}


async def test_etcd_client_reads_a_long_listing_in_pages_of_one_revision(wires: Wires) -> None:
    one = await member(wires)
    wires.answers["/v3/kv/range"] = [
        {"header": HEADER, "kvs": [{"key": "YQ==", "value": "MQ=="}], "more": True},
        {"header": {"revision": "12"}, "kvs": [{"key": "Yg==", "value": "Mg=="}]},
    ]
    assert await one.list(b"a/") == Listing({b"a": b"1", b"b": b"2"}, 9)
    assert (wires.received_requests[1][2]["key"], wires.received_requests[1][2]["revision"]) == ("YQA=", 9)


async def test_etcd_client_replaces_an_expired_token_and_repeats_the_request(wires: Wires) -> None:
    wires.answers["/v3/auth/authenticate"] = [{"token": "first"}, {"token": "second"}]
    wires.answers["/v3/lease/grant"] = [EtcdRefused(UNAUTHENTICATED, "invalid auth token"), {"ID": "5", "TTL": "10"}]
    one = await member(wires, username="u", password="p")
    assert await one.grant(5, 10) == 10
    tokens = [
        headers.get("Authorization") for _, path, _, headers in wires.received_requests if path == "/v3/lease/grant"
    ]
    assert tokens == ["first", "second"]
    assert wires.received_requests[0][2] == {"name": "u", "password": "p"}


async def test_etcd_client_without_user_has_no_token(wires: Wires) -> None:
    one = await member(wires)
    wires.answers["/v3/lease/revoke"] = [EtcdRefused(UNAUTHENTICATED, "invalid auth token")]
    with pytest.raises(EtcdRefused):
        await one.revoke(5)


async def test_etcd_client_watch_uses_its_own_connection(wires: Wires) -> None:
    one = await member(wires)
    wires.lines = [
        {"header": HEADER, "created": True},
        {"header": HEADER, "events": [{"kv": {"key": "YQ==", "mod_revision": "7"}}]},
    ]
    watch = one.watch(b"v1/", 5)
    assert [len((await anext(watch)).events) for _ in range(2)] == [0, 1]
    assert (wires.opened, wires.closed) == (3, [])
    with pytest.raises(EtcdUnavailable, match="watch ended"):
        await anext(watch)
    assert (wires.opened, wires.closed) == (3, [3])
    create = wires.received_requests[0][2]["create_request"]
    assert (create["key"], create["range_end"], create["start_revision"]) == ("djEv", "djEw", 5)


@pytest.mark.parametrize(
    "line",
    [
        {"header": HEADER, "created": True, "canceled": True, "compact_revision": "7"},
        {"header": {"revision": "3"}, "created": True},
    ],
)
async def test_etcd_client_cannot_resume_from_a_compacted_or_future_revision(wires: Wires, line: Any) -> None:
    one = await member(wires)
    wires.lines = [line]
    with pytest.raises(Compacted):
        await anext(one.watch(b"v1/", 5))


async def test_etcd_client_reports_why_a_watch_was_cancelled(wires: Wires) -> None:
    one = await member(wires)
    wires.lines = [{"header": HEADER, "canceled": True, "cancel_reason": "etcdserver: permission denied"}]
    with pytest.raises(EtcdUnavailable, match="permission denied"):
        await anext(one.watch(b"v1/", 5))


async def test_etcd_client_close_ends_every_connection(wires: Wires) -> None:
    one = await member(wires)
    wires.lines = [{"header": HEADER, "created": True}]
    watch = one.watch(b"v1/", 5)
    await anext(watch)
    one.close()
    assert sorted(wires.closed) == [1, 2, 3]
    await watch.aclose()  # type: ignore[attr-defined]
