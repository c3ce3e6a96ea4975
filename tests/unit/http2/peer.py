"""A client's side of a connection in memory, made with the library `h2`."""

from collections.abc import Sequence
from typing import Any

import h2.config
import h2.connection
import h2.events

from dynamo.http2.connection import Http2Connection
from dynamo.http2.header_blocks import RequestHeaders
from dynamo.http2.stream import Http2Stream

HEADERS = [
    (":method", "POST"),
    (":path", "/s/M"),
    (":scheme", "http"),
    (":authority", "s"),
    ("content-type", "application/grpc"),
]


class Recorder:
    """User of a stream that records its events."""

    def __init__(self, stream: Http2Stream, *, consumes: bool = True) -> None:
        self.stream = stream
        self.data = b""
        self.has_ended = self.was_reset = False
        self.drains = 0
        self._consumes = consumes

    def data_received(self, data: bytes, ends: bool) -> None:
        self.data += data
        self.has_ended = self.has_ended or ends
        if self._consumes:
            self.stream.consumed(len(data))

    def reset_received(self) -> None:
        self.was_reset = True

    def drained(self) -> None:
        self.drains += 1


class Pair:
    """A connection of ours and a client of h2; `exchange` passes their bytes."""

    def __init__(self, *, consumes: bool = True) -> None:
        self.users: dict[int, Recorder] = {}
        self.headers: dict[int, RequestHeaders] = {}
        self._consumes = consumes
        self._sent: list[bytes] = []
        self.server = Http2Connection(self._accept, self._sent.append)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.server.begin()
        self.exchange()

    def _accept(self, stream: Http2Stream, headers: RequestHeaders) -> None:
        self.users[stream.number] = Recorder(stream, consumes=self._consumes)
        stream.user = self.users[stream.number]
        self.headers[stream.number] = headers

    def exchange(self) -> list[Any]:
        """Pass bytes until both are silent; return the client's events."""
        events: list[Any] = []
        while True:
            data = self.client.data_to_send()
            if data:
                self.server.receive(data)
            sent, self._sent[:] = b"".join(self._sent), []
            if not data and not sent:
                return events
            events += self.client.receive_data(sent)

    def begin(self, *, ends: bool = False, headers: Sequence[tuple[str, str]] = HEADERS) -> int:
        """Begin a stream and return its number."""
        number = self.client.get_next_available_stream_id()
        self.client.send_headers(number, list(headers), end_stream=ends)
        return number

    def sent(self) -> bytes:
        """Return the bytes that the server has sent since the last exchange."""
        return b"".join(self._sent)
