"""Division of namespaces between operators: one that is restricted to a namespace holds a Lease there, others skip it.

    scope = OwnedNamespace(client, "team", identity)    # operator of one namespace
    scope = OtherNamespaces(client)                     # operator of the cluster: skips namespaces with a live Lease

A Lease is live for its duration after it was last seen to change, measured with the clock of the observer: clocks of
machines may differ.
"""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeListing, KubeRefused, KubeUnavailable, WatchChange
from dynamo.k8s.informer import Informer, ObjectKey
from dynamo.k8s.kinds import LEASES, ObjectKind
from dynamo.k8s.leader import ObservedLease
from dynamo.k8s.times import micro_time
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

LEASE = "dynamo-operator-namespace-scope"
DURATION_S = 30
RENEW_S = 10.0
FORBIDDEN = "403 "
"""Beginning of the error of an account without access to Leases: no namespace is skipped then."""
CHECK_S = 5.0
"""Interval at which expired Leases are looked for; nothing is sent."""
MANAGER = "dynamo-operator-namespace-scope"
OnScope = Callable[[str], None]
"""Receives a namespace that is no longer excluded."""


class LeaseClient(Protocol):
    """Reads and writes Leases: `KubeClient`, or a fake in tests."""

    async def list(
        self, kind: ObjectKind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> KubeListing: ...
    def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> AsyncIterator[WatchChange]: ...
    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...
    async def apply(
        self, kind: ObjectKind, value: KubeObject, namespace: str | None = None, *, manager: str
    ) -> KubeObject: ...
    async def delete(self, kind: ObjectKind, name: str, namespace: str | None = None) -> object: ...


class NamespaceScope(Protocol):
    """Decides which namespaces an operator leaves to others."""

    @property
    def waits_for(self) -> str:
        """What has to be read before the scope is known; empty once it is."""

    def excludes(self, namespace: str) -> bool: ...
    def start(self, on_freed: OnScope) -> None: ...
    async def acquire(self) -> None: ...
    async def close(self) -> None: ...


class EveryNamespace:
    """Scope of an operator that has the cluster for itself."""

    waits_for = ""

    def excludes(self, namespace: str) -> bool:
        """Return False."""
        return False

    def start(self, on_freed: OnScope) -> None:
        """Do nothing."""

    async def acquire(self) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Do nothing."""


class OtherNamespaces:
    """Scope of the cluster's operator: all namespaces without a live Lease of another operator."""

    def __init__(self, client: LeaseClient, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._leases: dict[str, ObservedLease] = {}
        self._excluded: set[str] = set()
        self._informer = Informer(NamedLeases(client), LEASES, on_change=self._on_lease, clock=self._clock)
        self._on_freed: OnScope = lambda _: None
        self._tasks = TaskOwner("namespace scope")

    @property
    def waits_for(self) -> str:
        """The Leases with the failure of their informer, until they were listed; nothing if they may not be read."""
        if self._informer.is_synced or self._informer.error.startswith(FORBIDDEN):
            return ""
        return f"leases: {self._informer.error}" if self._informer.error else "leases"

    def excludes(self, namespace: str) -> bool:
        """Return whether another operator has a namespace."""
        return namespace in self._excluded

    def start(self, on_freed: OnScope) -> None:
        """Watch the Leases; call `on_freed` with each namespace whose Lease expires or is removed."""
        self._on_freed = on_freed
        self._tasks.supervise(self._informer.run, "leases", clock=self._clock)
        self._tasks.supervise(self._expire, "expiry", clock=self._clock)

    async def acquire(self) -> None:
        """Return at once: this operator holds no Lease."""

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.cancel_and_wait()

    def _on_lease(self, key: ObjectKey, value: KubeObject | None) -> None:
        namespace = key[0]
        if value is None:
            self._leases.pop(namespace, None)
        else:
            self._leases.setdefault(namespace, ObservedLease()).observe(value, self._clock.now())
        self._update(namespace)

    def _update(self, namespace: str) -> None:
        lease = self._leases.get(namespace)
        is_live = lease is not None and not lease.is_free("", DURATION_S, self._clock.now())
        if is_live and namespace not in self._excluded:
            self._excluded.add(namespace)
            logger.info("namespace %s is left to operator %s", namespace, lease.holder if lease else "")
        elif not is_live and namespace in self._excluded:
            self._excluded.discard(namespace)
            logger.info("namespace %s has no operator of its own any more", namespace)
            self._on_freed(namespace)

    async def _expire(self) -> None:
        while True:
            await self._clock.sleep(CHECK_S)
            if self._informer.is_connected:  # During an outage renewals are not seen, and nothing can be written.
                for namespace in list(self._excluded):
                    self._update(namespace)


class NamedLeases:
    """Source of an informer with the Leases of one name only: nodes renew theirs every few seconds."""

    def __init__(self, client: LeaseClient) -> None:
        self._client = client
        self._fields = f"metadata.name={LEASE}"

    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing:
        """Return the Leases."""
        return await self._client.list(kind, namespace, labels, fields=self._fields)

    def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = ""
    ) -> AsyncIterator[WatchChange]:
        """Yield the changes of the Leases."""
        return self._client.watch(kind, revision, namespace, labels, fields=self._fields)


class OwnedNamespace:
    """Scope of an operator of one namespace, whose Lease it renews. While it cannot, it reconciles nothing."""

    waits_for = ""

    def __init__(self, client: LeaseClient, namespace: str, identity: str, clock: Clock | None = None) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._clock = clock or SystemClock()
        self._held_until = 0.0
        self._on_freed: OnScope = lambda _: None
        self._error = ""
        self._tasks = TaskOwner("namespace scope")

    def excludes(self, namespace: str) -> bool:
        """Return whether the Lease is not held at present, so that the cluster's operator may reconcile."""
        return self._clock.now() >= self._held_until

    def start(self, on_freed: OnScope) -> None:
        """Call `on_freed` when the Lease is held again."""
        self._on_freed = on_freed

    async def acquire(self) -> None:
        """Write the Lease, as often as it takes, and keep it from then on."""
        while not await self._renew():
            await self._clock.sleep(RENEW_S)
        self._tasks.supervise(self._keep, "lease", clock=self._clock)

    async def close(self) -> None:
        """Remove the Lease, so that another operator takes the namespace at once."""
        await self._tasks.cancel_and_wait()
        if not self._held_until:
            return
        try:
            found = await self._client.get(LEASES, LEASE, self._namespace)
            if found is not None and (found.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._client.delete(LEASES, LEASE, self._namespace)
        except (KubeRefused, KubeUnavailable) as error:
            logger.warning("failed to remove lease %s/%s: %s", self._namespace, LEASE, error)

    async def _keep(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            was_excluded = self.excludes(self._namespace)
            if await self._renew() and was_excluded:
                self._on_freed(self._namespace)

    async def _renew(self) -> bool:
        began = self._clock.now()
        time = micro_time(self._clock.wall())
        spec = {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S, "renewTime": time}
        value = {"metadata": {"name": LEASE, "namespace": self._namespace}, "spec": spec}
        try:
            await self._client.apply(LEASES, value, self._namespace, manager=MANAGER)
        except (KubeRefused, KubeUnavailable) as error:
            if str(error) != self._error:
                logger.warning("failed to renew lease %s/%s: %s", self._namespace, LEASE, error)
            self._error = str(error)
            return False
        self._error = ""
        self._held_until = began + DURATION_S
        return True
