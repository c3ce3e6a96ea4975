"""Applier: carries out plans, and writes only what differs from what it last wrote or from what the cluster has."""

import base64
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.core.errors import DynamoException
from dynamo.k8s.client import JSON_PATCH, MERGE, KubeRefused
from dynamo.k8s.kinds import BY_NAME, SECRETS, ObjectKind
from dynamo.operator.failure_condition import (
    OUTDATED,
    has_conditions,
    outdated_message,
    undeclared_field,
    with_failure,
    without_failure,
    without_field,
)
from dynamo.operator.reconcile.conditions import FAILED
from dynamo.operator.reconcile.names import MANAGED_BY
from dynamo.operator.reconcile.plan import ObjectRef, Plan, ref_of
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

NOT_FOUND, CONFLICT = 404, 409
MAX_MISSING = 16
"""Fields of a status that are left out, one more with each request, before the write fails."""
FIELD_MANAGER = "dynamo-operator"


class KubeWriter(Protocol):
    """Writes objects: `KubeClient`, or a fake in tests."""

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...
    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject: ...
    async def apply(
        self,
        kind: ObjectKind,
        value: KubeObject,
        namespace: str | None = None,
        *,
        manager: str,
        subresource: str | None = None,
    ) -> KubeObject: ...
    async def patch(
        self,
        kind: ObjectKind,
        name: str,
        value: Any,
        namespace: str | None = None,
        *,
        content_type: str = MERGE,
        subresource: str | None = None,
    ) -> KubeObject: ...
    async def delete(self, kind: ObjectKind, name: str, namespace: str | None = None) -> object: ...


class EventLog(Protocol):
    """Records events: `EventRecorder`, or a fake in tests."""

    def record(self, kind: ObjectKind, about: KubeObject, event_type: Any, reason: str, message: str) -> None: ...


class NotControlled(DynamoException):
    """An object of the required name exists and is not the operator's; the message names both."""


class LastWrite(NamedTuple):
    """What was last written to one object."""

    digest: bytes
    version: object
    """Generation after the write, or the resource version of kinds without one."""


@dataclass(slots=True)
class WriteCounts:
    """Writes since the start."""

    applied: int = 0
    patched: int = 0
    deleted: int = 0
    statuses: int = 0

    @property
    def total(self) -> int:
        """Sum of all writes."""
        return self.applied + self.patched + self.deleted + self.statuses


