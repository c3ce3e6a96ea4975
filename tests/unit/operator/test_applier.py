"""Applier: owners, unchanged objects, edited children, statuses, objects of others, and objects that are gone."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import COMPONENTS, GRAPHS, SECRETS, SERVICES, ObjectKind
from dynamo.operator.applier import Applier, NotControlled
from dynamo.operator.reconcile.names import MANAGED_BY
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, ObjectRef, Plan
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject

WANTED = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "space", "labels": {"a": "b"}},
    "spec": {"ports": [1]},
}
NOW = "2026-01-01T00:00:00Z"
WEB = ("services", "space", "web")


class Subject:
    """A graph with its view and applier."""

    def __init__(self, store: KubeStore) -> None:
        self.store = store
        self.view = ClusterView(store)
        for kind in (GRAPHS, COMPONENTS):
            self.view.watch(kind)
        self.view.watch(SERVICES, "a")
        self.applier = Applier(store, self.view, store)
        self.graph = store.put(GRAPHS, {"metadata": {"name": "chat", "namespace": "space"}, "spec": {}})

    async def run(self, **plan: Any) -> list[str]:
        """Write a plan; return the requests."""
        self.store.calls.clear()
        owner = self.view.get(GRAPHS, "space", "chat") or self.graph
        await self.applier.write_objects(Plan(**plan), owner, GRAPHS)
        await self.applier.write_status(Plan(**plan), owner, GRAPHS, NOW)
        await turns(20)
        return list(self.store.calls)


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    made = Subject(KubeStore())
    made.view.start()
    await turns(20)
    yield made
    await made.view.close()


async def test_applied_object_has_its_owner_as_controller(subject: Subject) -> None:
    assert await subject.run(apply=[WANTED]) == ["get Service web", "apply Service web"]
    reference = subject.store.objects[WEB]["metadata"]["ownerReferences"]
    uid = subject.graph["metadata"]["uid"]
    assert [(one["kind"], one["name"], one["uid"], one["controller"]) for one in reference] == [
        ("DynamoGraphDeployment", "chat", uid, True)
    ]


async def test_unchanged_object_is_not_written_again(subject: Subject) -> None:
    await subject.run(apply=[WANTED])
    assert await subject.run(apply=[WANTED]) == []


@pytest.mark.parametrize(
    ("edit", "calls"),
    [
        (lambda value: value["spec"].update(ports=[2]), ["apply Service web"]),
        (lambda value: value["metadata"].update(labels={"a": "c"}), ["apply Service web"]),
        # Without the labels of the view it is no longer seen.
        (lambda value: value["metadata"].update(labels={}), ["get Service web", "apply Service web"]),
    ],
)
async def test_edited_object_is_restored(subject: Subject, edit: Any, calls: list[str]) -> None:
    await subject.run(apply=[WANTED])
    value = subject.store.objects[WEB]
    changed = {**value, "metadata": dict(value["metadata"]), "spec": dict(value["spec"])}
    edit(changed)
    subject.store.put(SERVICES, changed)
    await turns(20)
    assert await subject.run(apply=[WANTED]) == calls
    assert subject.store.objects[WEB]["spec"] == {"ports": [1]}
    assert await subject.run(apply=[WANTED]) == []


async def test_additional_foreign_labels_are_preserved(subject: Subject) -> None:
    await subject.run(apply=[WANTED])
    value = subject.store.objects[WEB]
    subject.store.put(SERVICES, {**value, "metadata": {**value["metadata"], "labels": {"a": "b", "c": "d"}}})
    await turns(20)
    assert await subject.run(apply=[WANTED]) == []


async def test_deleted_object_is_recreated(subject: Subject) -> None:
    await subject.run(apply=[WANTED])
    subject.store.remove(SERVICES, "space", "web")
    await turns(20)
    assert await subject.run(apply=[WANTED]) == ["get Service web", "apply Service web"]


@pytest.mark.parametrize("owner", [None, {"kind": "Other", "name": "x", "uid": "u", "controller": True}])
async def test_foreign_object_is_refused_and_not_changed(subject: Subject, owner: Any) -> None:
    foreign: KubeObject = {"metadata": {"name": "web", "namespace": "space"}, "spec": {"ports": [9]}}
    if owner:
        foreign["metadata"]["ownerReferences"] = [owner]
    subject.store.put(SERVICES, foreign)
    with pytest.raises(NotControlled, match="Service web exists and is controlled by"):
        await subject.run(apply=[WANTED])
    assert subject.store.objects[WEB]["spec"] == {"ports": [9]}


async def test_status_is_written_only_when_it_differs(subject: Subject) -> None:
    assert await subject.run(status={"state": "pending"}) == ["apply DynamoGraphDeployment chat/status"]
    assert await subject.run(status={"state": "pending"}) == []
    assert await subject.run(status={"state": "successful"}) == ["apply DynamoGraphDeployment chat/status"]


async def test_defaults_that_the_server_adds_to_a_status_cause_no_further_write(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = subject.store.apply

    async def with_default(kind: Any, value: KubeObject, *more: Any, **named: Any) -> KubeObject:
        return await apply(kind, {**value, "status": {**value["status"], "extra": 1}}, *more, **named)

    monkeypatch.setattr(subject.store, "apply", with_default)
    assert await subject.run(status={"state": "pending"}) != []
    assert await subject.run(status={"state": "pending"}) == []


async def test_annotations_are_written_only_when_they_differ(subject: Subject) -> None:
    assert await subject.run(annotations={"a": "b"}) == ["patch DynamoGraphDeployment chat"]
    assert await subject.run(annotations={"a": "b"}) == []


async def test_changes_and_deletions_are_carried_out_in_order(subject: Subject) -> None:
    ref = ObjectRef("v1", "Service", "space", "web")
    await subject.run(apply=[WANTED])
    calls = await subject.run(patch=[ObjectPatch(ref, {"spec": {"ports": [3]}})], delete=[ref])
    assert calls == ["patch Service web", "delete Service web"]


async def test_events_are_recorded_after_the_writes(subject: Subject) -> None:
    await subject.run(events=[EventNote("Normal", "Ready", "all")])
    assert subject.store.events == [("Ready", "all")]


async def test_status_of_a_deleted_object_is_dropped(subject: Subject) -> None:
    del subject.store.objects["dynamographdeployments", "space", "chat"]
    assert await subject.run(status={"state": "pending"}) == ["apply DynamoGraphDeployment chat/status"]


async def test_cache_of_deleted_objects_is_cleared(subject: Subject) -> None:
    await subject.run(apply=[WANTED], status={"state": "pending"})
    assert len(subject.applier) == 2
    subject.store.remove(SERVICES, "space", "web")
    subject.store.remove(GRAPHS, "space", "chat")
    await turns(20)
    assert len(subject.applier) == 0


async def test_write_metrics_count_every_write(subject: Subject) -> None:
    await subject.run(apply=[WANTED], status={"state": "pending"}, annotations={"a": "b"})
    counts = subject.applier.counts
    assert (counts.applied, counts.patched, counts.deleted, counts.statuses, counts.total) == (1, 1, 0, 1, 3)


async def test_object_is_created_once_and_an_existing_foreign_one_is_used(subject: Subject) -> None:
    assert await subject.run(create=[WANTED]) == ["get Service web", "create Service web"]
    assert await subject.run(create=[{**WANTED, "spec": {"ports": [2]}}]) == []
    foreign = {**WANTED, "metadata": {"name": "own", "namespace": "space"}}
    subject.store.put(SERVICES, foreign)
    assert "create Service own" not in await subject.run(create=[foreign])
    assert await subject.run(create=[foreign]) == []


async def test_unowned_objects_are_created_first_and_not_updated(subject: Subject) -> None:
    free = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "free", "namespace": "space"}, "data": {}}
    calls = await subject.run(create_unowned=[free], apply=[WANTED])
    assert calls == ["create ConfigMap free", "get Service web", "apply Service web"]
    stored = subject.store.objects["configmaps", "space", "free"]
    assert "ownerReferences" not in stored["metadata"]
    await subject.run(create_unowned=[{**free, "data": {"a": "b"}}])
    assert subject.store.objects["configmaps", "space", "free"] == stored


def outdated(store: KubeStore, monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    """Remove fields of the status from the resource definition."""
    apply = store.apply

    async def applied(kind: ObjectKind, value: KubeObject, *args: Any, **named: Any) -> KubeObject:
        for field in fields:
            if field in value.get("status", {}):
                store.calls.append(f"refused {field}")
                raise KubeRefused(500, "", f"failed to …: .status.{field}: field not declared in schema")
        return await apply(kind, value, *args, **named)

    monkeypatch.setattr(store, "apply", applied)


async def test_status_is_written_without_fields_missing_from_an_old_definition(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    outdated(subject.store, monkeypatch, "placement", "other")
    status = {"state": "pending", "placement": {"score": 1}, "other": 2, "conditions": []}
    written = ["refused placement", "refused other", "apply DynamoGraphDeployment chat/status"]
    assert await subject.run(status=status) == written
    stored = subject.store.objects["dynamographdeployments", "space", "chat"]["status"]
    assert stored["state"] == "pending" and "placement" not in stored
    [condition] = stored["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "Reconciled", "False", "ResourceDefinitionOutdated",
    )  # fmt: skip
    assert ".status.placement, .status.other: install" in condition["message"]
    assert await subject.run(status=status) == []
    assert await subject.run(status={**status, "conditions": [condition]}) == []


async def test_status_refused_for_another_reason_is_a_failure(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise KubeRefused(500, "", "failed: .spec.a: field not declared in schema")

    monkeypatch.setattr(subject.store, "apply", refuse)
    with pytest.raises(KubeRefused):
        await subject.run(status={"state": "pending"})


async def test_reconcile_failure_is_a_condition_until_the_next_status(subject: Subject) -> None:
    await subject.run(status={"state": "pending", "conditions": []})
    owner = subject.view.get(GRAPHS, "space", "chat")
    assert owner is not None
    await subject.applier.write_failure("403 Forbidden: no", owner, GRAPHS, NOW)
    await turns(20)
    status = subject.store.objects["dynamographdeployments", "space", "chat"]["status"]
    assert (status["state"], status["conditions"][0]["message"]) == ("pending", "403 Forbidden: no")
    await subject.run(status={"state": "pending", "conditions": status["conditions"]})
    assert subject.store.objects["dynamographdeployments", "space", "chat"]["status"]["conditions"] == []


JOINT = {**WANTED, "metadata": {**WANTED["metadata"], "labels": {"a": "", MANAGED_BY: "dynamo-operator"}}}  # type: ignore[dict-item]


async def test_a_shared_object_has_an_owner_that_is_not_its_controller(subject: Subject) -> None:
    assert await subject.run(joint=[JOINT]) == ["get Service web", "apply Service web"]
    [reference] = subject.store.objects[WEB]["metadata"]["ownerReferences"]
    assert (reference["name"], reference["controller"], reference["blockOwnerDeletion"]) == ("chat", False, False)
    assert await subject.run(joint=[JOINT]) == []


async def test_deleted_shared_object_is_recreated(subject: Subject) -> None:
    notified: list[str] = []
    subject.view.listen(GRAPHS, lambda key: notified.append(key[1]))
    await subject.run(joint=[JOINT])
    notified.clear()
    subject.store.remove(SERVICES, "space", "web")
    await turns(20)
    assert notified == ["chat"]
    assert await subject.run(joint=[JOINT]) == ["get Service web", "apply Service web"]


async def test_foreign_object_is_not_shared(subject: Subject) -> None:
    subject.store.put(SERVICES, {"metadata": {"name": "web", "namespace": "space"}, "spec": {"ports": [9]}})
    assert "apply Service web" not in await subject.run(joint=[JOINT])
    assert subject.store.objects[WEB]["spec"] == {"ports": [9]}


async def test_subresource_response_does_not_replace_the_cached_object(subject: Subject) -> None:
    await subject.run(apply=[WANTED])
    before = subject.view.get(SERVICES, "space", "web")
    ref = ObjectRef("v1", "Service", "space", "web")
    calls = await subject.run(patch=[ObjectPatch(ref, {"spec": {"replicas": 2}}, "scale")])
    assert calls == ["patch Service web/scale"]
    assert before is not None and "replicas" not in before["spec"]


KEYS = ObjectRef("v1", "Secret", "space", "keys")


async def test_key_pair_is_created_once_and_owned_by_every_owner(subject: Subject) -> None:
    assert await subject.run(keys=[KEYS]) == ["get Secret keys", "create Secret keys"]
    secret = subject.store.objects["secrets", "space", "keys"]
    private, public = (base64.b64decode(secret["data"][name]) for name in ("private.key", "private.key.pub"))
    assert load_ssh_private_key(private, None).public_key() == load_ssh_public_key(public)  # type: ignore[union-attr]
    assert await subject.run(keys=[KEYS]) == ["get Secret keys"]
    secret["metadata"]["ownerReferences"] = [{"uid": "another", "name": "other", "kind": "DynamoGraphDeployment"}]
    assert await subject.run(keys=[KEYS]) == ["get Secret keys", "apply Secret keys"]
    assert subject.store.objects["secrets", "space", "keys"]["data"] == secret["data"]


async def test_existing_foreign_keys_are_used_unchanged(subject: Subject) -> None:
    subject.store.put(SECRETS, {"metadata": {"name": "keys", "namespace": "space"}, "data": {}})
    assert await subject.run(keys=[KEYS]) == ["get Secret keys"]
