"""Event recorder: writes core/v1 Events about objects, which `kubectl describe` and `dynamo deploy status` show.

    events = EventRecorder(client, "dynamo-operator")
    events.start(); events.record(GRAPHS, graph, "Warning", "InvalidSpec", "spec.components: ..."); await events.close()

Recording never waits and never fails: events are queued, and lost if the queue is full or the API server refuses them.
A repeat of an event increments the count of the one that was written. The limits are those of client-go.
"""

import asyncio
import itertools
import logging
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dynamo.core.backoff import Backoff
from dynamo.core.boundaries import logged
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoException
from dynamo.core.tasks import TaskOwner
from dynamo.core.token_bucket import TokenBucket
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import EVENTS, ObjectKind
from dynamo.k8s.times import seconds_time
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

NAME_CHARS = 253
MESSAGE_CHARS = 1024
REASON_CHARS = 128
DEFAULT_NAMESPACE = "default"
"""Namespace of events about objects without one."""
NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS, SERVER_ERROR = 404, 409, 429, 500
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 10.0
REFUSED_ATTEMPTS = 5
"""Attempts of a write that the server refuses temporarily; while it cannot be reached, the queue waits."""
FLUSH_S = 2.0
EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLimits:
    """Bounds of a recorder."""

    known: int = 4096
    """Events whose repeats are counted, and objects whose rate is limited; the least recent ones are forgotten."""
    pending: int = 1000
    """Events that wait to be written."""
    burst: int = 25
    """Writes about one object at once."""
    refill_s: float = 300.0
    """Interval of further writes about one object."""


class EventStore(Protocol):
    """Writes events: `KubeClient`, or a fake in tests."""

    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject: ...
    async def patch(
        self, kind: ObjectKind, name: str, value: KubeObject, namespace: str | None = None
    ) -> KubeObject: ...