class Applier:
    """Carries out plans. What it wrote is kept per object, and forgotten when the object is gone."""

    def __init__(self, writer: KubeWriter, view: ClusterView, events: EventLog) -> None:
        self._writer = writer
        self._view = view
        self._events = events
        self._written: dict[ObjectRef, LastWrite] = {}
        self._statuses: dict[ObjectRef, LastWrite] = {}
        self._joint: dict[ObjectRef, dict[str, LastWrite]] = {}
        """Last writes of objects that owners share, by the uid of the owner."""
        self.counts = WriteCounts()
        view.on_deleted(self._forget)

    def __len__(self) -> int:
        """Number of objects of which the last write is known."""
        return len(self._written) + len(self._statuses) + len(self._joint)

    async def write_objects(self, plan: Plan, owner: KubeObject, kind: ObjectKind) -> bool:
        """Write the objects of a plan, in order: new and complete ones, changes, deletions. Return whether one was written.

        A failed write ends the pass; the next one starts again from what the cluster has. Raise `NotControlled` for an
        object that belongs to something else.
        """
        before = self.counts.total
        for value in plan.create_unowned:
            await self._create_unowned(value)
        for value in plan.create:
            await self._create(owned(value, owner, kind))
        for ref in plan.keys:
            await self._ensure_keys(ref, owner, kind)
        for value in plan.joint:
            await self._apply_joint(value, owner, kind)
        for value in plan.apply:
            await self._apply(owned(value, owner, kind))
        for patch in plan.patch:
            target = BY_NAME[patch.ref.api_version, patch.ref.kind]
            content_type = JSON_PATCH if isinstance(patch.value, list) else MERGE
            changed = await self._writer.patch(
                target,
                patch.ref.name,
                patch.value,
                patch.ref.namespace,
                content_type=content_type,
                subresource=patch.subresource,
            )
            self.counts.patched += 1
            if patch.subresource is None:  # The response to another one is not the object.
                self._view.store(target, changed)
        for ref in plan.delete:
            await self._writer.delete(BY_NAME[ref.api_version, ref.kind], ref.name, ref.namespace)
            self.counts.deleted += 1
        return self.counts.total != before

    async def write_status(self, plan: Plan, owner: KubeObject, kind: ObjectKind, now: str) -> None:
        """Write the annotations and the status of the reconciled object, then record the events."""
        try:
            owner = await self._annotate(plan.annotations, owner, kind)
            if plan.status is not None:
                await self._write_status(without_failure(plan.status), owner, kind, now)
        except KubeRefused as error:
            if error.code != NOT_FOUND:
                raise
            return  # The object was deleted in the meantime, and its children are collected.
        for event in plan.events:
            self._events.record(kind, owner, event.type, event.reason, event.message)

    async def write_failure(self, message: str, owner: KubeObject, kind: ObjectKind, now: str) -> None:
        """Report in the status of an object why it cannot be reconciled; the rest of the status stays."""
        if not has_conditions(kind):
            return
        try:
            await self._write_status(with_failure(owner, FAILED, message, now), owner, kind, now)
        except KubeRefused as error:  # The failure that is reported is in the event as well.
            logger.warning("cannot report a failure of %s %s: %s", kind.kind, owner["metadata"]["name"], error)

    async def _apply(self, value: KubeObject) -> None:
        ref = ref_of(value)
        kind = BY_NAME[ref.api_version, ref.kind]
        observed = self._view.get(kind, ref.namespace, ref.name)
        digest, known = digest_of(value), self._written.get(ref)
        if (
            observed is None and known is None and not self._view.has_all(kind)
        ):  # It may exist without the labels of the view.
            observed = await self._writer.get(kind, ref.name, ref.namespace)
        if observed is not None:
            check_controller(value, observed)
            if known == LastWrite(digest, version_of(observed)) and has_metadata(observed, value):
                return
        stored = await self._writer.apply(kind, value, ref.namespace, manager=FIELD_MANAGER)
        self.counts.applied += 1
        self._view.store(kind, stored)
        if self._view.get(kind, ref.namespace, ref.name) is not None:
            self._written[ref] = LastWrite(digest, version_of(stored))

    async def _apply_joint(self, value: KubeObject, owner: KubeObject, kind: ObjectKind) -> None:
        """Apply an object as one of its owners. One of that name that is not the operator's is left alone."""
        wanted = owned(value, owner, kind, is_controller=False)
        ref, uid = ref_of(wanted), owner["metadata"]["uid"]
        target = BY_NAME[ref.api_version, ref.kind]
        observed = self._view.get(target, ref.namespace, ref.name)
        if observed is None:  # It may exist without the labels of the view.
            observed = await self._writer.get(target, ref.name, ref.namespace)
        if observed is not None:
            if (observed["metadata"].get("labels") or {}).get(MANAGED_BY) != FIELD_MANAGER:
                return
            known = self._joint.get(ref, {}).get(uid)
            if known == LastWrite(digest_of(wanted), version_of(observed)) and has_metadata(observed, wanted):
                return
        manager = f"{FIELD_MANAGER}-{uid}"  # Of its own, so that it does not remove the references of other owners.
        stored = await self._writer.apply(target, wanted, ref.namespace, manager=manager)
        self.counts.applied += 1
        self._view.store(target, stored)
        if self._view.get(target, ref.namespace, ref.name) is not None:
            self._joint.setdefault(ref, {})[uid] = LastWrite(digest_of(wanted), version_of(stored))

    async def _ensure_keys(self, ref: ObjectRef, owner: KubeObject, kind: ObjectKind) -> None:
        """Make a secret with a key pair if there is none, and become an owner of one that the operator made."""
        named = {"name": ref.name, "namespace": ref.namespace, "labels": {MANAGED_BY: FIELD_MANAGER}}
        value = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": named}
        wanted = owned(value, owner, kind, is_controller=False)
        observed = await self._writer.get(SECRETS, ref.name, ref.namespace)
        if observed is None:
            private, public = new_key_pair()
            data = {"private.key": private, "private.key.pub": public}
            await self._writer.create(SECRETS, {**wanted, "type": "Opaque", "data": data}, ref.namespace)
        elif (observed["metadata"].get("labels") or {}).get(MANAGED_BY) != FIELD_MANAGER or has_metadata(
            observed, wanted
        ):
            return
        else:
            manager = f"{FIELD_MANAGER}-{owner['metadata']['uid']}"
            await self._writer.apply(SECRETS, wanted, ref.namespace, manager=manager)
        self.counts.applied += 1

    async def _create(self, value: KubeObject) -> None:
        ref = ref_of(value)
        kind = BY_NAME[ref.api_version, ref.kind]
        if ref in self._written or self._view.get(kind, ref.namespace, ref.name) is not None:
            return
        if await self._writer.get(kind, ref.name, ref.namespace) is None:
            self._view.store(kind, await self._writer.create(kind, value, ref.namespace))
            self.counts.applied += 1
        else:
            self._written[ref] = LastWrite(b"", None)  # Not of the operator: it is not looked for again.

    async def _create_unowned(self, value: KubeObject) -> None:
        ref = ref_of(value)
        kind = BY_NAME[ref.api_version, ref.kind]
        if self._view.get(kind, ref.namespace, ref.name) is not None:
            return
        try:
            stored = await self._writer.create(kind, value, ref.namespace)
        except KubeRefused as error:
            if error.code != CONFLICT:  # It exists, without the labels of the view.
                raise
            return
        self.counts.applied += 1
        self._view.store(kind, stored)

    async def _annotate(self, annotations: Mapping[str, str | None], owner: KubeObject, kind: ObjectKind) -> KubeObject:
        present = owner["metadata"].get("annotations") or {}
        changed = {name: value for name, value in annotations.items() if present.get(name) != value}
        if not changed:
            return owner
        metadata = owner["metadata"]
        patch = {"metadata": {"annotations": changed}}
        stored = await self._writer.patch(kind, metadata["name"], patch, metadata.get("namespace"))
        self.counts.patched += 1
        self._view.store(kind, stored)
        return stored

    async def _write_status(self, status: KubeObject, owner: KubeObject, kind: ObjectKind, now: str) -> None:
        metadata = owner["metadata"]
        ref = ObjectRef(kind.api_version, kind.kind, metadata.get("namespace", ""), metadata["name"])
        present = owner.get("status") or {}
        written = LastWrite(digest_of(status), digest_of(present))
        if status == present or self._statuses.get(ref) == written:
            return  # The second case: the server adds defaults to what is written.
        stored = await self._apply_status(status, owner, kind, now)
        self.counts.statuses += 1
        self._view.store(kind, stored)
        if self._view.get(kind, ref.namespace, ref.name) is not None:
            self._statuses[ref] = LastWrite(digest_of(status), digest_of(stored.get("status") or {}))

    async def _apply_status(self, status: KubeObject, owner: KubeObject, kind: ObjectKind, now: str) -> KubeObject:
        """Write a status; without the fields, named in a condition and an event, that an old resource definition lacks."""
        metadata = owner["metadata"]
        named = {"name": metadata["name"], "namespace": metadata.get("namespace", "")}
        missing: list[str] = []
        while True:
            try:
                return await self._writer.apply(
                    kind,
                    {"metadata": named, "status": status},
                    metadata.get("namespace"),
                    manager=FIELD_MANAGER,
                    subresource="status",
                )
            except KubeRefused as error:
                field = undeclared_field(error)
                rest = without_field(status, field) if field and len(missing) < MAX_MISSING else None
                if field is None or rest is None:
                    raise
            missing.append(field)
            message = outdated_message(kind, missing)
            status = rest
            if "conditions" in rest:
                status = with_failure({**owner, "status": rest}, OUTDATED, message, now)
            self._events.record(kind, owner, "Warning", OUTDATED, message)

    def _forget(self, ref: ObjectRef) -> None:
        self._written.pop(ref, None)
        self._joint.pop(ref, None)
        self._statuses.pop(ref, None)


