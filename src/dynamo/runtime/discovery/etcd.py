"""Discovery in etcd: records under Dynamo's keys, attached to one lease whose id is the process's instance id.

    v1/instances/dynamo/backend/generate/2040a1f9995c8d05          lease 2040a1f9995c8d05

A process uses one member at a time, in a session: it renews the lease, writes records, and lists every watched bucket
once and then watches it. Any failure ends the whole session, the views remain, and the next member is tried. The lease
shows what happened meanwhile. If it still exists, the registry has kept its data, and watches resume at their last
revision. If it is gone, it is granted again under the same id, all records of this process are written again and the
buckets are listed. In both cases other processes get a lease's time to do the same before a missing record counts as
removed (`Roster`).
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument, WorkerUnavailable
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import INSTANCES
from dynamo.runtime.discovery.base import Roster, Watch, new_id
from dynamo.runtime.discovery.contact import Contact
from dynamo.runtime.transports.etcd.client import EtcdMember, Listing
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions, etcd_options
from dynamo.runtime.transports.etcd.protocol import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    PERMISSION_DENIED,
    Compacted,
    EtcdLease,
    EtcdRefused,
    EtcdUnavailable,
    WatchMessage,
)

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1  # A member restart or leader election takes about as long.
RELIST_S = 60.0  # Upper bound for the age of an inconsistent view, whatever its cause.
REPAIR_S = 5.0  # Interval of the check for removed or overwritten own records; one small request.
REFUSED_RETRY_S = 10.0  # Permissions are changed manually.

Record = tuple[str, str]
"""Bucket and key."""


class Member(Protocol):
    """Member of the cluster: `EtcdMember`, or a fake in tests."""

    async def connect(self) -> None: ...
    def close(self) -> None: ...
    async def probe(self, prefix: bytes) -> None: ...
    async def put(self, key: bytes, value: bytes, lease_id: int) -> None: ...
    async def delete(self, key: bytes) -> None: ...
    async def list(self, prefix: bytes) -> Listing: ...
    async def grant(self, lease_id: int, ttl_s: int) -> int: ...
    async def renew(self, lease_id: int) -> int: ...
    async def revoke(self, lease_id: int) -> None: ...
    async def held_by(self, lease_id: int) -> set[bytes]: ...
    def watch(self, prefix: bytes, start_revision: int) -> AsyncIterator[WatchMessage]: ...


class EtcdDiscovery:
    """Registry in an etcd cluster."""

    def __init__(
        self,
        lease_id: int | None = None,
        options: EtcdOptions | None = None,
        *,
        clock: Clock | None = None,
        make_member: Callable[[Address], Member] | None = None,
    ) -> None:
        self._options = options if options is not None else etcd_options()
        self._clock = clock or SystemClock()
        self._lease = EtcdLease(lease_id or new_id(), self._options.lease_ttl_s)
        self._make_member = make_member or self._member_maker()
        self._tasks = TaskOwner("discovery.etcd")
        self._backoff = Backoff(RETRY_FIRST_S, self._lease.interval_s)
        self._own: dict[Record, bytes] = {}
        self._unwritten: dict[Record, asyncio.Future[bool]] = {}
        self._rosters: dict[str, Roster] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._member: Member | None = None
        self._patient_until = 0.0
        self._contact: Contact | None = None
        self._is_closed = False

    # Interface of every registry -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Wait for the first response of etcd. Raise `ConfigError` after the startup timeout."""
        await self._start().wait()

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        await self.connect()
        record = bucket, key
        self._own[record] = value
        try:
            written = await self._write_soon(record)
        except InvalidArgument:
            if self._own.get(record) == value:
                del self._own[record]
            raise
        if not written:
            logger.warning("etcd unreachable: writing %s/%s after the outage", bucket, key)

    async def put_persistent(self, bucket: str, key: str, value: bytes) -> None:
        contact = self._start()
        await contact.wait()
        if self._member is None:
            raise WorkerUnavailable(f"etcd {contact.names} unreachable: {contact.why}")
        try:
            await self._member.put(_name((bucket, key)), value, lease_id=0)
        except EtcdRefused as error:
            raise _refused((bucket, key), error) from None
        except EtcdUnavailable as error:
            raise WorkerUnavailable(f"failed to write {bucket}/{key} to etcd {contact.names}: {error}") from None

    async def delete(self, bucket: str, key: str) -> None:
        self._own.pop((bucket, key), None)
        if bucket in self._rosters:
            self._rosters[bucket].forget(key)
        if self._contact is not None:
            await self._write_soon((bucket, key))

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        contact = self._start()
        await contact.wait()
        roster = self._rosters.get(bucket, Roster())
        if self._member is not None:
            try:
                records = await _list(self._member, bucket)
            except (EtcdUnavailable, EtcdRefused) as error:
                contact.why = str(error)
            else:
                return {key: roster.view.records[key] for key in roster.missing} | records.texts
        if roster.view.is_synced:
            return dict(roster.view.records)
        raise WorkerUnavailable(f"etcd {contact.names} unreachable and {bucket} is not watched: {contact.why}")

    def watch(self, bucket: str) -> Watch:
        self._start()
        if bucket not in self._rosters:
            self._rosters[bucket] = Roster()
            self._wake.set()
        return self._rosters[bucket].view.watch()

    async def close(self) -> None:
        self._is_closed = True
        self._own.clear()
        if self._member is not None:
            try:
                await self._member.revoke(self._lease.id)
            except (EtcdUnavailable, EtcdRefused) as error:
                logger.warning("failed to revoke etcd lease %x: %s; it will expire", self._lease.id, error)
        for roster in self._rosters.values():
            roster.view.close()
        await self._tasks.cancel_and_wait()

    @property
    def lease_id(self) -> int:
        """Return the id of the lease of this process's records; it is kept across outages."""
        return self._lease.id

    # Status --------------------------------------------------------------------------------------------------------

    @property
    def is_reachable(self) -> bool:
        """Return False while etcd is unreachable and views are stale."""
        return self._member is not None

    @property
    def is_sound(self) -> bool:
        """Return False from a crash of the watcher (an internal error) until it is synchronized again."""
        return self._tasks.is_sound

    # Sessions ------------------------------------------------------------------------------------------------------

    def _start(self) -> Contact:
        if self._contact is None:
            self._contact = Contact(self._options, self._clock)
            work = functools.partial(self._live, self._contact)
            self._tasks.supervise(work, "sessions", clock=self._clock)
        return self._contact

    async def _live(self, contact: Contact) -> None:
        """Run one session after another, with whichever member responds."""
        addresses = list(self._options.addresses)
        random.shuffle(addresses)
        for address in itertools.cycle(addresses):
            try:
                await self._session(self._make_member(address), contact)
            except* (EtcdUnavailable, EtcdRefused, ssl.SSLCertVerificationError) as group:
                contact.lost(address, _first(group))
            if self._is_closed:  # A task group that fails at the same time swallows the cancellation.
                return
            await self._clock.sleep(self._backoff.next(random.random()))

    async def _session(self, member: Member, contact: Contact) -> None:
        """Run a session until a failure, and raise its error."""
        try:
            await member.connect()
            await member.probe(_prefix(INSTANCES))
            is_remembered = await self._take_lease(member)
            self._begin(member, contact, is_remembered=is_remembered)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renew_forever(member))
                group.create_task(self._tend_forever(member, group))
                group.create_task(self._look_again_forever(member))
                group.create_task(self._repair_forever(member))
                group.create_task(self._end_patience())
        finally:
            member.close()
            self._end_session()

    async def _take_lease(self, member: Member) -> bool:
        """Renew the lease, or grant it again under its id; return True if it still existed."""
        lease = self._lease
        sent_at = self._clock.now()
        if lease.expires_at and (ttl := await member.renew(lease.id)):
            lease.renewed(sent_at, ttl)
            return True
        sent_at = self._clock.now()
        try:
            ttl = await member.grant(lease.id, self._options.lease_ttl_s)
        except EtcdRefused as error:
            if error.code != FAILED_PRECONDITION:
                raise
            ttl = await member.renew(lease.id)  # It was granted, but the response was lost.
            if not ttl:
                raise EtcdUnavailable(f"lease {lease.id:x} can be neither granted nor renewed") from None
        lease.renewed(sent_at, ttl)
        return False

    def _begin(self, member: Member, contact: Contact, *, is_remembered: bool) -> None:
        if contact.has_met:
            self._patient_until = self._clock.now() + self._lease.ttl_s
        if not is_remembered:
            for roster in self._rosters.values():
                roster.revision = 0
            for record in self._own:
                self._expect(record)
        contact.met("lease kept" if is_remembered else f"lease lost, registering {len(self._own)} record(s) again")
        self._member = member
        self._backoff.reset()

    def _end_session(self) -> None:
        self._member = None
        self._followers.clear()
        for record, waiting in list(self._unwritten.items()):
            if not waiting.done():
                waiting.set_result(False)
            self._unwritten[record] = asyncio.get_running_loop().create_future()

    # Tasks of a session --------------------------------------------------------------------------------------------

    async def _renew_forever(self, member: Member) -> None:
        lease = self._lease
        while True:
            await self._clock.sleep(max(0.0, lease.renew_at - self._clock.now()))
            sent_at = self._clock.now()
            ttl = await member.renew(lease.id)
            if not ttl:
                if self._is_closed:  # `close` has revoked it.
                    return
                raise EtcdUnavailable(f"lease {lease.id:x} expired")
            lease.renewed(sent_at, ttl)

    async def _tend_forever(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Write changed records and watch requested buckets, on demand."""
        while True:
            self._wake.clear()
            while self._unwritten:
                await self._write(member, next(iter(self._unwritten)))
            for bucket, roster in self._rosters.items():
                follower = self._followers.get(bucket)
                if follower is None or follower.done():
                    self._followers[bucket] = group.create_task(self._follow_as_allowed(member, bucket, roster))
            await self._wake.wait()

    async def _write(self, member: Member, record: Record) -> None:
        """Write or delete one record in etcd."""
        value = self._own.get(record)
        name = _name(record)
        try:
            if value is None:
                await member.delete(name)
            else:
                await member.put(name, value, self._lease.id)
        except EtcdRefused as error:
            if error.code == NOT_FOUND:
                raise EtcdUnavailable(f"lease {self._lease.id:x} expired") from None
            logger.warning("etcd rejected record %s/%s: %s", *record, error)
            waiting = self._unwritten.pop(record)
            waiting.set_exception(_refused(record, error))
            waiting.exception()  # Mark as retrieved: a rewritten record has no caller waiting.
            return
        if self._own.get(record) == value:
            self._unwritten.pop(record).set_result(True)

    async def _follow(self, member: Member, bucket: str, roster: Roster) -> None:
        """List a bucket unless its revision is known, then apply its changes."""
        prefix = _prefix(bucket)
        while True:
            if not roster.revision:
                listed = await _list(member, bucket)
                roster.replace(listed.texts, listed.revision, is_patient=self._is_patient())
            messages = member.watch(prefix, roster.revision + 1)
            try:
                async with contextlib.aclosing(messages):  # type: ignore[type-var]
                    async for message in messages:
                        self._apply(roster, message, len(prefix))
            except Compacted:
                roster.revision = 0

    async def _follow_as_allowed(self, member: Member, bucket: str, roster: Roster) -> None:
        while True:
            try:
                await self._follow(member, bucket, roster)
            except EtcdRefused as error:
                logger.warning("etcd denied watching %s (ETCD_AUTH_USERNAME): %s", bucket, error)
            await self._clock.sleep(REFUSED_RETRY_S)

    def _apply(self, roster: Roster, message: WatchMessage, prefix_bytes: int) -> None:
        for event in message.events:
            key = _text(event.kv.key[prefix_bytes:])
            if key is None:
                continue
            if event.type == "DELETE":
                roster.delete(key, is_patient=self._is_patient())
            else:
                roster.put(key, event.kv.value)
        if message.events and not message.fragment:
            roster.revision = message.events[-1].kv.mod_revision

    async def _look_again_forever(self, member: Member) -> None:
        """List every bucket again each minute, which corrects lost changes."""
        while True:
            await self._clock.sleep(RELIST_S * random.uniform(0.75, 1.25))
            for bucket, roster in self._rosters.items():
                roster.revision = 0
                if bucket in self._followers:
                    self._followers.pop(bucket).cancel()
            self._wake.set()

    async def _repair_forever(self, member: Member) -> None:
        while True:
            await self._clock.sleep(REPAIR_S * random.uniform(0.75, 1.25))
            await self._look_for_own(member)
            self._wake.set()

    async def _look_for_own(self, member: Member) -> None:
        """Find own records that another client removed or overwrote, which detaches them from the lease."""
        own = list(self._own)
        try:
            held = await member.held_by(self._lease.id)
        except EtcdRefused as error:
            logger.debug("failed to list the records of the lease: %s", error)
            return
        for record in own:
            if _name(record) not in held and record in self._own and record not in self._unwritten:
                logger.warning("record %s/%s was removed or overwritten by another client; writing it again", *record)
                self._expect(record)

    async def _end_patience(self) -> None:
        await self._clock.sleep(max(0.0, self._patient_until - self._clock.now()))
        for bucket, roster in self._rosters.items():
            if gone := roster.forget_missing():
                logger.warning("%d record(s) of %s were not registered again after the outage", gone, bucket)

    def _is_patient(self) -> bool:
        return self._clock.now() < self._patient_until

    # Writing -------------------------------------------------------------------------------------------------------

    def _expect(self, record: Record) -> "asyncio.Future[bool]":
        waiting = self._unwritten.get(record)
        if waiting is None:
            waiting = self._unwritten[record] = asyncio.get_running_loop().create_future()
        return waiting

    async def _write_soon(self, record: Record) -> bool:
        """Return True once the record is written, False if it is written after the outage."""
        waiting = self._expect(record)
        self._wake.set()
        if self._member is None:
            return False
        return await asyncio.shield(waiting)

    # Members ---------------------------------------------------------------------------------------------------------

    def _member_maker(self) -> Callable[[Address], Member]:
        options, timeout_s = self._options, self._lease.interval_s
        tls = options.tls()
        return lambda address: EtcdMember(address, options, tls, timeout_s)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Records of a bucket at one revision."""

    texts: dict[str, bytes]
    revision: int


async def _list(member: Member, bucket: str) -> _Listed:
    prefix = _prefix(bucket)
    listing = await member.list(prefix)
    named = ((_text(name[len(prefix) :]), value) for name, value in listing.records.items())
    return _Listed({key: value for key, value in named if key is not None}, listing.revision)


def _name(record: Record) -> bytes:
    return "/".join(record).encode()


def _prefix(bucket: str) -> bytes:
    return f"{bucket}/".encode()


def _text(name: bytes) -> str | None:
    """Return the key within its bucket; None for a name that no process of the cluster writes."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        logger.debug("ignoring key %r", name)
        return None


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first of the errors that ended a session; the others are consequences or unrelated."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def _refused(record: Record, error: EtcdRefused) -> DynamoException:
    what = f"etcd rejected record {record[0]}/{record[1]}: {error}"
    if error.code == PERMISSION_DENIED:
        return ConfigError(f"ETCD_AUTH_USERNAME: {what}")
    return InvalidArgument(what)
