"""Discovery in Kubernetes: one DynamoWorkerMetadata per pod, or per container, that lists the records of its process.

    spec.data.endpoints["dynamo/backend/generate/1d241219831293"] = {"type": "Endpoint", …}

A record is visible while its pod is ready: as an address of an EndpointSlice with the labels of `SELECTOR`, or in
container mode by the status of the container. The object is owned by the pod, so that Kubernetes deletes it with the
pod; records of another pod of the same name are not visible. While the API server cannot be reached, the last view
remains valid, and own records are written afterwards.
"""

import asyncio
import base64
import binascii
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import json_encode
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.informer import RETRY_FIRST_S, RETRY_MAX_S, Informer, ObjectKey, ObjectSource, key_of
from dynamo.k8s.kinds import ENDPOINT_SLICES, PODS, WORKER_METADATA, ObjectKind
from dynamo.protocols.discovery import EVENT_CHANNELS, EVENT_SOURCES, INSTANCES, METRICS_SOURCES, MODEL_CARDS
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.runtime.discovery.base import View, Watch
from dynamo.runtime.discovery.pod_identity import PodIdentity, record_name

logger = logging.getLogger(__name__)

FIELDS = {
    INSTANCES: "endpoints",
    MODEL_CARDS: "model_cards",
    EVENT_CHANNELS: "event_channels",
    EVENT_SOURCES: "event_sources",
    METRICS_SOURCES: "metrics_sources",
}
"""Fields of `spec.data` by bucket; released processes ignore the last one."""
OTHER_FIELD = "records"
"""Field for values that are not JSON objects: bucket → key → base64."""
MANAGER = "dynamo-worker"
SELECTOR = "nvidia.com/dynamo-discovery-backend=kubernetes,nvidia.com/dynamo-discovery-enabled=true"
STARTUP_S = 10.0
CLOSE_S = 3.0
DATA_BYTES_MAX = 1 << 20
"""Limit of the records of one process. The API server accepts objects of 1.5 MiB."""
FORBIDDEN = frozenset({401, 403})
REFUSED_RETRY_S = 10.0  # Roles are changed by people.

Records = dict[str, dict[str, bytes]]
"""Values by bucket and key."""


class KubeObjects(ObjectSource, Protocol):
    """What this module requires of `KubeClient`."""

    address: str

    async def apply(
        self, kind: ObjectKind, value: KubeObject, namespace: str | None = None, *, manager: str
    ) -> KubeObject: ...
    async def close(self) -> None: ...


class ReadyRecords:
    """The records that are visible: those of ready pods, by the two collections that this is computed from."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self._published: dict[str, tuple[str, Records]] = {}
        """Uid of the owning pod, and its records, by the object's name."""
        self._ready: dict[ObjectKey, dict[str, str]] = {}
        """Uids of the ready pods by record name, for each slice or pod."""
        self._shown: dict[str, Records] = {}

    def view(self, bucket: str) -> View:
        """Return the view of a bucket."""
        if bucket not in self.views:
            view = self.views[bucket] = View()
            view.records = {
                key: value for records in self._shown.values() for key, value in records.get(bucket, {}).items()
            }
        return self.views[bucket]

    def publish(self, key: ObjectKey, value: KubeObject | None) -> None:
        """Apply a changed or deleted DynamoWorkerMetadata. Data that cannot be read leaves the last records."""
        name = key[1]
        if value is None:
            self._published.pop(name, None)
        else:
            try:
                self._published[name] = owner_of(value), records_of(value["spec"]["data"])
            except (KeyError, TypeError, AttributeError, binascii.Error) as error:
                logger.warning("discovery record %s cannot be read: %s: %s", name, type(error).__name__, error)
        self._show(name)

    def ready(self, key: ObjectKey, names: Mapping[str, str]) -> None:
        """Set the ready records of one slice or pod."""
        before = self._ready.pop(key, {})
        if names:
            self._ready[key] = dict(names)
        for name in before.keys() | names.keys():
            self._show(name)

    def _show(self, name: str) -> None:
        owner, records = self._published.get(name, ("", {}))
        is_ready = any(names.get(name) == owner for names in self._ready.values())
        after = records if is_ready else {}
        before = self._shown.pop(name, {})
        if after:
            self._shown[name] = after
        for bucket in before.keys() | after.keys():
            view, new = self.views.get(bucket), after.get(bucket, {})
            if view is None:
                continue
            for key in before.get(bucket, {}):
                if key not in new:
                    view.delete(key)
            for key, value in new.items():
                view.put(key, value)


