"""Objects of a cluster in memory, behind the interfaces that the operator's shell uses."""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dynamo.k8s.client import KubeListing, KubeRefused, WatchChange
from dynamo.k8s.informer import has_labels
from dynamo.k8s.kinds import ObjectKind
from dynamo.protocols.kubernetes.common import KubeObject

Place = tuple[str, str, str]
"""Plural, namespace and name."""


class KubeStore:
    """Store that applies, patches and deletes objects as a server does, with one revision for all; records the calls."""

    def __init__(self) -> None:
        self.objects: dict[Place, KubeObject] = {}
        self.calls: list[str] = []
        self.lists: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.revision = 0
        self.kinds: set[ObjectKind] = set()
        """Optional kinds that the server has."""
        self._changes: list[tuple[str, WatchChange, KubeObject | None]] = []
        """Plural, change, and the object before it."""
        self._wake = asyncio.Event()

    def put(self, kind: ObjectKind, value: KubeObject) -> KubeObject:
        """Write an object as another client would."""
        metadata = value["metadata"]
        place = (kind.plural, metadata.get("namespace", ""), metadata["name"])
        known = self.objects.get(place)
        self.revision += 1
        stored = copy.deepcopy(value)
        generation = known["metadata"]["generation"] if known else 0
        is_changed = known is None or known.get("spec") != stored.get("spec")
        stored["metadata"] |= {
            "uid": known["metadata"]["uid"] if known else f"uid-{self.revision}",
            "resourceVersion": str(self.revision),
            "generation": generation + is_changed,
        }
        self.objects[place] = stored
        self._notify(kind, "MODIFIED" if known else "ADDED", stored, known)
        return copy.deepcopy(stored)

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None:
        self.calls.append(f"get {kind.kind} {name}")
        return copy.deepcopy(self.objects.get((kind.plural, namespace or "", name)))

    async def apply(
        self,
        kind: ObjectKind,
        value: KubeObject,
        namespace: str | None = None,
        *,
        manager: str,
        subresource: str | None = None,
    ) -> KubeObject:
        name = value["metadata"]["name"]
        self.calls.append(f"apply {kind.kind} {name}{'/' + subresource if subresource else ''}")
        known = self.objects.get((kind.plural, namespace or "", name))
        if subresource:
            if known is None:
                raise KubeRefused(404, "NotFound", name)
            return self.put(kind, {**known, "status": value["status"]})
        changed = {**(known or {}), **value, "metadata": {**(known or {}).get("metadata", {}), **value["metadata"]}}
        if known is not None and {**changed, "status": 0} == {**known, "status": 0}:
            return copy.deepcopy(known)
        return self.put(kind, changed)

    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        name = value["metadata"]["name"]
        self.calls.append(f"create {kind.kind} {name}")
        if (kind.plural, namespace or "", name) in self.objects:
            raise KubeRefused(409, "AlreadyExists", name)
        return self.put(kind, value)

    async def patch(
        self,
        kind: ObjectKind,
        name: str,
        value: Any,
        namespace: str | None = None,
        *,
        content_type: str = "",
        subresource: str | None = None,
    ) -> KubeObject:
        self.calls.append(f"patch {kind.kind} {name}{'/' + subresource if subresource else ''}")
        known = self.objects.get((kind.plural, namespace or "", name))
        if known is None:
            raise KubeRefused(404, "NotFound", name)
        if isinstance(value, list):
            return self.put(kind, operated(known, value))
        changed = copy.deepcopy(known)
        for part, fields in value.items():
            target = changed.setdefault(part, {})
            for field, given in fields.items():
                target[field] = {**target.get(field, {}), **given} if isinstance(given, dict) else given
        return self.put(kind, changed)

    async def delete(
        self, kind: ObjectKind, name: str, namespace: str | None = None, *, grace_s: int | None = None
    ) -> None:
        self.calls.append(f"delete {kind.kind} {name}{' at once' if grace_s == 0 else ''}")
        self.remove(kind, namespace or "", name)

    def remove(self, kind: ObjectKind, namespace: str, name: str) -> None:
        """Delete an object as another client would."""
        gone = self.objects.pop((kind.plural, namespace, name), None)
        if gone is not None:
            self.revision += 1
            gone["metadata"]["resourceVersion"] = str(self.revision)
            self._notify(kind, "DELETED", gone, gone)

    async def kinds_of(self, api_version: str) -> Sequence[ObjectKind]:
        return [one for one in self.kinds if one.api_version == api_version]

    async def list(
        self, kind: ObjectKind, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> KubeListing:
        self.lists.append(kind.kind)
        found = [
            copy.deepcopy(one)
            for (plural, _, _), one in self.objects.items()
            if plural == kind.plural and has_labels(one, labels) and has_name(one, fields)
        ]
        return KubeListing(found, str(self.revision))

    async def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> AsyncIterator[WatchChange]:
        position = 0
        while True:
            while position < len(self._changes):
                plural, change, before = self._changes[position]
                position += 1
                if plural != kind.plural or int(change.revision) <= int(revision):
                    continue
                if not has_name(change.object, fields):
                    continue
                if has_labels(change.object, labels):
                    yield copy.deepcopy(change)
                elif before is not None and has_labels(before, labels):  # It leaves the selection.
                    yield WatchChange("DELETED", copy.deepcopy(change.object))
            self._wake.clear()
            await self._wake.wait()

    def record(self, kind: ObjectKind, about: KubeObject, event_type: Any, reason: str, message: str) -> None:
        """Keep an event."""
        self.events.append((reason, message))

    def _notify(self, kind: ObjectKind, change: str, value: KubeObject, before: KubeObject | None) -> None:
        self._changes.append((kind.plural, WatchChange(change, copy.deepcopy(value)), copy.deepcopy(before)))
        self._wake.set()


def has_name(value: KubeObject, fields: str) -> bool:
    """Return whether an object matches a field selector `metadata.name=NAME`; others match all."""
    return not fields.startswith("metadata.name=") or fields == f"metadata.name={value['metadata']['name']}"


def operated(value: KubeObject, operations: list[KubeObject]) -> KubeObject:
    """Return an object after the operations `test` and `add` of a JSON patch."""
    changed: Any = copy.deepcopy(value)
    for operation in operations:
        *parts, last = operation["path"].split("/")[1:]
        target = changed
        for part in parts:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if operation["op"] == "test":
            if target[last] != operation["value"]:
                raise KubeRefused(422, "Invalid", operation["path"])
        else:
            target[last] = operation["value"]
    result: KubeObject = changed
    return result
