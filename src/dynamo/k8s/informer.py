"""Informer: a view of the objects of one kind, kept current by a list and a watch.

The view outlives failures of the API server: it keeps the last known objects, and after an outage the watch resumes at
the last revision, or the objects are listed again if the server no longer has that revision.
"""

import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableMapping
from contextlib import aclosing
from typing import Protocol

import msgspec

from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.k8s.client import GONE, KubeListing, KubeRefused, KubeUnavailable, WatchChange
from dynamo.k8s.kinds import ObjectKind
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

NOT_FOUND = 404
ABSENCES = 3
"""Responses in a row after which a kind counts as absent."""
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
ObjectKey = tuple[str, str]
"""Namespace and name."""
OnChange = Callable[[ObjectKey, KubeObject | None], None]
"""Receives each added or changed object, and None for a deleted one."""


class ObjectSource(Protocol):
    """Lists and watches objects: `KubeClient`, or a fake in tests."""

    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing: ...
    def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = ""
    ) -> AsyncIterator[WatchChange]: ...


class ObjectTexts(MutableMapping[ObjectKey, KubeObject]):
    """Objects kept as JSON text: a third of the memory of parsed ones. Each read parses the text, about 10 µs per object.

    For views of many objects that are read one at a time. What a reader changes in an object does not change the view.
    """

    def __init__(self) -> None:
        self._texts: dict[ObjectKey, bytes] = {}

    def __getitem__(self, key: ObjectKey) -> KubeObject:
        value: KubeObject = msgspec.json.decode(self._texts[key])
        return value

    def __setitem__(self, key: ObjectKey, value: KubeObject) -> None:
        self._texts[key] = msgspec.json.encode(value)

    def __delitem__(self, key: ObjectKey) -> None:
        del self._texts[key]

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[ObjectKey]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


