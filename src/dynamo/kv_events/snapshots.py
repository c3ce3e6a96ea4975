"""Snapshots: the sum of a component's KV events as one object, replaced atomically.

The object store keeps an object in pieces under a random name, and one message that names the current object. `send`
sends the pieces, and `commit` that message on the condition that it was not replaced meanwhile: a reader sees the old
state or the new one, and a slow writer changes nothing. A lock keeps two routers from uploading at once.
"""

import asyncio
import base64
import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.codec import json_decoder, json_encode
from dynamo.core.errors import DynamoException
from dynamo.kv_events.jetstream import OBJECT, bucket_name, component_subject, slug
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import WorkerKvEvent

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

logger = logging.getLogger(__name__)

READS_MAX, READ_EVERY_S = 10, 0.1
READ_TIMEOUT_S, PIECE_TIMEOUT_S = 30.0, 2.0
CHUNK_BYTES = 1 << 17
LOCK_TTL_S = 30.0  # Delay of the next snapshot after a router died while it held the lock.
LOCK_KEY = "router-snapshot-lock"

decode_snapshot = json_decoder(list[WorkerKvEvent]).decode


class ObjectInfo(msgspec.Struct):
    """The message that names the pieces of the current object."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    deleted: bool = False
    options: dict[str, int] = msgspec.field(default_factory=lambda: {"max_chunk_size": CHUNK_BYTES})


decode_info = json_decoder(ObjectInfo).decode


class Superseded(DynamoException):
    """Another router's snapshot was committed first."""


@dataclass(slots=True)
class Lock:
    """Lock on uploading, valid as long as it is renewed."""

    bucket: "KeyValue"
    revision: int

    async def renew(self, owner: bytes) -> None:
        """Renew the lock. Raise `Superseded` if it was lost."""
        from nats.js.errors import KeyWrongLastSequenceError

        try:
            self.revision = await self.bucket.update(LOCK_KEY, owner, last=self.revision)
        except KeyWrongLastSequenceError:
            raise Superseded("the lock was lost") from None

    async def release(self) -> None:
        """Release the lock; a lost one stays with its new owner."""
        from nats.js.errors import APIError

        try:
            await self.bucket.delete(LOCK_KEY, last=self.revision)
        except APIError as error:
            logger.debug("the snapshot's lock was lost before its release: %s", error)