class KubernetesDiscovery:
    """Registry of one pod in the cluster's API server."""

    def __init__(
        self,
        identity: PodIdentity | None = None,
        *,
        make_client: Callable[[], KubeObjects] = KubeClient,
        clock: Clock | None = None,
    ) -> None:
        """Raise `ConfigError` outside a pod, or without a configuration of the cluster."""
        self.identity = PodIdentity.read(environ()) if identity is None else identity
        self._clock = clock or SystemClock()
        self._make_client = make_client
        self._tasks = TaskOwner("discovery.kubernetes")
        self._records = ReadyRecords()
        self._own: Records = {}
        self._changed = asyncio.Event()
        self._writes: asyncio.Future[None] | None = None
        self._synced = asyncio.Event()
        self._informers: list[Informer] = []
        self._client: KubeObjects | None = None

    # Interface of every registry

    async def connect(self) -> None:
        """Wait for the first complete view. Raise `ConfigError` after the startup timeout."""
        client = self._start()
        try:
            async with asyncio.timeout(STARTUP_S):
                await self._synced.wait()
        except TimeoutError:
            why = next((one.error for one in self._informers if one.error), "no response")
            raise ConfigError(f"--discovery-backend kubernetes: {client.address}: {why}") from None

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        await self.connect()
        before = self._own.get(bucket, {}).get(key)
        self._own.setdefault(bucket, {})[key] = value
        try:
            if len(json_encode(self.data())) > DATA_BYTES_MAX:
                raise InvalidArgument(f"discovery record {bucket}/{key}: all records may have {DATA_BYTES_MAX} bytes")
            await self._write()
        except DynamoException:
            if before is None:
                del self._own[bucket][key]
            else:
                self._own[bucket][key] = before
            raise

    async def delete(self, bucket: str, key: str) -> None:
        if self._own.get(bucket, {}).pop(key, None) is not None:
            await self._write()

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        await self.connect()
        found = ReadyRecords()
        view = found.view(bucket)
        try:
            for informer, receive in zip(self._informers, _receivers(found, self.identity), strict=True):
                for item in (await informer.listed()).items:
                    receive(key_of(item), item)
        except (KubeUnavailable, KubeRefused):
            return dict(self._records.view(bucket).records)
        return dict(view.records)

    def watch(self, bucket: str) -> Watch:
        self._start()
        view = self._records.view(bucket)
        view.is_synced = self._synced.is_set()
        return view.watch()

    async def close(self) -> None:
        has_records = any(self._own.values())
        self._own = {}
        if has_records and self._client is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._apply(self._client)
            except (TimeoutError, KubeUnavailable, KubeRefused) as error:
                logger.warning("failed to remove the discovery records of %s: %s", self.identity.record, error)
        for view in self._records.views.values():
            view.close()
        await self._tasks.cancel_and_wait()
        if self._client is not None:
            await self._client.close()

    # Status

    @property
    def instance_id(self) -> int:
        """Return the instance id of this process."""
        return self.identity.instance_id

    @property
    def is_reachable(self) -> bool:
        """Return False while the API server cannot be read and views are stale."""
        return all(informer.is_connected for informer in self._informers)

    @property
    def is_sound(self) -> bool:
        """Return False from a crash of a background task until it is restarted."""
        return self._tasks.is_sound

    def data(self) -> dict[str, Any]:
        """Return the records of this process as `spec.data`."""
        return data_of(self._own)

    # Reading

    def _start(self) -> KubeObjects:
        if self._client is None:
            client = self._client = self._make_client()
            readiness = PODS if self.identity.is_container else ENDPOINT_SLICES
            publish, ready = _receivers(self._records, self.identity)
            for kind, labels, receive in ((WORKER_METADATA, "", publish), (readiness, SELECTOR, ready)):
                informer = Informer(
                    client,
                    kind,
                    self.identity.namespace,
                    labels,
                    on_change=receive,
                    on_sync=self._on_sync,
                    clock=self._clock,
                )
                self._informers.append(informer)
                self._tasks.supervise(informer.run, kind.plural, clock=self._clock)
            self._tasks.supervise(self._write_forever, "writes", clock=self._clock)
        return self._client

    def _on_sync(self) -> None:
        if all(informer.is_synced for informer in self._informers):
            self._synced.set()
            for view in self._records.views.values():
                view.is_synced = True
                view.replace(dict(view.records))

    # Writing

    async def _write(self) -> None:
        """Write the records of this process, or leave it to the writer during an outage. Raise for a refusal."""
        if self._writes is None:
            self._writes = asyncio.get_running_loop().create_future()
        self._changed.set()
        await asyncio.shield(self._writes)

    async def _write_forever(self) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        assert self._client is not None, "started with a client"
        while True:
            await self._changed.wait()
            self._changed.clear()
            waiting, self._writes = self._writes, None
            try:
                await self._apply(self._client)
            except (KubeUnavailable, KubeRefused) as error:
                is_refused = isinstance(error, KubeRefused)
                if waiting is not None and is_refused:
                    waiting.set_exception(refused(self.identity, error))
                    waiting.exception()  # Mark as retrieved: a caller may be gone.
                elif waiting is not None:
                    logger.warning("%s; writing the discovery records after the outage", error)
                    waiting.set_result(None)
                await self._clock.sleep(REFUSED_RETRY_S if is_refused else backoff.next(random.random()))
                self._changed.set()
            else:
                backoff.reset()
                if waiting is not None:
                    waiting.set_result(None)

    async def _apply(self, client: KubeObjects) -> None:
        identity = self.identity
        owner = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": identity.pod,
            "uid": identity.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
        value = {
            "metadata": {"name": identity.record, "ownerReferences": [owner]},
            "spec": {"data": self.data()},
        }
        await client.apply(WORKER_METADATA, value, identity.namespace, manager=MANAGER)


