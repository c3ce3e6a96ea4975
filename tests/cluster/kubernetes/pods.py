"""Pods of the API server of tests, as the operator makes them: labels, variables, and an EndpointSlice when ready."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.protocols.kubernetes.crds import manifests

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
        """The environment by which a process in the pod is identified."""
        return {"POD_NAME": self.name, "POD_NAMESPACE": self.namespace, "POD_UID": self.uid}


def call(server: KubernetesServer, method: str, path: str, body: Any = None) -> Any:
    """Send a request as an administrator; an object that exists already is no error."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    if method == "PATCH":
        headers["Content-Type"] = "application/merge-patch+json"
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return json.load(error)
        raise


def install_crds(server: KubernetesServer) -> None:
    """Create the CustomResourceDefinitions, without conversion."""
    for _, crd in manifests(has_conversion=False):
        call(server, "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)


def ready_pod(server: KubernetesServer, name: str, namespace: str = "default", *, ready: bool = True) -> MadePod:
    """Create a pod and its EndpointSlice."""
    call(server, "POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    body = {
        "metadata": {"name": name, "labels": DISCOVERY_LABELS},
        "spec": {"containers": [{"name": "main", "image": "image"}]},
    }
    made = call(server, "POST", f"/api/v1/namespaces/{namespace}/pods", body)
    pod = MadePod(name, namespace, made["metadata"]["uid"])
    endpoint = {
        "addresses": ["127.0.0.1"],
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


def set_ready(server: KubernetesServer, pod: MadePod, ready: bool) -> None:
    """Set the readiness of a pod in its EndpointSlice."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{pod.namespace}/endpointslices/{pod.name}-slice"
    endpoints = call(server, "GET", path)["endpoints"]
    endpoints[0]["conditions"]["ready"] = ready
    call(server, "PATCH", path, {"endpoints": endpoints})