class Informer:
    """View of the objects of one kind that match a label selector."""

    def __init__(
        self,
        source: ObjectSource,
        kind: ObjectKind,
        namespace: str | None = None,
        labels: str = "",
        *,
        on_change: OnChange,
        on_sync: Callable[[], None] = lambda: None,
        absent_retry_s: float = RETRY_MAX_S,
        objects: MutableMapping[ObjectKey, KubeObject] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Call `on_change` for every difference, and `on_sync` after each complete listing.

        A kind that the server does not have is looked for at intervals that grow to `absent_retry_s`. The view is kept in
        `objects`, by default a dict.
        """
        self._source = source
        self._kind = kind
        self._namespace = namespace
        self.labels = labels
        self._on_change = on_change
        self._on_sync = on_sync
        self._absence = Backoff(RETRY_FIRST_S, absent_retry_s)
        self._absences = 0
        """Responses in a row that the server does not have the kind."""
        self._clock = clock or SystemClock()
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        self._revision = ""
        """Revision at which the watch resumes; empty when the objects must be listed."""
        self.objects: MutableMapping[ObjectKey, KubeObject] = {} if objects is None else objects
        self.is_synced = False
        self.is_connected = False
        self.error = ""
        """The last failure."""

    @property
    def is_absent(self) -> bool:
        """Whether the server does not have the kind; a definition that was just created is not served at once."""
        return self._absences >= ABSENCES

    async def run(self) -> None:
        """Keep the view current until cancelled."""
        while True:
            try:
                if not await self._follow():
                    await self._clock.sleep(RETRY_FIRST_S)  # A server that ends each watch at once is not flooded.
            except (KubeUnavailable, KubeRefused) as error:
                self._fail(error)
                backoff = self._absence if self._absences else self._backoff
                await self._clock.sleep(backoff.next(random.random()))

    def store(self, value: KubeObject) -> bool:
        """Put a response to an own write into the view, so that it need not wait for the watch; return False for an older one.

        An object that is not in the view and not newer than the watch was deleted since. `on_change` is not called: the
        watch reports the change too. An object without the labels of the view is ignored, because its changes are not seen.
        """
        if not has_labels(value, self.labels):
            return False
        key = key_of(value)
        known = self.objects.get(key)
        newest = {"metadata": {"resourceVersion": self._revision}} if known is None else known
        if is_older(value, newest) or (known is None and not is_older(newest, value)):
            return False
        self.objects[key] = without_managed_fields(value)
        return True

    async def listed(self) -> KubeListing:
        """Return the objects as the server has them now, independent of the view."""
        return await self._source.list(self._kind, self._namespace, self.labels)

    async def _follow(self) -> bool:
        """List if necessary, and watch until the server ends the watch; return whether the watch had a change."""
        if not self._revision:
            listed = await self.listed()
            self._replace(listed.items)
            self._revision = listed.revision
            self._connected()
            self.is_synced = True
            self._on_sync()
        changes = self._source.watch(self._kind, self._revision, self._namespace, self.labels)
        has_changed = False
        async with aclosing(changes) as received:  # type: ignore[type-var]
            async for change in received:
                self._connected()
                self._apply(change)
                has_changed = True
        return has_changed

    def _apply(self, change: WatchChange) -> None:
        key = key_of(change.object)
        self._revision = change.revision
        known = self.objects.get(key)
        if change.type == "BOOKMARK" or (known is not None and is_older(change.object, known)):
            return
        if change.type == "DELETED":
            if self.objects.pop(key, None) is not None:
                self._on_change(key, None)
        else:
            self.objects[key] = without_managed_fields(change.object)
            self._on_change(key, change.object)

    def _replace(self, items: Iterable[KubeObject]) -> None:
        found = {key_of(item): item for item in items}
        for key in [key for key in self.objects if key not in found]:
            del self.objects[key]
            self._on_change(key, None)
        for key, item in found.items():
            known = self.objects.get(key)
            if known is None or known["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
                self.objects[key] = without_managed_fields(item)
                self._on_change(key, item)

    def _connected(self) -> None:
        if self.error and not self.is_connected:
            logger.info("Kubernetes: watching %s again", self._kind.plural)
        self.is_connected, self._absences, self.error = True, 0, ""
        self._backoff.reset()
        self._absence.reset()

    def _fail(self, error: KubeUnavailable | KubeRefused) -> None:
        is_absence = isinstance(error, KubeRefused) and error.code == NOT_FOUND
        self._absences = self._absences + 1 if is_absence else 0
        if isinstance(error, KubeRefused) and error.code == GONE:
            self._revision = ""  # Normal after a long outage: the objects are listed again.
            return
        if not self.error:
            logger.warning("Kubernetes: cannot read %s, keeping the last view: %s", self._kind.plural, error)
        self.is_connected, self.error = False, str(error)


def has_labels(value: KubeObject, selector: str) -> bool:
    """Return whether an object matches a selector of the forms `NAME` and `NAME=VALUE`, separated by commas."""
    labels = value["metadata"].get("labels") or {}
    for one in filter(None, selector.split(",")):
        name, has_value, wanted = one.partition("=")
        if name not in labels or (has_value and labels[name] != wanted):
            return False
    return True


def is_older(value: KubeObject, other: KubeObject) -> bool:
    """Return whether a version of an object is older than another; versions are compared as numbers, as etcd's are."""
    first, second = (one["metadata"].get("resourceVersion", "") for one in (value, other))
    return first.isdigit() and second.isdigit() and int(first) < int(second)


def without_managed_fields(value: KubeObject) -> KubeObject:
    """Remove the managed fields of an object, which are often larger than the rest and which no view needs."""
    value["metadata"].pop("managedFields", None)
    return value


def key_of(value: KubeObject) -> ObjectKey:
    """Return the namespace and the name of an object."""
    metadata = value["metadata"]
    return metadata.get("namespace", ""), metadata.get("name", "")