class Subject(NamedTuple):
    """Object that an event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class EventIdentity(NamedTuple):
    """What two events have in common if the second is a repeat of the first."""

    subject: Subject
    type: EventType
    reason: str
    message: str


@dataclass(slots=True)
class _Known:
    """One event with its repeats."""

    first: float
    last: float
    count: int = 0
    name: str = ""
    """Name of the written object; empty if there is none."""
    candidate: str = ""
    """Name under which it is being created."""
    refusals: int = 0


@dataclass(slots=True)
class RecordedCounts:
    """Numbers of events since the start."""

    written: int = 0
    suppressed: int = 0
    """Repeats and events beyond the rate of their object; the count of a repeat is written later."""
    lost: int = 0
    """Events that found the queue full, or that the server refused."""


class EventRecorder:
    """Queue of events and their writer."""

    def __init__(
        self,
        store: EventStore,
        component: str,
        *,
        instance: str = "",
        limits: EventLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Name `component` as the source of the events, and `instance`, such as a pod, as its process."""
        self._store = store
        self._source = {"component": component}
        self._reporter = {"reportingComponent": component, "reportingInstance": instance}
        self._limits = limits or EventLimits()
        self._clock = clock or SystemClock()
        self._known: OrderedDict[EventIdentity, _Known] = OrderedDict()
        self._budgets: OrderedDict[Subject, TokenBucket] = OrderedDict()
        self._pending: OrderedDict[EventIdentity, _Known] = OrderedDict()
        self._available = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._names = itertools.count(int(self._clock.wall() * 1e9))
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        self._error = ""
        self._tasks = TaskOwner("event recorder")
        self.counts = RecordedCounts()

    @property
    def pending(self) -> int:
        """Number of events that wait to be written."""
        return len(self._pending)

    def start(self) -> None:
        """Begin to write events."""
        self._tasks.supervise(self._write_all, "writer", clock=self._clock)

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Write what is queued, for `timeout_s` at most, and stop."""
        if len(self._tasks):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
            except TimeoutError:
                logger.warning("%d events were not written before the end", len(self._pending))
        await self._tasks.cancel_and_wait()

    def record(self, kind: ObjectKind, about: KubeObject, event_type: EventType, reason: str, message: str) -> None:
        """Record an event about an object."""
        with logged(logger, "failed to record event %s", reason):
            subject = subject_of(kind, about)
            text = message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 3] + "..."
            self._record(EventIdentity(subject, event_type, reason[:REASON_CHARS], text))

    def _record(self, identity: EventIdentity) -> None:
        now = self._clock.wall()
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = _Known(first=now, last=now)
            if len(self._known) > self._limits.known:
                self._known.popitem(last=False)
        self._known.move_to_end(identity)
        known.count += 1
        known.last = now
        if identity in self._pending:
            return
        if not self._may_write(identity.subject):
            self.counts.suppressed += 1
        elif len(self._pending) >= self._limits.pending:
            self.counts.lost += 1
        else:
            self._pending[identity] = known
            self._empty.clear()
            self._available.set()

    def _may_write(self, subject: Subject) -> bool:
        """Take a token of the object, if it has one."""
        budget = self._budgets.get(subject)
        if budget is None:
            budget = self._budgets[subject] = TokenBucket(self._limits.burst, 1.0 / self._limits.refill_s)
            if len(self._budgets) > self._limits.known:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(subject)
        now = self._clock.now()
        if budget.wait_s(now, 1.0) > 0:
            return False
        budget.take(1.0, now)
        return True

    async def _write_all(self) -> None:
        while True:
            while self._pending:
                identity, known = self._pending.popitem(last=False)
                if not await self._attempt(identity, known):
                    self._pending[identity] = known
                    self._pending.move_to_end(identity, last=False)
                    await self._clock.sleep(self._backoff.next(random.random()))
            self._empty.set()
            self._available.clear()
            await self._available.wait()

    async def _attempt(self, identity: EventIdentity, known: _Known) -> bool:
        """Write an event. Return False if it is to be written again later, because of a temporary failure."""
        try:
            await self._write(identity, known)
        except KubeUnavailable as error:
            self._log_failure(error)
            return False
        except DynamoException as error:
            self._log_failure(error)
            if isinstance(error, KubeRefused) and is_temporary(error) and known.refusals < REFUSED_ATTEMPTS - 1:
                known.refusals += 1
                return False
            self.counts.lost += 1
        else:
            self.counts.written += 1
            self._error = ""
            self._backoff.reset()
        known.refusals = 0
        return True

    async def _write(self, identity: EventIdentity, known: _Known) -> None:
        namespace = identity.subject.namespace or DEFAULT_NAMESPACE
        if known.name:
            try:
                await self._count(known, known.name, namespace)
            except KubeRefused as error:
                if error.code != NOT_FOUND:
                    raise
                known.name = known.candidate = ""  # Events expire after an hour.
            else:
                return
        known.candidate = known.candidate or self._name(identity.subject)
        try:
            await self._store.create(EVENTS, self._event(identity, known, known.candidate), namespace)
        except KubeRefused as error:
            if error.code != CONFLICT:
                raise
            # A request without a response created it, with the count of that time.
            await self._count(known, known.candidate, namespace)
        known.name = known.candidate

    async def _count(self, known: _Known, name: str, namespace: str) -> None:
        patch = {"count": known.count, "lastTimestamp": seconds_time(known.last)}
        await self._store.patch(EVENTS, name, patch, namespace)

    def _name(self, subject: Subject) -> str:
        suffix = f".{next(self._names):x}"
        return subject.name[: NAME_CHARS - len(suffix)].rstrip(".-") + suffix

    def _event(self, identity: EventIdentity, known: _Known, name: str) -> KubeObject:
        subject = identity.subject
        about = {"apiVersion": subject.api_version, "kind": subject.kind, "name": subject.name, "uid": subject.uid}
        if subject.namespace:
            about["namespace"] = subject.namespace
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": subject.namespace or DEFAULT_NAMESPACE},
            "involvedObject": about,
            "type": identity.type,
            "reason": identity.reason,
            "message": identity.message,
            "source": self._source,
            **self._reporter,
            "firstTimestamp": seconds_time(known.first),
            "lastTimestamp": seconds_time(known.last),
            "count": known.count,
        }

    def _log_failure(self, error: Exception) -> None:
        if str(error) != self._error:
            self._error = str(error)
            logger.warning("failed to write an event: %s", error)


def subject_of(kind: ObjectKind, value: KubeObject) -> Subject:
    """Return the reference of an object."""
    metadata = value["metadata"]
    namespace = metadata.get("namespace") or ""
    return Subject(kind.api_version, kind.kind, namespace, metadata["name"], metadata.get("uid") or "")


def is_temporary(error: KubeRefused) -> bool:
    """Return whether the same request may succeed later."""
    return error.code == TOO_MANY_REQUESTS or error.code >= SERVER_ERROR
