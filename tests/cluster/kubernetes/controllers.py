"""Stand-ins for the controllers of a cluster: garbage collection, namespaces, workloads, pods and endpoint slices."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes import metadata
from tests.cluster.kubernetes.api import Api, Options, name_of
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.grove import GROVE_WORKLOADS
from tests.cluster.kubernetes.pod_status import pod_address, running_status
from tests.cluster.kubernetes.resources import GroupPlural
from tests.cluster.kubernetes.selectors import object_selector
from tests.cluster.kubernetes.storage import Event, Name
from tests.cluster.kubernetes.workloads import WORKLOADS, child_metadata

PODS, SERVICES, SLICES = ("", "pods"), ("", "services"), ("discovery.k8s.io", "endpointslices")
NAMESPACES, REPLICA_SETS = ("", "namespaces"), ("apps", "replicasets")
ENDPOINTS_PER_SLICE = 100
MANAGER = Options(manager="kube-controller-manager", user={"username": "system:kube-controller-manager"})
ALL_WORKLOADS = WORKLOADS | GROVE_WORKLOADS
At = tuple[GroupPlural, Name]


class Controllers:
    """Reacts to the writes of the storage; level-triggered, one object at a time."""

    def __init__(self, api: Api, *, ready_s: float = 0.0) -> None:
        self.api, self.ready_s = api, ready_s
        self.is_external: Callable[[Object], bool] = lambda pod: False
        """Whether something else runs a pod."""
        self._storage = api.storage
        self.runs_pods = True
        """Whether pods are reported as running; false where a kubelet starts them."""
        self._queue: dict[At, None] = {}
        self._addresses = 0
        self._timers: set[asyncio.TimerHandle] = set()
        self._wake = asyncio.Event()
        self._subscription = api.storage.subscribe(None)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            for event in self._take_events():
                await self._collect(event)
                self._enqueue_related(event)
            while self._queue:
                at = next(iter(self._queue))
                del self._queue[at]
                try:
                    await self._reconcile(at)
                except ApiError as error:
                    if error.code not in {404, 409}:
                        raise
                await asyncio.sleep(0)
            if self._subscription.is_closed:
                self._subscription = self._storage.subscribe(None)
            if not self._subscription.events:
                await self._subscription.wait(0.05 if self.ready_s else 1.0)

    def _take_events(self) -> list[Event]:
        found = list(self._subscription.events)
        self._subscription.events.clear()
        return found

    def enqueue(self, at: At) -> None:
        self._queue[at] = None

    def _enqueue_related(self, event: Event) -> None:
        self.enqueue((event.key, event.name))
        for owner in event.after["metadata"].get("ownerReferences") or ():
            found = self._storage.by_uid(owner["uid"])
            if found:
                self.enqueue(found)
        if event.key in {PODS, SERVICES}:
            for service in self._storage.items(SERVICES, event.name[0]):
                self.enqueue((SERVICES, name_of(service)))

    async def _reconcile(self, at: At) -> None:
        key, name = at
        item = self._storage.get(key, name)
        if item is None:
            if key == SERVICES:
                await self._remove_slices(name)
            return
        if item["metadata"].get("deletionTimestamp"):
            await self._finish_deletion(key, name, item)
            return
        if key == PODS:
            if self.runs_pods:
                self._run_pod(item)
        elif key == SERVICES:
            await self._slice(item)
        elif key in ALL_WORKLOADS:
            await ALL_WORKLOADS[key](self, key, item)

    # Garbage collection.

    async def _collect(self, event: Event) -> None:
        uid = event.after["metadata"]["uid"]
        if event.kind == "DELETED":
            for key, name in self._storage.dependents(uid):
                await self._delete_orphan(key, name)
            for owner in event.after["metadata"].get("ownerReferences") or ():
                found = self._storage.by_uid(owner["uid"])
                if found:
                    self.enqueue(found)
            if event.name[0]:
                self.enqueue((NAMESPACES, ("", event.name[0])))
        elif event.after["metadata"].get("ownerReferences"):
            await self._delete_orphan(event.key, event.name)

    async def _delete_orphan(self, key: GroupPlural, name: Name) -> None:
        """Delete an object none of whose owners exists; an owner in another namespace counts as absent."""
        item = self._storage.get(key, name)
        if item is None or item["metadata"].get("deletionTimestamp"):
            return
        owners = item["metadata"].get("ownerReferences") or []
        present = [one for one in owners if self._exists(one["uid"], name[0])]
        if owners and not present:
            await self._delete(key, name)

    def _exists(self, uid: str, namespace: str) -> bool:
        found = self._storage.by_uid(uid)
        return found is not None and found[1][0] in {"", namespace}

    async def _delete(self, key: GroupPlural, name: Name, grace: int = 0) -> None:
        resource = self.api.registry.by_key(key)
        if resource and self._storage.get(key, name):
            await self.api.mark_or_remove(resource, name, "Background", grace, MANAGER)

    async def _finish_deletion(self, key: GroupPlural, name: Name, item: Object) -> None:
        finalizers = item["metadata"].get("finalizers") or []
        uid = item["metadata"]["uid"]
        if key == NAMESPACES:
            await self._empty_namespace(name[1])
        elif metadata.ORPHAN in finalizers:
            for child_key, child in self._storage.dependents(uid):
                found = self._storage.get(child_key, child)
                assert found is not None
                kept = [one for one in found["metadata"]["ownerReferences"] if one["uid"] != uid]
                self.put(child_key, {**found, "metadata": {**found["metadata"], "ownerReferences": kept}})
            await self._drop_finalizer(key, name, metadata.ORPHAN)
        elif metadata.FOREGROUND in finalizers:
            dependents = self._storage.dependents(uid)
            for child_key, child in dependents:
                await self._delete(child_key, child)
            blocking = [one for one in self._storage.dependents(uid) if self._blocks(one, uid)]
            if not blocking:
                await self._drop_finalizer(key, name, metadata.FOREGROUND)
        elif not finalizers and key == PODS:
            resource = self.api.registry.by_key(key)
            assert resource is not None
            self.api.remove(resource, name)

    def _blocks(self, at: At, uid: str) -> bool:
        item = self._storage.get(*at)
        owners = (item or {"metadata": {}})["metadata"].get("ownerReferences") or []
        return any(one["uid"] == uid and one.get("blockOwnerDeletion") for one in owners)

    async def _drop_finalizer(self, key: GroupPlural, name: Name, finalizer: str) -> None:
        resource, item = self.api.registry.by_key(key), self._storage.get(key, name)
        if resource is None or item is None:
            return
        kept = [one for one in item["metadata"].get("finalizers") or [] if one != finalizer]
        if kept:
            self.put(key, {**item, "metadata": {**item["metadata"], "finalizers": kept}})
        else:
            self.api.remove(resource, name)

    async def _empty_namespace(self, namespace: str) -> None:
        for key, name in list(self._storage.namespaced(namespace)):
            found = self._storage.get(key, name)
            if found and not found["metadata"].get("deletionTimestamp"):
                await self._delete(key, name)
        resource = self.api.registry.by_key(NAMESPACES)
        if (
            resource
            and not list(self._storage.namespaced(namespace))
            and self._storage.get(NAMESPACES, ("", namespace))
        ):
            self.api.remove(resource, ("", namespace))

    # Writes.

    def put(self, key: GroupPlural, item: Object) -> None:
        """Store an object where it differs from the stored one."""
        if self._storage.get(key, name_of(item)) != item:
            self._storage.put(key, item)

    def put_status(self, key: GroupPlural, item: Object, **status: Any) -> None:
        """Merge values into the status of the current object."""
        current = self._storage.get(key, name_of(item))
        if current is not None and current["metadata"]["uid"] == item["metadata"]["uid"]:
            self.put(key, {**current, "status": {**(current.get("status") or {}), **status}})

    async def create(self, key: GroupPlural, namespace: str, body: Object) -> Object:
        resource = self.api.registry.by_key(key)
        assert resource is not None
        return await self.api.create(
            resource, namespace, {"apiVersion": resource.api_version, "kind": resource.kind, **body}, MANAGER
        )

    def children(self, key: GroupPlural, owner: Object) -> list[Object]:
        """Return the objects of a resource that the owner controls and that are not being deleted."""
        found = (
            self._storage.get(at, name) for at, name in self._storage.dependents(owner["metadata"]["uid"]) if at == key
        )
        return [one for one in found if one and not one["metadata"].get("deletionTimestamp")]

    async def match_pods(self, owner: Object, wanted: dict[str, Object]) -> list[Object]:
        """Create the absent pods of the wanted names, delete the others, and return those that exist."""
        found = {one["metadata"]["name"]: one for one in self.children(PODS, owner)}
        for name in set(found) - set(wanted):
            await self._delete(PODS, found.pop(name) and (owner["metadata"]["namespace"], name))
        for name, template in wanted.items():
            if name not in found:
                body = {"metadata": child_metadata(owner, name, template), "spec": template["spec"]}
                found[name] = await self.create(PODS, owner["metadata"]["namespace"], body)
        return list(found.values())

    async def delete_child(self, key: GroupPlural, item: Object) -> None:
        await self._delete(key, name_of(item))

    # Pods and endpoint slices.

    def _run_pod(self, pod: Object) -> None:
        """Do what scheduler and kubelet do: bind the pod and report it as running, after `ready_s`."""
        if pod["spec"].get("nodeName") or self.is_external(pod):
            return
        self._addresses += 1
        ip = pod_address(self._addresses)
        bound = {**pod, "spec": {**pod["spec"], "nodeName": "node-0"}}
        self.put(PODS, {**bound, "status": {**pod.get("status", {}), "phase": "Pending", "hostIP": "10.2.0.1"}})
        if self.ready_s:
            handle = asyncio.get_running_loop().call_later(self.ready_s, self._start_pod, name_of(pod), ip)
            self._timers.add(handle)
        else:
            self._start_pod(name_of(pod), ip)

    def _start_pod(self, name: Name, ip: str) -> None:
        pod = self._storage.get(PODS, name)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            return
        self.put_status(PODS, pod, **running_status(pod, ip))

    async def _remove_slices(self, service: Name) -> None:
        for one in self._storage.items(SLICES, service[0]):
            if (one["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == service[1]:
                await self._delete(SLICES, name_of(one))

    async def _slice(self, service: Object) -> None:
        """Write the endpoint slices of a service with a selector; they carry its labels."""
        namespace, name = name_of(service)[0], service["metadata"]["name"]
        selector = service["spec"].get("selector")
        if not selector:
            return
        matches = object_selector({"matchLabels": selector})
        pods = [
            one
            for one in self._storage.items(PODS, namespace)
            if matches(one["metadata"].get("labels") or {}) and (one.get("status") or {}).get("podIP")
        ]
        endpoints = [
            _endpoint(one, service) for one in pods if one["status"].get("phase") not in {"Succeeded", "Failed"}
        ]
        chunks = [
            endpoints[at : at + ENDPOINTS_PER_SLICE] for at in range(0, max(len(endpoints), 1), ENDPOINTS_PER_SLICE)
        ]
        ports = [
            {"name": one.get("name", ""), "port": _target(one, pods), "protocol": one["protocol"]}
            for one in service["spec"].get("ports") or []
        ]
        labels = {
            **(service["metadata"].get("labels") or {}), "kubernetes.io/service-name": name,
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
        }  # fmt: skip
        if service["spec"].get("clusterIP") == "None":
            labels["service.kubernetes.io/headless"] = ""
        for index, chunk in enumerate(chunks):
            at = namespace, f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:4]}{index}"
            body = {"addressType": "IPv4", "endpoints": chunk, "ports": ports}
            found = self._storage.get(SLICES, at)
            if found is None:
                template = {"metadata": {"labels": labels}}
                await self.create(SLICES, namespace, {"metadata": child_metadata(service, at[1], template), **body})
            elif any(found.get(part) != one for part, one in body.items()) or found["metadata"].get("labels") != labels:
                generation = found["metadata"].get("generation", 1) + 1
                self.put(
                    SLICES,
                    {**found, **body, "metadata": {**found["metadata"], "labels": labels, "generation": generation}},
                )


def _endpoint(pod: Object, service: Object) -> Object:
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or [])
    is_ending = bool(pod["metadata"].get("deletionTimestamp"))
    serves = is_ready or bool(service["spec"].get("publishNotReadyAddresses"))
    metadata = pod["metadata"]
    return {
        "addresses": [pod["status"]["podIP"]], "nodeName": pod["spec"].get("nodeName", ""),
        "conditions": {"ready": serves and not is_ending, "serving": serves, "terminating": is_ending},
        "targetRef": {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
    }  # fmt: skip


def _target(port: Object, pods: list[Object]) -> int:
    """Return the number of a target port; a name is looked up in the pods."""
    target = port.get("targetPort", port["port"])
    for pod in pods if isinstance(target, str) else ():
        for container in pod["spec"]["containers"]:
            for one in container.get("ports") or []:
                if one.get("name") == target:
                    return int(one["containerPort"])
    return int(target) if isinstance(target, int) else int(port["port"])
