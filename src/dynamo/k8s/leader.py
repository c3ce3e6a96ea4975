"""Leader election: of the processes that share a Lease, at most one is the leader.

    election = LeaderElection(client, LeaseName("dynamo-system", "dynamo-operator"), process_identity(), on_lost=stop)
    election.start(); await election.wait_until_leader(); ...; await election.close()

The algorithm is client-go's. Every write carries the version of the lease that was read, so that of two candidates that
write at the same time one is refused. A candidate takes a lease over when it has not seen it change for the duration
of the lease, measured with its own clock: times in the lease are for people, and clocks of machines may differ. The
leader stops being one when it has not renewed the lease within the renewal deadline, which is shorter.
"""

import asyncio
import logging
import random
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynamo.core.boundaries import ErrorBoundary, logged
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import LEASES, ObjectKind
from dynamo.k8s.times import micro_time
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

CONFLICT = 409
JITTER = 1.2
"""Candidates wait up to this many retry intervals longer, so that they do not compete at the same moment."""
RELEASE_S = 5.0
RELEASE_ATTEMPTS = 3
RELEASED_DURATION_S = 1


class LeaseName(NamedTuple):
    """Place of a lease."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimings:
    """Durations of an election; the defaults are those of client-go."""

    duration_s: int = 15
    """Time for which other candidates wait after the last change of the lease."""
    renew_deadline_s: float = 10.0
    """Time without a renewal after which the leader stops being one."""
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > JITTER * self.retry_s > 0:
            raise ConfigError(
                f"lease duration {self.duration_s} s, renewal deadline {self.renew_deadline_s:g} s, retry interval"
                f" {self.retry_s:g} s: the duration must be longer than the deadline, and the deadline longer than"
                f" {JITTER} times the interval"
            )


class LeaseStore(Protocol):
    """Reads and writes leases: `KubeClient`, or a fake in tests."""

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...
    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject: ...
    async def replace(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject: ...


class ObservedLease:
    """The lease as a candidate last saw it, and when it saw it change."""

    def __init__(self) -> None:
        self.value: KubeObject | None = None
        self.changed_at = 0.0

    @property
    def spec(self) -> KubeObject:
        """The fields of the election."""
        return (self.value or {}).get("spec") or {}

    @property
    def holder(self) -> str:
        """Identity of the holder; empty if the lease is free or absent."""
        return str(self.spec.get("holderIdentity") or "")

    def observe(self, value: KubeObject | None, now: float) -> None:
        """Store a lease that was read or written. Changes of its metadata are no sign of life of its holder."""
        before = self.spec
        is_first = self.value is None
        self.value = value
        if is_first or self.spec != before:
            self.changed_at = now

    def is_free(self, identity: str, default_duration_s: float, now: float) -> bool:
        """Return whether a candidate may write the lease."""
        duration_s = self.spec.get("leaseDurationSeconds") or default_duration_s
        return self.holder in {"", identity} or now >= self.changed_at + duration_s

    def taken_by(self, identity: str, duration_s: int, wall: float) -> KubeObject:
        """Return the spec with which a candidate acquires or renews the lease."""
        time = micro_time(wall)
        transitions = self.spec.get("leaseTransitions") or 0
        acquired = {"acquireTime": time, "leaseTransitions": transitions + (self.value is not None)}
        if self.holder == identity:
            acquired = {"acquireTime": self.spec.get("acquireTime") or time, "leaseTransitions": transitions}
        mine = {"holderIdentity": identity, "leaseDurationSeconds": duration_s, "renewTime": time}
        return {**self.spec, **mine, **acquired}


class LeaderElection:
    """One candidate. After it lost the lease, it is a candidate again."""

    def __init__(
        self,
        leases: LeaseStore,
        at: LeaseName,
        identity: str,
        *,
        timings: LeaseTimings | None = None,
        on_lost: Callable[[], object] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Call `on_lost` when the lease is lost, not when it is released. `identity` must be unique to the process."""
        assert identity, "expected an identity"
        self.identity = identity
        self._leases = leases
        self._at = at
        self._timings = timings or LeaseTimings()
        self._on_lost = on_lost
        self._clock = clock or SystemClock()
        self._lease = ObservedLease()
        self._is_fresh = False
        """Whether `_lease` is the result of this candidate's last write, so that it is renewed without reading it."""
        self._has_written = False
        """Whether the lease may be this candidate's: a request without a response may have succeeded."""
        self._acquired = asyncio.Event()
        self._held_until = 0.0
        self._error = ""
        self._tasks = TaskOwner("leader election")

    @property
    def is_leader(self) -> bool:
        """Whether this candidate is the leader now. False from the renewal deadline on, even if nothing else runs."""
        return self._acquired.is_set() and self._clock.now() < self._held_until

    @property
    def leader(self) -> str:
        """Identity of the holder as last seen; empty if there is none."""
        return self._lease.holder

    async def wait_until_leader(self) -> None:
        """Return when this candidate is the leader."""
        await self._acquired.wait()

    def start(self) -> None:
        """Begin to compete for the lease."""
        self._tasks.supervise(self._compete, "candidate", clock=self._clock)

    async def close(self) -> None:
        """Stop competing, and release the lease so that another candidate acquires it at once.

        What requires the lease must have stopped before.
        """
        await self._tasks.cancel_and_wait()
        self._acquired.clear()
        if not self._has_written:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._release()
        except (DynamoException, TimeoutError) as error:
            logger.warning("failed to release lease %s/%s: %s", *self._at, error or "no response")

    async def _compete(self) -> None:
        retry_s = self._timings.retry_s
        while True:
            await self._attempt()
            self._step_down_if_lost()
            if self._acquired.is_set():
                wait_s = min(retry_s, max(0.0, self._held_until - self._clock.now()))
            else:
                wait_s = retry_s * random.uniform(1.0, 1.0 + JITTER)
            await self._clock.sleep(wait_s)
            self._step_down_if_lost()

    async def _attempt(self) -> None:
        """Acquire or renew the lease if this candidate may. A failure is logged, and retried by the caller."""
        limit_s = self._timings.renew_deadline_s
        if self._acquired.is_set():
            limit_s = max(0.0, self._held_until - self._clock.now())
        with ErrorBoundary(self._failed):  # Whatever fails, the loss of the lease is noticed in time.
            async with asyncio.timeout(limit_s):
                await self._write()
            self._error = ""

    async def _write(self) -> None:
        namespace, name = self._at
        if not self._is_fresh:
            value = await self._leases.get(LEASES, name, namespace)
            self._observe(value)
        if not self._lease.is_free(self.identity, self._timings.duration_s, self._clock.now()):
            return
        began = self._clock.now()  # The renewal counts from before the request: other candidates see it later.
        spec = self._lease.taken_by(self.identity, self._timings.duration_s, self._clock.wall())
        self._has_written = True
        if self._lease.value is None:
            metadata = {"name": name, "namespace": namespace}
            value = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
            self._observe(await self._leases.create(LEASES, value, namespace))
        else:
            self._observe(await self._leases.replace(LEASES, {**self._lease.value, "spec": spec}, namespace))
        self._is_fresh = True
        self._held_until = began + self._timings.renew_deadline_s
        if not self._acquired.is_set():
            logger.info("acquired lease %s/%s as %s", namespace, name, self.identity)
            self._acquired.set()

    def _observe(self, value: KubeObject | None) -> None:
        before = self._lease.holder
        self._lease.observe(value, self._clock.now())
        if self._lease.holder not in {before, "", self.identity}:
            logger.info("lease %s/%s is held by %s", *self._at, self._lease.holder)

    def _step_down_if_lost(self) -> None:
        is_held = self._lease.holder == self.identity and self._clock.now() < self._held_until
        if is_held or not self._acquired.is_set():
            return
        self._acquired.clear()
        self._is_fresh = False
        logger.warning("lost lease %s/%s: %s", *self._at, self._error or f"held by {self.leader or 'none'}")
        with logged(logger, "callback for the loss of a lease failed"):
            self._on_lost()

    def _failed(self, error: Exception) -> None:
        self._is_fresh = False
        message = str(error) or "no response in time"
        is_conflict = isinstance(error, KubeRefused) and error.code == CONFLICT
        if message != self._error and not is_conflict:  # In a conflict another candidate was faster.
            logger.warning("failed to update lease %s/%s: %s", *self._at, message)
        self._error = message

    async def _release(self) -> None:
        namespace, name = self._at
        for _ in range(RELEASE_ATTEMPTS):
            self._observe(await self._leases.get(LEASES, name, namespace))
            if self._lease.value is None or self._lease.holder != self.identity:
                return
            time = micro_time(self._clock.wall())
            free = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_DURATION_S, "renewTime": time}
            value = {**self._lease.value, "spec": {**self._lease.spec, **free, "acquireTime": time}}
            try:
                self._observe(await self._leases.replace(LEASES, value, namespace))
            except KubeRefused as error:
                if error.code != CONFLICT:
                    raise
            else:
                logger.info("released lease %s/%s", namespace, name)
                return


def process_identity() -> str:
    """Return a unique identity for this process, which begins with the name of its host or pod."""
    return f"{socket.gethostname()}_{uuid.uuid4()}"
