"""Remote block manager: the scheduler's access to the block manager of a worker in another process, over a local socket.

vLLM may run its scheduler and its worker as two processes; the block manager is in the worker. The engine's id, common to
both, names the socket. The socket lies in a directory that only this user can enter, and the server also checks the user
of each peer, so that the id need not be secret. A frame is a length and a msgpack message; nothing in it is executed.
"""

import contextlib
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Sequence

import msgspec

from dynamo.core.boundaries import Rollback, logged
from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import FILE_MODE, runtime_directory
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import LoadTicket
from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.accepting import accept_connections, is_own_user
from dynamo.kvbm.transfer.base import TransferError

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # An answer takes microseconds; after this time without one the worker is not used any more.
CLOSE_S = 2.0
CONNECTIONS_MAX = 4  # An engine has one scheduler; a restarted one may overlap with it.
TICKETS_MAX = 4096  # Open at once by one connection; far more than the block manager accepts.
FRAME_BYTES_MAX = 16 << 20  # The identities of some hundred thousand blocks.
PREFIX, SUFFIX = "kvbm-", ".sock"
SOCKET_PATH_BYTES_MAX = 107  # <sys/un.h>
PID_BYTES = 8  # While it is made, the name ends in the process's id.


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Bring a prefix into the host."""

    identities: list[BlockIdentity]


class IsOver(msgspec.Struct, tag="is_over", frozen=True):
    """Query whether a ticket is over."""

    ticket: int


class EndTicket(msgspec.Struct, tag="end", frozen=True):
    """End a ticket."""

    ticket: int


class Find(msgspec.Struct, tag="find", frozen=True):
    """Hold the longest prefix in the host."""

    hashes: list[int]


class ReleaseSlots(msgspec.Struct, tag="release", frozen=True):
    """Release held slots."""

    slots: list[int]


class ClearTiers(msgspec.Struct, tag="clear", frozen=True):
    """Drop all blocks."""


class ManagerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to any request; each request sets its own field."""

    ticket: int | None = None
    is_over: bool = False
    slots: list[int] = []


Request = Begin | IsOver | EndTicket | Find | ReleaseSlots | ClearTiers
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(ManagerReply)
_encoder = msgspec.msgpack.Encoder()


def socket_path(engine_id: str) -> str:
    """Return the socket's path, in a directory of this user. Raise `ConfigError` if path or directory are unusable."""
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:32]
    path = os.path.join(runtime_directory(), f"{PREFIX}{name}{SUFFIX}")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX - PID_BYTES:
        raise ConfigError(f"{path!r}: too long for a socket's path; set TMPDIR or XDG_RUNTIME_DIR to a shorter one")
    return path


