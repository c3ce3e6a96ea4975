"""Pods of an API server, as the operator makes them: labels, variables, and an EndpointSlice when ready."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
from tests.cluster.kubernetes.servers import AnyKubernetes, administrator, install_definitions

ACCOUNT_S = 20.0
"""Time after which the account of a new namespace must exist."""
DISCOVERY_LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}


@dataclass(frozen=True, slots=True)
class MadePod:
    """One pod."""

    name: str
    namespace: str
    uid: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that identify the pod of a process."""
        return {"POD_NAME": self.name, "POD_NAMESPACE": self.namespace, "POD_UID": self.uid}


def call(server: AnyKubernetes, method: str, path: str, body: Any = None) -> Any:
    """Send a request as an administrator; an object that exists already is no error."""
    merge = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}

    with administrator(server) as api:

        def send() -> httpx.Response:
            return api.request(method, path, json=body, headers=merge)

        response = send()
        deadline = time.monotonic() + ACCOUNT_S
        while is_passing(response):
            assert time.monotonic() < deadline, response.text
            time.sleep(0.05)
            response = send()
        if response.status_code != 409:
            assert response.is_success, f"{method} {path}: {response.status_code}: {response.text}"
        return response.json()


def is_passing(response: httpx.Response) -> bool:
    """Return whether a refusal is temporary: a controller creates the account, a changed definition is read again."""
    return response.status_code == 503 or (response.status_code == 403 and "serviceaccount" in response.text)


def install_crds(server: AnyKubernetes) -> None:
    """Create the CustomResourceDefinitions, without conversion."""
    install_definitions(server)


def ready_pod(server: AnyKubernetes, name: str, namespace: str = "default", *, ready: bool = True) -> MadePod:
    """Create a pod and its EndpointSlice."""
    call(server, "POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    body = {
        "metadata": {"name": name, "labels": DISCOVERY_LABELS},
        "spec": {"containers": [{"name": "main", "image": "image"}]},
    }
    made = call(server, "POST", f"/api/v1/namespaces/{namespace}/pods", body)
    pod = MadePod(name, namespace, made["metadata"]["uid"])
    endpoint = {
        "addresses": ["10.1.0.1"],
        "conditions": {"ready": ready},
        "targetRef": {"kind": "Pod", "name": name, "namespace": namespace, "uid": pod.uid},
    }
    body = {
        "metadata": {"name": f"{name}-slice", "labels": DISCOVERY_LABELS},
        "addressType": "IPv4",
        "endpoints": [endpoint],
        "ports": [],
    }
    call(server, "POST", f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", body)
    return pod


def set_ready(server: AnyKubernetes, pod: MadePod, ready: bool) -> None:
    """Set the readiness of a pod in its EndpointSlice."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{pod.namespace}/endpointslices/{pod.name}-slice"
    endpoints = call(server, "GET", path)["endpoints"]
    endpoints[0]["conditions"]["ready"] = ready
    call(server, "PATCH", path, {"endpoints": endpoints})
