"""Rooms: where a prefill worker and a decode worker meet over one prompt while it is still computed.

    decode                      prefill
    Enter(room)        ──▶      the request may come before or after
                       ◀──      Part: blocks that are complete, and where they come in the prompt
                       ◀──      Beat: nothing new, but I live
                       ◀──      End: what a prefill worker says when it is done

Each part is a transfer of its own, held and pulled like any other. Each visitor has a thread of the server, which waits
for the engine most of the time. `open`, `add`, `end` and `fail` wait for nothing.
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

from dynamo.kvbm.transfer.accepting import accept_connections
from dynamo.kvbm.transfer.base import Deadline, Descriptor, SourceUnreachable, TransferError, TransferTimeout
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.kvbm.transfer.wire import read_frame, write_frame
from dynamo.runtime.request_plane.tcp import TcpTls, local_address

logger = logging.getLogger(__name__)

VISITORS_MAX = 256  # Prompts that are computed and fetched at the same time.
ROOMS_MAX = 4096
QUESTION_S = 5.0
ARRIVAL_S = 10.0  # Between the two legs of a request lies a frontend's turn; who comes alone is alone.
BEAT_S = 1.0
SILENCE_S = 3.0  # Three beats that did not come.
WHOLE_S = 300.0  # The longest that a prompt may wait and be computed, as for a prefill that is asked alone.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not bound


class Meeting(msgspec.Struct, frozen=True):
    """Where, and by which name that only the two sides know."""

    host: str
    port: int
    room: int
    key: bytes = b""


class Enter(msgspec.Struct, tag="enter", frozen=True):
    """I wait for the prompt of this room; or nobody needs it any more."""

    room: int
    key: bytes
    is_leaving: bool = False


class Part(msgspec.Struct, tag="part", frozen=True):
    """The prompt's blocks from `first` on are complete."""

    first: int
    descriptor: Descriptor


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """There is nothing new."""


class End(msgspec.Struct, tag="end", frozen=True):
    """All is computed: the worker's `disaggregated_params`, about what no part has told."""

    params: dict[str, Any]


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """Nothing more will come."""

    reason: str


Word = Part | Beat | End | Broken
_words, _questions, _encoder = msgspec.msgpack.Decoder(Word), msgspec.msgpack.Decoder(Enter), msgspec.msgpack.Encoder()


@dataclass(eq=False, slots=True)
class _Room:
    until: float
    """When it is forgotten, if nobody is in it."""
    is_open: bool = False
    is_left: bool = False
    """Whoever was to fetch the blocks does not want them."""
    visitors: int = 0
    words: list[Word] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.words) and isinstance(self.words[-1], End | Broken)