def new_key_pair() -> tuple[str, str]:
    """Return a private and a public SSH key, each as the base64 text of a secret."""
    # Imported here, because few clusters need a key and the package takes 7 MB.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return base64.b64encode(private).decode(), base64.b64encode(public + b"\n").decode()


def owned(value: KubeObject, owner: KubeObject, kind: ObjectKind, *, is_controller: bool = True) -> KubeObject:
    """Return an object with its owner, as the controller unless it has several owners."""
    metadata = owner["metadata"]
    reference = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": is_controller,
        "blockOwnerDeletion": is_controller,
    }
    return {**value, "metadata": {**value["metadata"], "ownerReferences": [reference]}}


def check_controller(wanted: KubeObject, observed: KubeObject) -> None:
    """Raise `NotControlled` if another object controls an object, or if it was made by someone else."""
    mine = wanted["metadata"]["ownerReferences"][0]
    references = observed["metadata"].get("ownerReferences") or []
    other = next((one for one in references if one.get("controller") and one["uid"] != mine["uid"]), None)
    if other is None and references:
        return
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    owner = f"{other['kind']} {other['name']}" if other else "no object"
    raise NotControlled(f"{what} exists and is controlled by {owner}: expected {mine['kind']} {mine['name']}")


def digest_of(value: object) -> bytes:
    """Return a digest of JSON data."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


def version_of(value: KubeObject) -> object:
    """Return what changes when the content of an object does: its generation if it has one."""
    metadata = value["metadata"]
    return metadata.get("uid"), metadata.get("generation") or metadata.get("resourceVersion")


def has_metadata(observed: KubeObject, wanted: KubeObject) -> bool:
    """Return whether an object has the labels, annotations and owner that it should have; it may have more."""
    have, want = observed["metadata"], wanted["metadata"]
    return all(
        (want.get(name) or {}).items() <= (have.get(name) or {}).items() for name in ("labels", "annotations")
    ) and any(one["uid"] == want["ownerReferences"][0]["uid"] for one in have.get("ownerReferences") or [])