class ManagerServer:
    """Server of a block manager for the scheduler of the same engine. Each connection has a thread."""

    def __init__(self, manager: BlockManager, engine_id: str) -> None:
        """Raise `ConfigError` if the socket cannot be created."""
        self._manager = manager
        self._path = socket_path(engine_id)
        self._guard = threading.Lock()
        self._links: set[socket.socket] = set()
        self._is_closed = threading.Event()
        self._listener = _listen(self._path)
        self._thread = threading.Thread(
            target=accept_connections,
            args=(self._listener, self._is_closed, self._take, "to the block manager"),
            name="kvbm-remote",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving, end all connections and remove the socket."""
        with self._guard:
            self._is_closed.set()
            links = list(self._links)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for the next connection.
        self._listener.close()
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_S)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _take(self, link: socket.socket) -> None:
        with self._guard:
            is_taken = not self._is_closed.is_set() and len(self._links) < CONNECTIONS_MAX and is_own_user(link)
            if is_taken:
                self._links.add(link)
        if is_taken:
            threading.Thread(target=self._serve, args=(link,), name="kvbm-remote-serve", daemon=True).start()
        else:
            logger.warning("refused a connection to the block manager: wrong user, or too many connections")
            link.close()

    def _serve(self, link: socket.socket) -> None:
        tickets: dict[int, LoadTicket] = {}
        try:
            with logged(logger, "closed a connection to the block manager: its request failed"):
                self._answer_requests(link, tickets)
        finally:
            for ticket in tickets.values():
                self._manager.end(ticket)
            with self._guard:
                self._links.discard(link)
            link.close()

    def _answer_requests(self, link: socket.socket, tickets: dict[int, LoadTicket]) -> None:
        """Answer the requests of a connection until it ends."""
        try:
            link.settimeout(None)  # An idle scheduler sends nothing.
            while (body := wire.read_frame(link, FRAME_BYTES_MAX)) is not None:
                reply = self._answer(_requests.decode(body), tickets)
                link.settimeout(ANSWER_S)
                wire.write_frame(link, _encoder.encode(reply))
                link.settimeout(None)
            logger.info("the scheduler closed its connection")
        except (msgspec.DecodeError, TransferError, OSError) as error:
            if not self._is_closed.is_set():
                logger.warning("closed a connection to the block manager: %s", error)

    def _answer(self, request: Request, tickets: dict[int, LoadTicket]) -> ManagerReply:
        manager = self._manager
        if isinstance(request, Begin):
            ticket = manager.begin(request.identities) if len(tickets) < TICKETS_MAX else None
            if ticket is None:
                return ManagerReply()
            number = max(tickets, default=0) + 1
            tickets[number] = ticket
            return ManagerReply(ticket=number)
        if isinstance(request, IsOver):
            known = tickets.get(request.ticket)
            return ManagerReply(is_over=known is None or manager.is_over(known))
        if isinstance(request, EndTicket):
            ended = tickets.pop(request.ticket, None)
            if ended is not None:
                manager.end(ended)
        elif isinstance(request, Find):
            return ManagerReply(slots=manager.find(request.hashes))
        elif isinstance(request, ReleaseSlots):
            if any(not 0 <= slot < manager.book.host.total for slot in request.slots):
                raise TransferError(f"the host has {manager.book.host.total} slots, the scheduler released others")
            manager.release(request.slots)
        else:
            manager.clear()
        return ManagerReply()


class RemoteManager:
    """Client of a `ManagerServer`, used by the scheduler. After a failure it reports that nothing is found."""

    def __init__(self, engine_id: str) -> None:
        """Raise `OSError` if no server listens yet, `ConfigError` if its path is unusable."""
        link = socket.socket(socket.AF_UNIX)
        with Rollback(link.close):
            link.settimeout(ANSWER_S)
            link.connect(socket_path(engine_id))
        self._link: socket.socket | None = link

    def begin(self, identities: Sequence[BlockIdentity]) -> int | None:
        return self._request(Begin(list(identities))).ticket

    def is_over(self, ticket: int) -> bool:
        return self._request(IsOver(ticket)).is_over or self._link is None

    def end(self, ticket: int) -> None:
        self._request(EndTicket(ticket))

    def find(self, hashes: Sequence[int]) -> list[int]:
        return self._request(Find(list(hashes))).slots

    def release(self, slots: Sequence[int]) -> None:
        if slots:
            self._request(ReleaseSlots(list(slots)))

    def clear(self) -> None:
        self._request(ClearTiers())

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _request(self, request: Request) -> ManagerReply:
        if self._link is None:
            return ManagerReply()
        try:
            self._link.settimeout(ANSWER_S)
            wire.write_frame(self._link, _encoder.encode(request))
            body = wire.read_frame(self._link, FRAME_BYTES_MAX)
            if body is not None:
                return _replies.decode(body)
            reason = "the connection was closed"
        except TimeoutError:
            reason = f"no answer within {ANSWER_S:g} s"
        except (OSError, TransferError, msgspec.DecodeError) as error:
            reason = str(error)
        logger.warning("the worker's block manager failed (%s): KV tiers are disabled", reason)
        self.close()
        return ManagerReply()


def _listen(path: str) -> socket.socket:
    """Listen at a path, and remove the sockets left in its directory by killed processes. Raise `ConfigError`.

    The socket is renamed to its path only once it listens: one that refuses connections belongs to no running process.
    """
    fresh = f"{path[: -len(SUFFIX)]}.{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    with Rollback(listener.close):
        try:
            _remove_abandoned(os.path.dirname(path))
            _check_unused(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            listener.bind(fresh)
            os.chmod(fresh, FILE_MODE)
            listener.listen(CONNECTIONS_MAX)
            os.rename(fresh, path)
        except OSError as error:
            raise ConfigError(f"cannot serve the block manager at {path!r}: {error.strerror}") from None
    return listener


def _check_unused(path: str) -> None:
    if os.path.lexists(path):
        raise ConfigError(f"cannot serve the block manager at {path!r}: another process of this engine serves it")


def _remove_abandoned(directory: str) -> None:
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.startswith(PREFIX) and name.endswith(SUFFIX) and _is_abandoned(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _is_abandoned(path: str) -> bool:
    """Return whether no process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
