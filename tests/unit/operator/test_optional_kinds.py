"""Optional kinds: the facts follow installed and enabled kinds, also when they change while the operator runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import (
    CLUSTER_TOPOLOGIES,
    GRAPHS,
    LEADER_WORKER_SETS,
    POD_CLIQUE_SETS,
    POD_GROUPS,
    QUEUES_OF_KAI,
    TOPOLOGY_BINDINGS,
    ObjectKind,
)
from dynamo.operator.optional_kinds import GROVE, LOOK_S, SYNC_POLL_S, OptionalKinds, OptionalSettings
from dynamo.operator.reconcile.names import GRAPH
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.view import ClusterView

NOTHING = ClusterFacts(topologies={})
ALL = {*GROVE, LEADER_WORKER_SETS, POD_GROUPS, QUEUES_OF_KAI}


class Subject:
    """Optional kinds of a cluster in memory, and a count of the changes."""

    def __init__(self, settings: OptionalSettings | None = None) -> None:
        self.store, self.clock = KubeStore(), ManualClock()
        self.view = ClusterView(self.store, clock=self.clock)
        self.view.watch(GRAPHS)
        self.changes = 0
        self.kinds = OptionalKinds(self.store, self.view, settings or OptionalSettings(), self._count, self.clock)
        self._task: asyncio.Task[None] | None = None

    def _count(self) -> None:
        self.changes += 1

    async def start(self, *kinds: ObjectKind) -> ClusterFacts:
        """Start with these kinds installed; return the facts."""
        self.store.kinds = set(kinds)
        await self.kinds.begin()
        self.view.start()
        await turns(30)
        self._task = asyncio.create_task(self.kinds.follow())
        await turns(5)
        return self.kinds.facts

    async def look(self) -> ClusterFacts:
        """Run the next poll; return the facts."""
        self.clock.advance(LOOK_S)
        await turns(30)
        self.clock.advance(SYNC_POLL_S)
        await turns(30)
        return self.kinds.facts

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self.view.close()


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    made = Subject()
    yield made
    await made.close()


async def test_cluster_without_optional_kinds_has_none(subject: Subject) -> None:
    assert await subject.start() == NOTHING
    assert await subject.look() == NOTHING
    assert subject.changes == 0


async def test_grove_is_available_only_with_all_its_kinds(subject: Subject) -> None:
    assert not (await subject.start(POD_CLIQUE_SETS)).has_grove
    subject.store.kinds = set(GROVE)
    assert (await subject.look()).has_grove
    assert subject.changes == 1


async def test_removed_kinds_delete_their_objects_from_the_view(subject: Subject) -> None:
    value = {"metadata": {"name": "chat", "namespace": "space", "labels": {GRAPH: "chat"}}, "spec": {}}
    subject.store.put(POD_CLIQUE_SETS, value)
    gone: list[str] = []
    subject.view.on_deleted(lambda ref: gone.append(ref.name))
    assert (await subject.start(*ALL)).has_grove
    assert subject.view.get(POD_CLIQUE_SETS, "space", "chat") is not None
    subject.store.kinds = {LEADER_WORKER_SETS}
    assert await subject.look() == replace(NOTHING, has_lws=True)
    assert (gone, subject.changes) == (["chat"], 1)
    assert subject.view.get(POD_CLIQUE_SETS, "space", "chat") is None
    assert subject.view.is_synced


async def test_unreachable_server_does_not_change_the_available_kinds(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await subject.start(*ALL)

    async def away(api_version: str) -> None:
        raise KubeUnavailable("away")

    monkeypatch.setattr(subject.store, "kinds_of", away)
    assert await subject.look() == before
    assert subject.changes == 0


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (OptionalSettings(), {"has_grove", "has_lws", "has_kai"}),
        (OptionalSettings(grove=False), {"has_lws", "has_kai"}),
        (OptionalSettings(lws=False), {"has_grove", "has_kai"}),
        (OptionalSettings(gang_scheduler="volcano"), {"has_grove", "has_lws", "has_volcano"}),
        (OptionalSettings(gang_scheduler="none"), {"has_grove", "has_lws"}),
    ],
)
async def test_settings_disable_installed_kinds(settings: OptionalSettings, wanted: set[str]) -> None:
    subject = Subject(settings)
    assert await subject.start(*ALL) == replace(NOTHING, **dict.fromkeys(wanted, True))
    await subject.close()


async def test_volcano_is_used_without_kai(subject: Subject) -> None:
    facts = await subject.start(POD_GROUPS)
    assert (facts.has_kai, facts.has_volcano) == (False, True)


@pytest.mark.parametrize("kind", [TOPOLOGY_BINDINGS, CLUSTER_TOPOLOGIES])
async def test_topologies_have_the_node_label_of_each_domain(kind: ObjectKind, subject: Subject) -> None:
    levels = [{"domain": "zone", "key": "z"}, {"domain": "rack", "key": "r"}]
    subject.store.put(kind, {"metadata": {"name": "gpus"}, "spec": {"levels": levels}})
    facts = await subject.start(kind)
    assert facts.topologies == {"gpus": {"zone": "z", "rack": "r"}}


async def test_unreadable_topologies_are_unknown(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subject.store.list

    async def refused(kind: ObjectKind, *rest: object, **more: object) -> object:
        if kind == TOPOLOGY_BINDINGS:
            raise KubeRefused(403, "Forbidden", "clustertopologybindings is forbidden")
        return await listed(kind, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(subject.store, "list", refused)
    assert (await subject.start(TOPOLOGY_BINDINGS)).topologies is None
    assert subject.view.is_synced
