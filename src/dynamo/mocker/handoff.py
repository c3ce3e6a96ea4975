"""Handoff: where a prefill worker and a decode worker meet over one request (serving-plane.md §5.7).

    decode ── {"room": 7} ──▶ prefill      as soon as the request came
    decode ◀── {"ready": true} ── prefill  when the prompt is computed; {"error": "…"} when it will not be
    decode ── {"done": true} ──▶ prefill   when the blocks were taken over; the connection's end says the same

Each side waits no longer than a session may last.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError, WorkerUnavailable
from dynamo.protocols.engine import BootstrapInfo

ROOMS_MAX = 1 << 16  # More than the sequences of any worker; beyond it the oldest that nobody came to is given up.
LINE_MAX = 1 << 12


class _Word(msgspec.Struct, omit_defaults=True):
    """A line of the conversation."""

    room: int | None = None
    ready: bool = False
    done: bool = False
    error: str | None = None


@dataclass(slots=True, eq=False)
class Room:
    """One request's two sides."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    let_go: Callable[[], None] | None = None
    expiry: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        """Nobody needs the blocks any more."""
        if self.expiry is not None:
            self.expiry.cancel()
        let_go, self.let_go = self.let_go, None
        if let_go is not None:
            let_go()


class HandoffServer:
    """The prefill side: a port, and a room for each request."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rooms: dict[int, Room] = {}
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listens; the port that it is, which is another one for port 0. Raises `ConfigError` where it is taken."""
        try:
            self._server = await asyncio.start_server(self._meet, host, port, limit=LINE_MAX)
        except OSError as error:
            raise ConfigError(f"--bootstrap-ports {port}: {error.strerror or error}") from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends every conversation and lets everything go."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._talks):
            task.cancel()
        if self._talks:
            await asyncio.wait(self._talks)
        for room in self._rooms.values():
            room.leave()
        self._rooms.clear()

    def computed(self, number: int, let_go: Callable[[], None]) -> None:
        """A prompt is computed. `let_go` is called when its blocks were taken over, or nobody came for them."""
        room = self._room(number)
        room.let_go = let_go
        room.ready.set()

    def lost(self, number: int) -> None:
        """A prompt will not be computed."""
        room = self._room(number)
        room.error = "the prefill was cancelled"
        room.ready.set()

    def _room(self, number: int) -> Room:
        room = self._rooms.get(number)
        if room is None:
            if len(self._rooms) >= ROOMS_MAX:
                self._forget(next(iter(self._rooms)))
            room = self._rooms[number] = Room()
            loop = asyncio.get_running_loop()
            room.expiry = loop.call_later(self._timeout_s, self._forget, number)
        return room

    def _forget(self, number: int) -> None:
        room = self._rooms.pop(number, None)
        if room is not None:
            room.leave()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._talk(reader, writer)
        except (OSError, TimeoutError, ValueError, msgspec.DecodeError, asyncio.CancelledError):
            pass  # Whoever came is gone, says nonsense or waited too long; its room has a limit of its own.
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = msgspec.json.decode(await reader.readline(), type=_Word).room
        if number is None:
            return
        room = self._room(number)
        try:
            await room.ready.wait()
            writer.write(json_encode(_Word(ready=room.error is None, error=room.error)) + b"\n")
            await writer.drain()
            await reader.readline()
        finally:
            self._forget(number)


@dataclass(slots=True)
class Handoff:
    """The decode side of one request."""

    info: BootstrapInfo
    timeout_s: float
    _writer: asyncio.StreamWriter | None = None

    async def ready(self) -> None:
        """Returns when the prompt is computed. Raises `WorkerUnavailable` where it will not be."""
        where = f"{self.info.bootstrap_host}:{self.info.bootstrap_port}"
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, self._writer = await asyncio.open_connection(
                    self.info.bootstrap_host, self.info.bootstrap_port, limit=LINE_MAX
                )
                self._writer.write(json_encode(_Word(room=self.info.bootstrap_room)) + b"\n")
                word = msgspec.json.decode(await reader.readline(), type=_Word)
        except TimeoutError:
            raise WorkerUnavailable(f"handoff session timed out: {where}") from None
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise WorkerUnavailable(f"the prefill worker at {where} cannot be met: {error}") from None
        if not word.ready:
            raise WorkerUnavailable(f"the prefill worker at {where}: {word.error or 'it left'}")

    async def done(self) -> None:
        """The blocks were taken over, or nobody wants them any more."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with contextlib.suppress(OSError):
            writer.write(json_encode(_Word(done=True)) + b"\n")
            await writer.drain()
        writer.close()
