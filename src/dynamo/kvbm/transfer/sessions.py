"""Transfer sessions, in which a decode worker receives a prompt's blocks while the prefill worker computes them.

    decode                      prefill
    Subscribe(room)    ──▶      may arrive before or after the prefill request
                       ◀──      TransferPart: completed blocks, and their position in the prompt
                       ◀──      Heartbeat: keep-alive
                       ◀──      TransferEnd: the final response of the prefill worker

Each part is a separate transfer, held and pulled like any other. Each connection has a thread of the server, which mostly
waits for the engine. `open`, `add`, `end` and `fail` do not block.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from dynamo.core.boundaries import Rollback, logged
from dynamo.kvbm.transfer.accepting import accept_connections
from dynamo.kvbm.transfer.base import Deadline, Descriptor, SourceUnreachable, TransferError, TransferTimeout
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.kvbm.transfer.wire import read_frame, write_frame
from dynamo.runtime.request_plane.tcp.common import local_address
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256  # Prompts computed and fetched concurrently.
SESSIONS_MAX = 4096
QUESTION_S = 5.0
ARRIVAL_S = 10.0  # Maximum wait for the prefill request: the frontend sends the requests of both phases in turn.
BEAT_S = 1.0
SILENCE_S = 3.0  # Three missed heartbeats.
WHOLE_S = 300.0  # Maximum time for a prompt to queue and be computed, as for a prefill without a session.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound


class TransferSession(msgspec.Struct, frozen=True):
    """Address and secret name of a session, shared by its two sides."""

    host: str
    port: int
    room: int
    key: bytes = b""


class Subscribe(msgspec.Struct, tag="enter", frozen=True):
    """Subscription to a session's prompt, or its cancellation."""

    room: int
    key: bytes
    is_leaving: bool = False


class TransferPart(msgspec.Struct, tag="part", frozen=True):
    """Descriptor of completed blocks of the prompt, from `first` on."""

    first: int
    descriptor: Descriptor


class Heartbeat(msgspec.Struct, tag="beat", frozen=True):
    """Keep-alive without news."""


class TransferEnd(msgspec.Struct, tag="end", frozen=True):
    """End of the prompt: the worker's `disaggregated_params`, for everything not sent in parts."""

    params: dict[str, Any]


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """Failure of the prompt; nothing follows."""

    reason: str


Message = TransferPart | Heartbeat | TransferEnd | Broken
_messages, _questions, _encoder = (
    msgspec.msgpack.Decoder(Message),
    msgspec.msgpack.Decoder(Subscribe),
    msgspec.msgpack.Encoder(),
)


@dataclass(eq=False, slots=True)
class _Session:
    until: float
    """Time at which an unconnected session is dropped."""
    is_open: bool = False
    is_left: bool = False
    """The decode worker cancelled."""
    visitors: int = 0
    messages: list[Message] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.messages) and isinstance(self.messages[-1], TransferEnd | Broken)


