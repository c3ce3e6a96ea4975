"""Listeners that `floods` attacks: HTTP, HTTP over TLS, and KServe over gRPC, each with its frontend, its attacks and its stream."""

import contextlib
import functools
import http.client
import json
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import trustme

from benchmarks.floods import kserve, records
from benchmarks.floods.attacks import AnyAttack, large_requests
from benchmarks.floods.bombs import bombs
from benchmarks.floods.connections import connection_attacks
from benchmarks.floods.endpoints import endpoint_attacks
from benchmarks.floods.readers import reader_attacks
from benchmarks.floods.records import StreamClient
from benchmarks.floods.tls import tls_attacks
from benchmarks.ports import free_port
from benchmarks.stacks import HOST, Stack


@dataclass(frozen=True, slots=True)
class Surface:
    """A frontend with one kind of listener."""

    name = "http"

    folder: str
    """Folder for its files; deleted at the end."""

    def flags(self) -> list[str]:
        """Return the flags of the frontend."""
        return ["--enable-anthropic-api", "--batch-dir", os.path.join(self.folder, "batches")]

    def stack(self, *values: Any) -> Stack:
        """Return the processes, not yet started."""
        return Stack(*values)

    def attacks(self) -> "Iterator[AnyAttack]":
        """Yield the attacks; those that read what others have left behind come last."""
        yield from large_requests()
        yield from bombs()
        yield from connection_attacks()
        yield from reader_attacks()
        yield from endpoint_attacks()

    def stream(self, port: int, request: bytes, path: str) -> StreamClient:
        """Return the client of the stream whose tokens are timed."""
        return StreamClient(records.__name__, [path, str(port)], request)


@dataclass(frozen=True, slots=True)
class TlsSurface(Surface):
    """HTTP over TLS with a certificate of its own."""

    name = "tls"

    authority: trustme.CA = field(default_factory=trustme.CA)

    def flags(self) -> list[str]:
        """Write the certificate, and return the flags that name it."""
        own = self.authority.issue_cert("localhost", HOST)
        pair = os.path.join(self.folder, "certificate.pem"), os.path.join(self.folder, "key.pem")
        own.cert_chain_pems[0].write_to_path(pair[0])
        own.private_key_pem.write_to_path(pair[1])
        self.authority.cert_pem.write_to_path(self._trusted())
        return ["--tls-cert-path", pair[0], "--tls-key-path", pair[1]]

    def stack(self, *values: Any) -> Stack:
        return _TlsStack(*values, authority=self._trusted())

    def attacks(self) -> "Iterator[AnyAttack]":
        yield from tls_attacks()

    def stream(self, port: int, request: bytes, path: str) -> StreamClient:
        return StreamClient(records.__name__, [path, str(port), self._trusted()], request)

    def _trusted(self) -> str:
        return os.path.join(self.folder, "authority.pem")


@dataclass(frozen=True, slots=True)
class KserveSurface(Surface):
    """KServe over gRPC; its HTTP routes are on another port."""

    name = "kserve"

    def flags(self) -> list[str]:
        return ["--kserve-grpc-server", "--grpc-metrics-port", str(_http_port(self.folder))]

    def stack(self, *values: Any) -> Stack:
        return _KserveStack(*values, http_port=_http_port(self.folder))

    def attacks(self) -> "Iterator[AnyAttack]":
        yield from kserve.kserve_attacks()

    def stream(self, port: int, request: bytes, path: str) -> StreamClient:
        return StreamClient(kserve.__name__, [path, str(port)], request)


@functools.cache
def _http_port(folder: str) -> int:
    """Return the port of the HTTP routes of the frontend with that folder."""
    return free_port()


SURFACES: Sequence[type[Surface]] = (Surface, TlsSurface, KserveSurface)


@dataclass(slots=True)
class _TlsStack(Stack):
    authority: str = ""

    def send_request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Send one request over TLS and return its status and JSON response."""
        context = ssl.create_default_context(cafile=self.authority)
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=timeout_s, context=context)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())


@dataclass(slots=True)
class _KserveStack(Stack):
    http_port: int = 0

    def send_request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Send a request to the HTTP port, or a chat as a text request over gRPC."""
        if body is not None:
            return kserve.infer(self.port, kserve.text_request(b"hello"))
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