def refused(identity: PodIdentity, error: DynamoException) -> DynamoException:
    """Return the error of a record that the API server refused."""
    what = f"DynamoWorkerMetadata {identity.namespace}/{identity.record}: {error}"
    if isinstance(error, KubeRefused) and error.code in FORBIDDEN:
        return ConfigError(f"{what}; the pod's service account requires the role of Kubernetes discovery")
    return InvalidArgument(what)


def _receivers(
    records: ReadyRecords, identity: PodIdentity
) -> tuple[Callable[[ObjectKey, KubeObject | None], None], Callable[[ObjectKey, KubeObject | None], None]]:
    names_of = ready_containers if identity.is_container else ready_pods

    def ready(key: ObjectKey, value: KubeObject | None) -> None:
        records.ready(key, {} if value is None else names_of(value))

    return records.publish, ready


def ready_pods(endpoint_slice: KubeObject) -> dict[str, str]:
    """Return the uids of the ready pods of an EndpointSlice by record name; without a uid a pod is not identified."""
    found = {}
    for endpoint in endpoint_slice.get("endpoints") or []:
        target = endpoint.get("targetRef") or {}
        is_ready = (endpoint.get("conditions") or {}).get("ready") is True
        if is_ready and target.get("name") and target.get("uid"):
            found[target["name"]] = target["uid"]
    return found


def ready_containers(pod: KubeObject) -> dict[str, str]:
    """Return the pod's uid by the record name of each ready container."""
    metadata = pod["metadata"]
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return {record_name(metadata["name"], one["name"]): metadata["uid"] for one in statuses if one.get("ready") is True}


def owner_of(value: KubeObject) -> str:
    """Return the uid of the pod that owns an object, or an empty string."""
    owners = value["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("kind") == "Pod"), "")


def data_of(own: Records) -> dict[str, Any]:
    """Return records as `spec.data`, with upstream's fields even when they are empty."""
    data: dict[str, Any] = {field: {} for bucket, field in FIELDS.items() if bucket != METRICS_SOURCES}
    for bucket, records in own.items():
        for key, value in records.items():
            decoded = _object(value)
            if bucket in FIELDS and decoded is not None:
                scope = decoded.get("scope", {}).get("endpoint") if bucket == EVENT_CHANNELS else None
                if scope:  # As upstream, for readers of 1.2, which search by these fields.
                    decoded |= {"namespace": scope["namespace"], "component": scope["component"]}
                data.setdefault(FIELDS[bucket], {})[key] = decoded
            else:
                others = data.setdefault(OTHER_FIELD, {}).setdefault(bucket, {})
                others[key] = base64.b64encode(value).decode()
    return data


def records_of(data: dict[str, Any]) -> Records:
    """Return the records of `spec.data`. Raise `TypeError` or `AttributeError` for another shape."""
    found: Records = {}
    for bucket, field in FIELDS.items():
        for key, value in (data.get(field) or {}).items():
            found.setdefault(bucket, {})[key] = json_encode(value)
    for bucket, records in (data.get(OTHER_FIELD) or {}).items():
        for key, value in records.items():
            found.setdefault(bucket, {})[key] = base64.b64decode(value, validate=True)
    return found


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return decoded if isinstance(decoded, dict) else None
