"""Emptying a released API server between tests, which is faster than starting another one."""

import time
from typing import Any

import httpx
from tests.cluster.kubernetes.errors import Object
from tests.cluster.processes import wait_until

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
HOOKS = tuple(
    f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations" for kind in ("mutating", "validating")
)
NAMESPACES = "/api/v1/namespaces"
CLUSTER_ROLES = tuple(f"/apis/rbac.authorization.k8s.io/v1/cluster{kind}s" for kind in ("role", "rolebinding"))
NAMESPACED = (
    "/apis/apps/v1/namespaces/{}/deployments", "/apis/apps/v1/namespaces/{}/replicasets",
    "/apis/apps/v1/namespaces/{}/daemonsets",
    "/apis/batch/v1/namespaces/{}/jobs", "/api/v1/namespaces/{}/services", "/api/v1/namespaces/{}/pods",
    "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/secrets", "/api/v1/namespaces/{}/serviceaccounts",
    "/api/v1/namespaces/{}/persistentvolumeclaims", "/apis/networking.k8s.io/v1/namespaces/{}/ingresses",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles", "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates", "/api/v1/namespaces/{}/events",
)  # fmt: skip
KEPT = frozenset({"kubernetes", "kube-root-ca.crt"})
DEFAULT = "default"
DEADLINE_S = 60.0


class Reset:
    """Deletes everything but what existed when `remember` was called."""

    def __init__(self, url: str, token: str, verify: Any) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, verify=verify, timeout=30)
        self._kept: set[str] = set()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def remember(self) -> None:
        """Keep the namespaces and cluster roles that exist now."""
        for path in (NAMESPACES, *CLUSTER_ROLES):
            self._kept |= {self._at(path, one) for one in self._items(path)}

    def delete_all(self) -> None:
        """Delete webhooks first, so that none blocks the other deletions; custom objects with their definitions."""
        for path in HOOKS:
            self._http.delete(path)
        self._delete_custom_objects()
        self._http.delete(CRDS)
        for path in (NAMESPACES, *CLUSTER_ROLES):
            for one in self._items(path):
                if self._at(path, one) not in self._kept:
                    self._http.delete(self._at(path, one))
        for path in NAMESPACED:
            self._empty(path.format(DEFAULT))
        deadline = time.monotonic() + DEADLINE_S
        while left := self._left():
            assert time.monotonic() < deadline, f"not deleted: {left}"
            time.sleep(0.05)

    def _delete_custom_objects(self) -> None:
        """Delete custom objects, whose controllers have ended; their definitions alone may go without them."""
        for definition in self._items(CRDS):
            spec = definition["spec"]
            version = next(one["name"] for one in spec["versions"] if one["storage"])
            prefix, plural = f"/apis/{spec['group']}/{version}", spec["names"]["plural"]
            for one in self._items(f"{prefix}/{plural}"):
                self._delete(f"{prefix}/namespaces/{one['metadata']['namespace']}/{plural}", one)
            wait_until(lambda: not self._items(f"{prefix}/{plural}"), f"{plural} were not deleted")  # noqa: B023

    def _empty(self, path: str) -> None:
        for one in self._items(path):
            if one["metadata"]["name"] not in KEPT | {DEFAULT}:
                self._delete(path, one)

    def _delete(self, path: str, item: Object) -> None:
        if item["metadata"].get("finalizers"):
            merge = {"Content-Type": "application/merge-patch+json"}
            self._http.patch(self._at(path, item), json={"metadata": {"finalizers": None}}, headers=merge)
        now = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        self._http.request("DELETE", self._at(path, item), json=now)

    def _left(self) -> list[str]:
        """Return the objects that still exist, and delete again the ones that controllers have recreated."""
        left = [self._at(CRDS, one) for one in self._items(CRDS)]
        left += [self._at(NAMESPACES, one) for one in self._items(NAMESPACES)]
        for path in (path.format(DEFAULT) for path in NAMESPACED[:5]):
            found = [self._at(path, one) for one in self._items(path) if one["metadata"]["name"] not in KEPT]
            if found:
                self._empty(path)
            left += [self._at(path, one) for one in found]
        return [one for one in left if one not in self._kept]

    def _items(self, path: str) -> list[Object]:
        response = self._http.get(path)
        items: list[Object] = response.json().get("items") or [] if response.status_code == 200 else []
        return items

    @staticmethod
    def _at(path: str, item: Object) -> str:
        return f"{path}/{item['metadata']['name']}"
