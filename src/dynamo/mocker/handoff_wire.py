"""HandoffWire: upstream's protocol between a prefill and a decode worker for one request.

Preamble, sent once by the connecting side: b"DMHF" · version u16 · flags u16. Frames: length u32 · JSON. Little-endian.
{"identity": {"handoff_id", "bootstrap_room", "request_id"}, "message": "Name" or {"Name": {…}}}
"""

import asyncio
import contextlib
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.core.codec import json_encode
from dynamo.protocols.engine import BootstrapInfo

PREAMBLE = struct.Struct("<4sHH")
LENGTH = struct.Struct("<I")
MAGIC, VERSION, FLAGS = b"DMHF", 1, 0
FRAME_MAX = 1 << 16
FACTS_MAX = 16  # Frames skipped at most while a particular one is awaited.

REGISTERED, COMPLETE = "Registered", "Complete"
REGISTER, FACT, ACTION, ACK = "Register", "Fact", "Action", "ActionAck"
ABORT, REFUSED = "Abort", "ProtocolError"
ENDS = (ABORT, REFUSED, "Overloaded")
"""Messages by which the peer aborts the handoff."""
RESERVE, ACTIVATE = "ReserveDestination", "ActivateDestination"
HELD, RESERVED = "SourceHeld", "DestinationReserved"
ACCEPTED, APPLIED = "Accepted", "Applied"
SOURCE_FIRST, DESTINATION_FIRST = "SourceFirst", "DestinationFirst"


class WireError(ValueError):
    """An invalid or unexpected message, or one that aborts the handoff."""


class HandoffIdentity(msgspec.Struct, frozen=True):
    """Identity of the request that a message belongs to."""

    handoff_id: str
    bootstrap_room: int
    request_id: str


class Registration(msgspec.Struct):
    """The first message of the connecting side: its role, order and engine."""

    role: str
    dp_rank: int
    order: str
    engine_type: str


class _Frame(msgspec.Struct):
    identity: HandoffIdentity
    message: str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class HandoffMessage:
    """One message: its name and fields."""

    name: str
    body: Mapping[str, Any]


def identity_of(info: BootstrapInfo, request_id: str) -> HandoffIdentity:
    """Return the identity that both workers derive for a request; without a frontend id it is made from the room."""
    handoff_id = info.handoff_id if isinstance(info.handoff_id, bytes) else info.bootstrap_room.to_bytes(16, "big")
    return HandoffIdentity(str(uuid.UUID(bytes=handoff_id)), info.bootstrap_room, request_id)


class Wire:
    """One connection. Its methods raise `WireError`, `OSError` or `EOFError` if the session cannot continue."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._identity: HandoffIdentity | None = None

    async def register(self, identity: HandoffIdentity, registration: Registration) -> None:
        """Send the preamble and the registration, and wait for the acknowledgement: connecting side."""
        self._identity = identity
        self._writer.write(PREAMBLE.pack(MAGIC, VERSION, FLAGS))
        await self.send(REGISTER, msgspec.to_builtins(registration))
        await self.expect(REGISTERED)

    async def registered(self) -> tuple[HandoffIdentity, Registration]:
        """Return the peer's identity and registration: listening side."""
        magic, version, flags = PREAMBLE.unpack(await self._reader.readexactly(PREAMBLE.size))
        if (magic, version, flags) != (MAGIC, VERSION, FLAGS):
            raise WireError(f"expected {MAGIC!r} in version {VERSION}")
        frame, message = await self._read()
        self._identity = frame.identity
        if message.name != REGISTER:
            raise WireError(f"{message.name} before {REGISTER}")
        try:
            return frame.identity, msgspec.convert(message.body, Registration)
        except msgspec.ValidationError as error:
            raise WireError(str(error)) from None

    async def send(self, name: str, body: Mapping[str, Any] | None = None) -> None:
        """Send one message."""
        assert self._identity is not None, "the session is not registered"
        data = json_encode(_Frame(self._identity, name if body is None else {name: body}))
        self._writer.write(LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def receive(self) -> HandoffMessage:
        """Return the next message. Raise `WireError` if the peer aborts."""
        frame, message = await self._read()
        if frame.identity != self._identity:
            raise WireError("message of a different request")
        if message.name in ENDS:
            raise WireError(" ".join([message.name, *(str(value) for value in message.body.values())]))
        return message

    async def expect(self, name: str, key: str | None = None) -> Mapping[str, Any]:
        """Return the next message of this name that has `key`, if given; other messages are skipped."""
        for _ in range(FACTS_MAX):
            message = await self.receive()
            if message.name == name and (key is None or key in message.body):
                return message.body
        raise WireError(f"no {key or name} received")

    async def act(self, number: int, action: str) -> None:
        """Send an action and wait for its acknowledgement."""
        assert self._identity is not None, "the session is not registered"
        await self.send(ACTION, {"id": number, "action": {action: {"handoff_id": self._identity.handoff_id}}})
        answer = await self.expect(ACK)
        if answer.get("action_id") != number or answer.get("outcome") not in (ACCEPTED, APPLIED):
            raise WireError(f"{action} was answered with {dict(answer)}")

    async def send_fact(self, fact: str, **fields: Any) -> None:
        """Send a fact."""
        assert self._identity is not None, "the session is not registered"
        await self.send(FACT, {fact: {"handoff_id": self._identity.handoff_id, **fields}})

    async def give_up(self, why: str, kind: str = ABORT) -> None:
        """Send a message that aborts the handoff; ignore connection errors."""
        if self._identity is not None:
            with contextlib.suppress(OSError):
                await self.send(kind, {"message": why})

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _read(self) -> tuple[_Frame, HandoffMessage]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if not 0 < length <= FRAME_MAX:
            raise WireError(f"invalid frame length {length}")
        try:
            frame = msgspec.json.decode(await self._reader.readexactly(length), type=_Frame)
        except msgspec.DecodeError as error:
            raise WireError(f"cannot decode frame: {error}") from None
        if isinstance(frame.message, str):
            return frame, HandoffMessage(frame.message, {})
        if len(frame.message) != 1:
            raise WireError("a message must have exactly one name")
        ((name, body),) = frame.message.items()
        return frame, HandoffMessage(name, body if isinstance(body, dict) else {"": body})