class Rooms:
    """The prefill worker's side."""

    def __init__(self, host: str, port: int, *, release: Callable[[str], object], tls: TcpTls = PLAIN) -> None:
        """`release` gives a transfer up that nobody will pull. Raises `OSError` where it cannot listen."""
        self._release = release
        self._tls = tls
        self._changed = threading.Condition()
        self._rooms: dict[tuple[int, bytes], _Room] = {}
        self._links: set[socket.socket] = set()
        self._is_closed = threading.Event()
        bound = host or local_address()
        self._listener = socket.create_server((bound, port), backlog=VISITORS_MAX)
        self.host = local_address() if bound in WILDCARDS else bound
        self.port: int = self._listener.getsockname()[1]
        arguments = (self._listener, self._is_closed, self._take, "to rooms")
        threading.Thread(target=accept_connections, args=arguments, name="dynamo-kv-rooms", daemon=True).start()

    def open(self, room: int, key: bytes) -> None:
        """A prompt is to be computed for who enters."""
        with self._changed:
            self._room(room, key).is_open = True
            self._changed.notify_all()

    def add(self, room: int, key: bytes, first: int, descriptor: Descriptor) -> None:
        """More of its blocks are complete."""
        self._say(room, key, Part(first, descriptor))

    def end(self, room: int, key: bytes, params: dict[str, Any]) -> None:
        """It is computed."""
        self._say(room, key, End(params))

    def fail(self, room: int, key: bytes, reason: str) -> None:
        """It will not be computed; harmless for one that is."""
        self._say(room, key, Broken(reason))

    def close(self) -> None:
        with self._changed:
            self._is_closed.set()
            links = list(self._links)
            self._changed.notify_all()
        for one in (self._listener, *links):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # Not connected, or not any more.
                continue
        self._listener.close()

    def _say(self, room: int, key: bytes, word: Word) -> None:
        is_unwanted = False
        with self._changed:
            found = self._rooms.get((room, key))
            if found is None or found.is_over:
                is_unwanted = True
            else:
                is_unwanted = found.is_left
                found.words.append(word)
                found.until = max(found.until, time.monotonic() + ARRIVAL_S)
                self._changed.notify_all()
        if is_unwanted:
            self._give_up([word])

    def _room(self, room: int, key: bytes) -> _Room:
        """With the lock. The oldest that nobody is in makes room."""
        now = time.monotonic()
        found = self._rooms.get((room, key))
        if found is None:
            for name, one in list(self._rooms.items()):
                if one.until < now and not one.visitors and (one.is_over or not one.is_open):
                    del self._rooms[name]
                elif len(self._rooms) < ROOMS_MAX:
                    break
            while len(self._rooms) >= ROOMS_MAX:
                del self._rooms[next(iter(self._rooms))]
            found = self._rooms[(room, key)] = _Room(now + ARRIVAL_S)
        return found

    def _take(self, link: socket.socket) -> None:
        with self._changed:
            is_taken = len(self._links) < VISITORS_MAX
            if is_taken:
                self._links.add(link)
        if is_taken:
            threading.Thread(target=self._serve, args=(link,), name="dynamo-kv-room", daemon=True).start()
        else:
            link.close()

    def _serve(self, raw: socket.socket) -> None:
        link = raw
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
            logger.debug("a visitor of a room left: %s", error)
        except Exception:
            logger.exception("a visitor of a room failed")
        finally:
            with self._changed:
                self._links.discard(raw)
            link.close()

    def _attend(self, link: socket.socket, question: Enter) -> None:
        with self._changed:
            room = self._room(question.room, question.key)
            room.visitors += 1
        is_told = False
        try:
            if not question.is_leaving:
                self._tell(link, room)
                is_told = True
        finally:
            with self._changed:
                room.visitors -= 1
                words: list[Word] = []
                if not is_told:
                    room.is_left, words = True, list(room.words)
            self._give_up(words)

    def _tell(self, link: socket.socket, room: _Room) -> None:
        """Says everything that is said in the room, as it comes."""
        said, arrives_by = 0, time.monotonic() + ARRIVAL_S
        while True:
            with self._changed:
                if len(room.words) == said and not self._is_closed.is_set():
                    self._changed.wait_for(partial(self._has_more, room, said), BEAT_S)
                words: list[Word] = list(room.words[said:]) or [Beat()]
                said = len(room.words)
                if not room.is_open and time.monotonic() > arrives_by:
                    words = [Broken("the prompt never came")]
                if self._is_closed.is_set():
                    words = [Broken("the prefill worker ends")]
            for word in words:
                write_frame(link, _encoder.encode(word))
                if isinstance(word, End | Broken):
                    return

    def _has_more(self, room: _Room, said: int) -> bool:
        return len(room.words) > said or self._is_closed.is_set()

    def _give_up(self, words: list[Word]) -> None:
        for word in words:
            if isinstance(word, Part):
                self._release(word.descriptor.transfer_id)
            elif isinstance(word, End) and isinstance(told := word.params.get("kv"), dict):
                self._release(str(told.get("transfer_id")))


def attend(meeting: Meeting, deadline: Deadline, tls: TcpTls = PLAIN) -> Iterator[Part | End]:
    """The decode worker's side: what is told, the end last. Blocks its thread. Raises `TransferError`."""
    link = _enter(meeting, deadline, tls, is_leaving=False)
    try:
        while True:
            deadline.left()
            link.settimeout(SILENCE_S)
            try:
                body = read_frame(link)
            except TimeoutError:
                raise TransferTimeout(f"the prefill worker was silent for {SILENCE_S:g} s") from None
            except OSError as error:
                raise SourceUnreachable(f"the line to the prefill worker broke: {error}") from None
            if body is None:
                raise SourceUnreachable("the prefill worker ended the line")
            try:
                word = _words.decode(body)
            except msgspec.DecodeError as error:
                raise TransferError(f"a frame is no word: {error}") from None
            if isinstance(word, Broken):
                raise TransferError(f"the prompt is not computed elsewhere: {word.reason}")
            if isinstance(word, Part | End):
                yield word
                if isinstance(word, End):
                    return
    finally:
        link.close()


def leave(meeting: Meeting, deadline: Deadline, tls: TcpTls = PLAIN) -> None:
    """Nobody will enter. Raises `TransferError`."""
    _enter(meeting, deadline, tls, is_leaving=True).close()


def _enter(meeting: Meeting, deadline: Deadline, tls: TcpTls, *, is_leaving: bool) -> socket.socket:
    try:
        link = socket.create_connection((meeting.host, meeting.port), SILENCE_S)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls.client is not None:
                link = tls.client.wrap_socket(link, server_hostname=tls.server_name or meeting.host)
            link.settimeout(SILENCE_S)
            write_frame(link, _encoder.encode(Enter(meeting.room, meeting.key, is_leaving)))
        except BaseException:
            link.close()
            raise
    except TimeoutError:
        raise TransferTimeout("the prefill worker does not answer") from None
    except (OSError, ValueError, OverflowError) as error:
        raise SourceUnreachable(f"no way to the prefill worker: {error}") from None
    return link
