"""View of the cluster: informers of the kinds that the operator reads, and the children of each owner."""

import asyncio
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.informer import Informer, ObjectKey, ObjectSource, ObjectTexts
from dynamo.k8s.kinds import ObjectKind
from dynamo.operator.reconcile.plan import ObjectRef
from dynamo.protocols.kubernetes.common import KubeObject

ABSENT_RETRY_S = 30.0
"""Interval in which a kind is looked for that the API server does not have."""
OnObject = Callable[[ObjectKey], None]


class ClusterView:
    """Objects as last seen, by kind. A change of an object is reported for itself and for its owner."""

    def __init__(self, source: ObjectSource, namespace: str | None = None, clock: Clock | None = None) -> None:
        """View all namespaces, or one."""
        self._source = source
        self._namespace = namespace
        self._clock = clock or SystemClock()
        self._informers: defaultdict[ObjectKind, list[Informer]] = defaultdict(list)
        """Informers of each kind, one for each selector."""
        self._children: defaultdict[str, dict[ObjectRef, ObjectKind]] = defaultdict(dict)
        """Children by the uid of their controller."""
        self._owners: dict[ObjectRef, KubeObject] = {}
        """Reference to the controller of each child."""
        self._co_owners: dict[ObjectRef, Sequence[KubeObject]] = {}
        """References to the owners of each object that several share."""
        self._listeners: defaultdict[str, list[OnObject]] = defaultdict(list)
        """Listeners by the name of a kind."""
        self._forget: list[Callable[[ObjectRef], None]] = []
        self._tasks = TaskOwner("cluster view")
        self._running: defaultdict[ObjectKind, list[asyncio.Task[None]]] = defaultdict(list)
        self._is_started = False
        self._late: set[ObjectKind] = set()

    def watch(self, kind: ObjectKind, labels: str = "", *, is_required: bool = True) -> None:
        """View the objects of a kind that match a label selector, with those of earlier calls, from `start` on or from now on.

        The view is complete without a kind that is not required, or that is added after `start`.
        """
        informer = Informer(
            self._source,
            kind,
            self._namespace,
            labels,
            on_change=lambda key, value: self._changed(kind, key, value),
            absent_retry_s=ABSENT_RETRY_S,
            objects=ObjectTexts(),
            clock=self._clock,
        )
        self._informers[kind].append(informer)
        if self._is_started or not is_required:
            self._late.add(kind)
        if self._is_started:
            self._run(kind, informer)

    def unwatch(self, kind: ObjectKind) -> None:
        """End the view of a kind, whose objects are gone with it."""
        informers = self._informers.pop(kind)
        self._late.discard(kind)
        for task in self._running.pop(kind, ()):
            task.cancel()
        for key in {key for one in informers for key in one.objects}:
            self._changed(kind, key, None)

    def listen(self, kind: ObjectKind, listener: OnObject) -> None:
        """Call `listener` with the key of each object of a kind that changed, or whose child changed."""
        self._listeners[kind.kind].append(listener)

    def on_deleted(self, forget: Callable[[ObjectRef], None]) -> None:
        """Call `forget` with each object that is gone."""
        self._forget.append(forget)

    def start(self) -> None:
        """Begin to list and watch."""
        self._is_started = True
        for kind, informer in self._each():
            self._run(kind, informer)

    async def close(self) -> None:
        """Stop all watches."""
        await self._tasks.cancel_and_wait()

    @property
    def is_synced(self) -> bool:
        """Whether every kind was listed once, or does not exist: its resource definition may be installed later."""
        return not self.waits_for

    @property
    def waits_for(self) -> list[str]:
        """Kinds that were not listed yet, with the failure of their informer."""
        return [
            f"{kind.plural}: {one.error}" if one.error else kind.plural
            for kind, one in self._each()
            if not (one.is_synced or one.is_absent or kind in self._late)
        ]

    def has(self, kind: ObjectKind) -> bool:
        """Return whether the objects of a kind are in the view."""
        found = self._informers.get(kind, ())
        return bool(found) and all(one.is_synced for one in found)

    def is_watched(self, kind: ObjectKind) -> bool:
        """Return whether a kind is viewed, though maybe not listed yet."""
        return kind in self._informers

    def has_all(self, kind: ObjectKind) -> bool:
        """Return whether the view has every object of a kind, not only those with a label."""
        return any(one.is_synced and not one.labels for one in self._informers.get(kind, ()))

    def count(self, kind: ObjectKind) -> int:
        """Return the number of objects of a kind."""
        return len(self.objects(kind))

    def objects(self, kind: ObjectKind) -> Mapping[ObjectKey, KubeObject]:
        """Return the objects of a kind."""
        return ChainMap(*(one.objects for one in self._informers.get(kind, ())))

    def get(self, kind: ObjectKind, namespace: str, name: str) -> KubeObject | None:
        """Return an object, or None if it is not in the view."""
        found = (one.objects.get((namespace, name)) for one in self._informers.get(kind, ()))
        return next((one for one in found if one is not None), None)

    def children(self, owner: KubeObject, kind: ObjectKind) -> list[KubeObject]:
        """Return the objects of a kind that an object controls, by name."""
        refs = [ref for ref, found in self._children.get(owner["metadata"]["uid"], {}).items() if found == kind]
        found = (self.get(kind, ref.namespace, ref.name) for ref in sorted(refs))
        return [one for one in found if one is not None]

    def store(self, kind: ObjectKind, value: KubeObject) -> None:
        """Put the response to a write into the view."""
        for informer in self._informers.get(kind, ()):
            if informer.store(value):
                self._index(kind, value)

    def _each(self) -> Iterable[tuple[ObjectKind, Informer]]:
        return [(kind, one) for kind, found in self._informers.items() for one in found]

    def _run(self, kind: ObjectKind, informer: Informer) -> None:
        name = f"{kind.plural} {informer.labels}".rstrip()
        self._running[kind].append(self._tasks.supervise(informer.run, name, clock=self._clock))

    def _changed(self, kind: ObjectKind, key: ObjectKey, value: KubeObject | None) -> None:
        ref = ObjectRef(kind.api_version, kind.kind, *key)
        owner, sharing = self._owners.get(ref), self._co_owners.get(ref, ())
        if value is None and self.get(kind, *key) is None:
            self._unindex(ref)
            self._co_owners.pop(ref, None)
            for forget in self._forget:
                forget(ref)
        elif value is not None:
            owner = self._index(kind, value) or owner
        for listener in self._listeners.get(kind.kind, ()):
            listener(key)
        for one in sharing if owner is None else (owner,):
            for listener in self._listeners.get(one["kind"], ()):
                listener((ref.namespace, one["name"]))

    def _index(self, kind: ObjectKind, value: KubeObject) -> KubeObject | None:
        metadata = value["metadata"]
        ref = ObjectRef(kind.api_version, kind.kind, metadata.get("namespace", ""), metadata["name"])
        owner = next((one for one in metadata.get("ownerReferences") or () if one.get("controller")), None)
        known = self._owners.get(ref)
        if known is not None and (owner is None or owner["uid"] != known["uid"]):
            self._unindex(ref)
        if owner is not None:
            self._owners[ref] = owner
            self._children[owner["uid"]][ref] = kind
        elif metadata.get("ownerReferences"):
            self._co_owners[ref] = metadata["ownerReferences"]
        return owner

    def _unindex(self, ref: ObjectRef) -> None:
        owner = self._owners.pop(ref, None)
        if owner is not None:
            children = self._children[owner["uid"]]
            children.pop(ref, None)
            if not children:
                del self._children[owner["uid"]]
