"""Division of namespaces between operators: by a live Lease, which expires, is removed, or cannot be renewed."""

from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeListing, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import LEASES
from dynamo.operator.namespace_scope import CHECK_S, DURATION_S, LEASE, RENEW_S, OtherNamespaces, OwnedNamespace
from dynamo.protocols.kubernetes.common import KubeObject


class UnavailableKubeStore(KubeStore):
    """Cluster whose API server can be unavailable."""

    is_away = False

    async def apply(self, *args: Any, **named: Any) -> KubeObject:
        if self.is_away:
            raise KubeUnavailable("away")
        return await super().apply(*args, **named)


class Subject:
    """A cluster with an operator of the namespace `team` and one of the cluster."""

    def __init__(self) -> None:
        self.store = UnavailableKubeStore()
        self.clock = ManualClock()
        self.owner = OwnedNamespace(self.store, "team", "me", self.clock)
        self.others = OtherNamespaces(self.store, self.clock)
        self.freed: list[str] = []

    async def begin(self) -> None:
        self.others.start(self.freed.append)
        self.owner.start(self.freed.append)
        await self.owner.acquire()
        await turns(50)

    async def pass_time(self, seconds: float) -> None:
        """Advance in steps, in which the tasks run."""
        for _ in range(int(seconds / CHECK_S)):
            self.clock.advance(CHECK_S)
            await turns(50)

    async def end(self) -> None:
        await self.owner.close()
        await self.others.close()
        await turns(50)


@pytest.fixture
def subject() -> Subject:
    return Subject()


async def test_cluster_operator_skips_a_namespace_while_its_lease_is_renewed(subject: Subject) -> None:
    await subject.begin()
    await subject.pass_time(10 * DURATION_S)
    assert (subject.others.excludes("team"), subject.others.excludes("other")) == (True, False)
    assert not subject.owner.excludes("team")
    assert subject.store.calls.count(f"apply Lease {LEASE}") == 1 + 10 * DURATION_S / RENEW_S
    lease = subject.store.objects["leases", "team", LEASE]
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("me", DURATION_S)
    await subject.end()


async def test_removed_lease_releases_the_namespace_at_once(subject: Subject) -> None:
    await subject.begin()
    await subject.owner.close()
    await turns(50)
    assert (subject.others.excludes("team"), subject.freed) == (False, ["team"])
    assert ("leases", "team", LEASE) not in subject.store.objects
    await subject.end()


async def test_lease_of_a_dead_operator_expires(subject: Subject) -> None:
    await subject.begin()
    await subject.owner._tasks.cancel_and_wait()
    await subject.pass_time(DURATION_S - CHECK_S)
    assert subject.others.excludes("team")
    await subject.pass_time(2 * CHECK_S)
    assert (subject.others.excludes("team"), subject.freed) == (False, ["team"])
    await subject.end()


async def test_operator_that_cannot_renew_its_lease_pauses_and_resumes(subject: Subject) -> None:
    await subject.begin()
    subject.store.is_away = True
    await subject.pass_time(DURATION_S + RENEW_S)
    assert subject.owner.excludes("team")
    subject.store.is_away = False
    await subject.pass_time(RENEW_S)
    assert not subject.owner.excludes("team")
    assert subject.freed.count("team") == 2  # For the cluster's operator, and for the resumed one.
    assert subject.others.excludes("team")
    await subject.end()


async def test_foreign_lease_is_not_removed(subject: Subject) -> None:
    await subject.begin()
    lease = subject.store.objects["leases", "team", LEASE]
    subject.store.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "other"}})
    await subject.end()
    assert ("leases", "team", LEASE) in subject.store.objects


async def test_only_leases_with_the_operator_name_exclude_a_namespace(subject: Subject) -> None:
    spec = {"holderIdentity": "node", "leaseDurationSeconds": 40}
    subject.store.put(LEASES, {"metadata": {"name": "node-0", "namespace": "team"}, "spec": spec})
    assert subject.others.waits_for == "leases"
    subject.others.start(subject.freed.append)
    await turns(50)
    assert (subject.others.waits_for, subject.others.excludes("team")) == ("", False)
    await subject.end()


async def test_operator_without_lease_permission_skips_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> KubeListing:
        raise KubeRefused(403, "Forbidden", "leases is forbidden")

    subject = Subject()
    monkeypatch.setattr(subject.store, "list", refuse)
    subject.others.start(subject.freed.append)
    await turns(50)
    assert (subject.others.waits_for, subject.others.excludes("team")) == ("", False)
    await subject.end()