class SnapshotStore:
    """Snapshot bucket of one component."""

    def __init__(self, context: "JetStreamContext", endpoint: EndpointId) -> None:
        self.bucket = bucket_name(endpoint)
        self._context = context
        self._lock_bucket = slug(f"{component_subject(endpoint)}-radix-lock")
        self._stream = f"OBJ_{self.bucket}"
        self._meta = f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(OBJECT.encode()).decode()}"

    async def open(self) -> None:
        """Create the bucket if it does not exist."""
        from nats.js.errors import BadRequestError

        try:
            await self._context.create_object_store(bucket=self.bucket)
        except BadRequestError:  # Another process has just created it.
            await self._context.object_store(self.bucket)

    async def drop(self) -> None:
        """Delete the bucket with its content."""
        from nats.js.errors import NotFoundError

        try:
            await self._context.delete_object_store(self.bucket)
        except NotFoundError:
            return

    async def read(self) -> list[WorkerKvEvent]:
        """Return the snapshot, once two readings agree; nothing if there is none or it cannot be read."""
        before: bytes | None = None
        for number in range(READS_MAX):
            if number:
                await asyncio.sleep(READ_EVERY_S)
            found = await self._read_once()
            if found is not None and found == before:
                break
            before = found
        else:
            if before is None:
                logger.warning("failed to read the snapshot in %s; workers are queried instead", self.bucket)
                return []
            logger.warning("the snapshot in %s keeps changing; using the last reading", self.bucket)
        if not before:
            return []
        try:
            return await asyncio.to_thread(decode_snapshot, before)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("malformed snapshot in %s: %s", self.bucket, error)
            return []

    async def _read_once(self) -> bytes | None:
        """Return the object: empty for no snapshot, None if it changed or vanished during the reading."""
        from nats.errors import Error
        from nats.js.errors import NotFoundError

        try:
            found = await self._context.get_last_msg(self._stream, self._meta)
        except NotFoundError:
            return b""
        try:
            info = decode_info(found.data or b"{}")
            if info.deleted or not info.chunks:
                return b""
            async with asyncio.timeout(READ_TIMEOUT_S):
                whole = b"".join(await self._read_pieces(info))
        except (Error, TimeoutError, msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.debug("reading %s: %s", self.bucket, error)
            return None
        return whole if digest_of(hashlib.sha256(whole)) == info.digest else None

    async def _read_pieces(self, info: ObjectInfo) -> list[bytes]:
        subscription = await self._context.subscribe(self._pieces_of(info.nuid), ordered_consumer=True)
        try:
            return [(await subscription.next_msg(timeout=PIECE_TIMEOUT_S)).data for _ in range(info.chunks)]
        finally:
            await subscription.unsubscribe()

    async def lock(self, owner: bytes) -> Lock | None:
        """Acquire the lock; return None while another router holds it."""
        from nats.js.errors import BadRequestError, KeyWrongLastSequenceError

        try:
            bucket = await self._context.create_key_value(bucket=self._lock_bucket, ttl=LOCK_TTL_S)
        except BadRequestError:
            bucket = await self._context.key_value(self._lock_bucket)
        try:
            return Lock(bucket, await bucket.create(LOCK_KEY, owner))
        except KeyWrongLastSequenceError:
            return None

    async def version(self) -> int:
        """Return the version of the current snapshot; 0 for none."""
        from nats.js.errors import NotFoundError

        try:
            found = await self._context.get_last_msg(self._stream, self._meta)
        except NotFoundError:
            return 0
        return found.seq or 0

    async def send(self, pieces: Sequence[bytes], lock: Lock, owner: bytes) -> ObjectInfo:
        """Send the pieces; they are invisible until `commit` is called with the returned value."""
        name, digest, size = secrets.token_hex(11), hashlib.sha256(), 0
        subject = self._pieces_of(name)
        renewed_s = asyncio.get_running_loop().time()
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            await self.send_piece(subject, piece)
            now_s = asyncio.get_running_loop().time()
            if now_s - renewed_s > LOCK_TTL_S / 4:
                renewed_s = now_s
                await lock.renew(owner)
        return ObjectInfo(OBJECT, self.bucket, name, size, len(pieces), digest_of(digest))

    async def send_piece(self, subject: str, piece: bytes) -> None:
        """Send one piece, and return when the server has it."""
        await self._context.publish(subject, piece)

    async def commit(self, info: ObjectInfo, version: int) -> None:
        """Make the pieces the current snapshot. Raise `Superseded` if `version` is not current any more."""
        from nats.js.errors import APIError

        headers = {"Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": str(version)}
        try:
            await self._context.publish(self._meta, json_encode(info), headers=headers)
        except APIError as error:
            await self._context.purge_stream(self._stream, subject=self._pieces_of(info.nuid))
            raise Superseded(f"another router's snapshot was committed first ({error.description})") from None

    async def sweep(self, info: ObjectInfo) -> None:
        """Delete the pieces of former snapshots and of unfinished uploads."""
        current = self._pieces_of(info.nuid)
        state = (await self._context.stream_info(self._stream, subjects_filter=self._pieces_of(">"))).state
        for subject in state.subjects or {}:
            if subject != current:
                await self._context.purge_stream(self._stream, subject=subject)

    def _pieces_of(self, name: str) -> str:
        return f"$O.{self.bucket}.C.{name}"


def digest_of(found: "hashlib._Hash") -> str:
    """Return a digest in the object store's format."""
    return "SHA-256=" + base64.urlsafe_b64encode(found.digest()).decode()