class TransferServer:
    """Server of sessions, on the prefill worker."""

    def __init__(self, host: str, port: int, *, release: Callable[[str], object], tls: TcpTls = PLAIN) -> None:
        """`release` ends a transfer that will not be pulled. Raise `OSError` if the address cannot be bound."""
        self._release = release
        self._tls = tls
        self._changed = threading.Condition()
        self._sessions: dict[tuple[int, bytes], _Session] = {}
        self._links: set[socket.socket] = set()
        self._is_closed = threading.Event()
        bound = host or local_address()
        self._listener = socket.create_server((bound, port), backlog=CONNECTIONS_MAX)
        self.host = local_address() if bound in WILDCARDS else bound
        self.port: int = self._listener.getsockname()[1]
        arguments = (self._listener, self._is_closed, self._take, "for transfer sessions")
        threading.Thread(target=accept_connections, args=arguments, name="dynamo-kv-sessions", daemon=True).start()

    def open(self, room: int, key: bytes) -> None:
        """Open a session for a prompt that is to be computed."""
        with self._changed:
            self._session(room, key).is_open = True
            self._changed.notify_all()

    def add(self, room: int, key: bytes, first: int, descriptor: Descriptor) -> None:
        """Send further completed blocks."""
        self._append(room, key, TransferPart(first, descriptor))

    def end(self, room: int, key: bytes, params: dict[str, Any]) -> None:
        """End a session whose prompt is computed."""
        self._append(room, key, TransferEnd(params))

    def fail(self, room: int, key: bytes, reason: str) -> None:
        """End a session whose prompt will not be computed; no effect if it has ended already."""
        self._append(room, key, Broken(reason))

    def close(self) -> None:
        with self._changed:
            self._is_closed.set()
            links = list(self._links)
            self._changed.notify_all()
        for one in (self._listener, *links):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # Not connected, or no longer connected.
                continue
        self._listener.close()

    def _append(self, room: int, key: bytes, message: Message) -> None:
        is_unwanted = False
        with self._changed:
            found = self._sessions.get((room, key))
            if found is None or found.is_over:
                is_unwanted = True
            else:
                is_unwanted = found.is_left
                found.messages.append(message)
                found.until = max(found.until, time.monotonic() + ARRIVAL_S)
                self._changed.notify_all()
        if is_unwanted:
            self._give_up([message])

    def _session(self, room: int, key: bytes) -> _Session:
        """Return a session, with the lock held. If there are too many, drop the oldest unconnected one."""
        now = time.monotonic()
        found = self._sessions.get((room, key))
        if found is None:
            for name, one in list(self._sessions.items()):
                if one.until < now and not one.visitors and (one.is_over or not one.is_open):
                    del self._sessions[name]
                elif len(self._sessions) < SESSIONS_MAX:
                    break
            while len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            found = self._sessions[(room, key)] = _Session(now + ARRIVAL_S)
        return found

    def _take(self, link: socket.socket) -> None:
        with self._changed:
            is_taken = len(self._links) < CONNECTIONS_MAX
            if is_taken:
                self._links.add(link)
        if is_taken:
            threading.Thread(target=self._serve, args=(link,), name="dynamo-kv-room", daemon=True).start()
        else:
            link.close()

    def _serve(self, raw: socket.socket) -> None:
        link = raw
        with logged(logger, "the connection of a transfer session failed"):
            try:
                raw.settimeout(QUESTION_S)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls.server is not None:
                    self._tls.refresh()
                    link = self._tls.server.wrap_socket(raw, server_side=True)
                body = read_frame(link)
                if body is not None:
                    self._attend(link, _questions.decode(body))
            except (OSError, TransferError, msgspec.DecodeError) as error:
                logger.debug("the connection of a transfer session ended: %s", error)
            finally:
                with self._changed:
                    self._links.discard(raw)
                link.close()

    def _attend(self, link: socket.socket, question: Subscribe) -> None:
        with self._changed:
            session = self._session(question.room, question.key)
            session.visitors += 1
        is_delivered = False
        try:
            if not question.is_leaving:
                self._send_messages(link, session)
                is_delivered = True
        finally:
            with self._changed:
                session.visitors -= 1
                messages: list[Message] = []
                if not is_delivered:
                    session.is_left, messages = True, list(session.messages)
            self._give_up(messages)

    def _send_messages(self, link: socket.socket, session: _Session) -> None:
        """Send a session's messages as they are added."""
        sent, arrives_by = 0, time.monotonic() + ARRIVAL_S
        while True:
            with self._changed:
                if len(session.messages) == sent and not self._is_closed.is_set():
                    self._changed.wait_for(partial(self._has_more, session, sent), BEAT_S)
                messages: list[Message] = list(session.messages[sent:]) or [Heartbeat()]
                sent = len(session.messages)
                if not session.is_open and time.monotonic() > arrives_by:
                    messages = [Broken("no prefill request arrived")]
                if self._is_closed.is_set():
                    messages = [Broken("the prefill worker is shutting down")]
            for message in messages:
                write_frame(link, _encoder.encode(message))
                if isinstance(message, TransferEnd | Broken):
                    return

    def _has_more(self, session: _Session, sent: int) -> bool:
        return len(session.messages) > sent or self._is_closed.is_set()

    def _give_up(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TransferPart):
                self._release(message.descriptor.transfer_id)
            elif isinstance(message, TransferEnd) and isinstance(kv := message.params.get("kv"), dict):
                self._release(str(kv.get("transfer_id")))


def attend(meeting: TransferSession, deadline: Deadline, tls: TcpTls = PLAIN) -> Iterator[TransferPart | TransferEnd]:
    """Yield the messages of a session on the decode worker, `TransferEnd` last. Block the thread. Raise `TransferError`."""
    link = _enter(meeting, deadline, tls, is_leaving=False)
    try:
        while True:
            deadline.left()
            link.settimeout(SILENCE_S)
            try:
                body = read_frame(link)
            except TimeoutError:
                raise TransferTimeout(f"the prefill worker sent nothing for {SILENCE_S:g} s") from None
            except OSError as error:
                raise SourceUnreachable(f"lost the connection to the prefill worker: {error}") from None
            if body is None:
                raise SourceUnreachable("the prefill worker closed the connection")
            try:
                message = _messages.decode(body)
            except msgspec.DecodeError as error:
                raise TransferError(f"cannot decode message: {error}") from None
            if isinstance(message, Broken):
                raise TransferError(f"remote prefill failed: {message.reason}")
            if isinstance(message, TransferPart | TransferEnd):
                yield message
                if isinstance(message, TransferEnd):
                    return
    finally:
        link.close()


def leave(meeting: TransferSession, deadline: Deadline, tls: TcpTls = PLAIN) -> None:
    """Cancel a session that will not be subscribed to. Raise `TransferError`."""
    _enter(meeting, deadline, tls, is_leaving=True).close()


def _enter(meeting: TransferSession, deadline: Deadline, tls: TcpTls, *, is_leaving: bool) -> socket.socket:
    try:
        link = socket.create_connection((meeting.host, meeting.port), SILENCE_S)
        with Rollback(lambda: link.close()):  # noqa: PLW0108 - TLS wraps the link in another
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls.client is not None:
                link = tls.client.wrap_socket(link, server_hostname=tls.server_name or meeting.host)
            link.settimeout(SILENCE_S)
            write_frame(link, _encoder.encode(Subscribe(meeting.room, meeting.key, is_leaving)))
    except TimeoutError:
        raise TransferTimeout("the prefill worker did not respond in time") from None
    except (OSError, ValueError, OverflowError) as error:
        raise SourceUnreachable(f"cannot connect to the prefill worker: {error}") from None
    return link
