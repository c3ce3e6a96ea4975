"""Client of one member of an etcd cluster."""

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from dynamo.runtime.transports.etcd import protocol
from dynamo.runtime.transports.etcd.http import HttpConnection
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions
from dynamo.runtime.transports.etcd.protocol import (
    UNAUTHENTICATED,
    Compacted,
    EtcdRefused,
    EtcdUnavailable,
    LeaseState,
    Page,
    Token,
    WatchMessage,
)


@dataclass(frozen=True, slots=True)
class Listing:
    """All records with a prefix at one revision."""

    records: dict[bytes, bytes]
    revision: int


class EtcdMember:
    """Member with two connections, so that lease renewals do not wait for other requests, and one for each watch.

    Every method raises `EtcdUnavailable` without a response in time, and `EtcdRefused` for a rejected request.
    """

    def __init__(self, address: Address, options: EtcdOptions, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        self.address = address
        self._options = options
        self._tls = tls
        self._timeout_s = timeout_s
        self._headers: dict[str, str] = {}
        self._work: HttpConnection | None = None
        self._renewals: HttpConnection | None = None
        self._watches: set[HttpConnection] = set()

    async def connect(self) -> None:
        """Open the connections, and authenticate if required."""
        self._work = await HttpConnection.open(self.address, self._tls, self._timeout_s)
        self._renewals = await HttpConnection.open(self.address, self._tls, self._timeout_s)
        await self._authenticate()

    def close(self) -> None:
        """Close every connection."""
        for connection in (self._work, self._renewals, *self._watches):
            if connection is not None:
                connection.close()
        self._watches.clear()

    async def probe(self, prefix: bytes) -> None:
        """Read at most one record, which proves that the member has a quorum and grants read access."""
        await self._request("/v3/kv/range", protocol.probe_request(prefix))

    async def put(self, key: bytes, value: bytes, lease_id: int) -> None:
        """Write a record attached to the lease. `EtcdRefused` with NOT_FOUND: the lease expired."""
        await self._request("/v3/kv/put", {"key": key, "value": value, "lease": lease_id})

    async def delete(self, key: bytes) -> None:
        """Remove a record, if it exists."""
        await self._request("/v3/kv/deleterange", {"key": key})

    async def list(self, prefix: bytes) -> Listing:
        """Return all records with that prefix, read page by page at one revision."""
        page = protocol.decode(Page, await self._request("/v3/kv/range", protocol.list_request(prefix)))
        revision = page.header.revision
        records = {record.key: record.value for record in page.kvs}
        while page.more and page.kvs:
            request = protocol.list_request(prefix, page.kvs[-1].key, revision)
            page = protocol.decode(Page, await self._request("/v3/kv/range", request))
            records.update((record.key, record.value) for record in page.kvs)
        return Listing(records, revision)

    async def grant(self, lease_id: int, ttl_s: int) -> int:
        """Grant a lease with that id; return its TTL in seconds. `EtcdRefused` with FAILED_PRECONDITION: it exists."""
        return protocol.decode(LeaseState, await self._request("/v3/lease/grant", {"ID": lease_id, "TTL": ttl_s})).ttl

    async def renew(self, lease_id: int) -> int:
        """Renew the lease and return its TTL in seconds; 0 when it has expired."""
        body = await self._request("/v3/lease/keepalive", {"ID": lease_id}, is_renewal=True)
        return protocol.decode_line(LeaseState, body).ttl

    async def revoke(self, lease_id: int) -> None:
        """Revoke the lease and remove its records."""
        await self._request("/v3/lease/revoke", {"ID": lease_id})

    async def held_by(self, lease_id: int) -> set[bytes]:
        """Return the keys of the records attached to the lease."""
        body = await self._request("/v3/lease/timetolive", {"ID": lease_id, "keys": True})
        return set(protocol.decode(LeaseState, body).keys)

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncIterator[WatchMessage]:
        """Yield the changes from that revision on, until the connection ends. Raise `Compacted`."""
        connection = await HttpConnection.open(self.address, self._tls, self._timeout_s)
        self._watches.add(connection)
        try:
            body = protocol.encode(protocol.watch_request(prefix, start_revision))
            async for line in connection.stream("/v3/watch", body, self._headers):
                message = protocol.decode_line(WatchMessage, line)
                if message.compact_revision or (message.created and message.header.revision < start_revision - 1):
                    raise Compacted
                if message.canceled:
                    raise EtcdUnavailable(f"watch cancelled: {message.cancel_reason or 'no reason given'}")
                yield message
            raise EtcdUnavailable("watch ended")
        finally:
            self._watches.discard(connection)
            connection.close()

    async def _authenticate(self) -> None:
        self._headers = {}
        if self._options.username:
            who = {"name": self._options.username, "password": self._options.password}
            token = protocol.decode(Token, await self._post("/v3/auth/authenticate", who)).token
            self._headers = {"Authorization": token}

    async def _request(self, path: str, message: dict[str, Any], *, is_renewal: bool = False) -> bytes:
        try:
            return await self._post(path, message, is_renewal=is_renewal)
        except EtcdRefused as error:
            if error.code != UNAUTHENTICATED or not self._options.username:
                raise
        await self._authenticate()  # The token expired.
        return await self._post(path, message, is_renewal=is_renewal)

    async def _post(self, path: str, message: dict[str, Any], *, is_renewal: bool = False) -> bytes:
        connection = self._renewals if is_renewal else self._work
        assert connection is not None, "request before connect()"
        return await connection.post(path, protocol.encode(message), self._headers, self._timeout_s)
