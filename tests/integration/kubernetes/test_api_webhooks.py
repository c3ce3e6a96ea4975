"""Webhooks, versions, workloads and faults of the API server of this repository."""

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.certificates import Certificates
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.workloads import workload_definitions
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

Object = dict[str, Any]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
MERGE = {"content-type": "application/merge-patch+json"}


def review(message: Object) -> Object:
    """Convert `spec.size` and `spec.count`; deny `deny`; add a label on mutation."""
    request = message["request"]
    if message["kind"] == "ConversionReview":
        version = request["desiredAPIVersion"]
        field = "count" if version.endswith("v2") else "size"
        converted = [
            {**one, "apiVersion": version, "spec": {field: next(iter(one["spec"].values()))}}
            for one in request["objects"]
        ]
        result: Object = {"result": {"status": "Success"}, "convertedObjects": converted}
    elif (request["object"].get("data") or {}).get("deny"):
        result = {
            "allowed": False,
            "status": {"code": 422, "reason": "Invalid", "message": "data.deny: must be absent"},
        }
    else:
        patch = json.dumps([{"op": "add", "path": "/data/mutated", "value": "yes"}]).encode()
        result = {"allowed": True, "patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    return {**message, "response": {"uid": request["uid"], **result}}


class ReviewHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(review(message)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[Object]:
    """Serve `review` over TLS and return its clientConfig."""
    made = Certificates(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), ReviewHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    bundle = base64.b64encode(Path(made.ca).read_bytes()).decode()
    yield {"url": f"https://127.0.0.1:{server.server_port}/review", "caBundle": bundle}
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def client(own_kubernetes: KubernetesServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {own_kubernetes.token}"}
    with httpx.Client(base_url=own_kubernetes.url, headers=headers, timeout=60) as made:
        yield made


def configuration(kind: str, client_config: Object, policy: str = "Fail") -> Object:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}
    hook = {
        "name": "check.example.com", "clientConfig": client_config, "rules": [rule], "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "failurePolicy": policy,
    }  # fmt: skip
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "check"},
        "webhooks": [hook],
    }


def hooks_path(kind: str) -> str:
    return f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}s"


@pytest.mark.parametrize("kind", ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"])
def test_webhook_denies_and_mutates(client: httpx.Client, webhook: Object, kind: str) -> None:
    assert client.post(hooks_path(kind), json=configuration(kind, webhook)).status_code == 201
    denied = client.post(CONFIG_MAPS, json={"metadata": {"name": "a"}, "data": {"deny": "1"}})
    assert (denied.status_code, denied.json()["reason"]) == (422, "Invalid")
    assert (
        denied.json()["message"]
        == 'admission webhook "check.example.com" denied the request: data.deny: must be absent'
    )
    made = client.post(CONFIG_MAPS, json={"metadata": {"name": "b"}, "data": {"x": "1"}}).json()
    assert ("mutated" in made["data"]) == (kind == "MutatingWebhookConfiguration")


@pytest.mark.parametrize(("policy", "code"), [("Fail", 500), ("Ignore", 201)])
def test_webhook_with_wrong_authority_fails_as_its_policy_says(
    client: httpx.Client, webhook: Object, tmp_path: Path, policy: str, code: int
) -> None:
    other = Path(Certificates(tmp_path / "other").ca).read_bytes()
    broken = {**webhook, "caBundle": base64.b64encode(other).decode()}
    kind = "ValidatingWebhookConfiguration"
    client.post(hooks_path(kind), json=configuration(kind, broken, policy))
    assert client.post(CONFIG_MAPS, json={"metadata": {"name": "a"}, "data": {}}).status_code == code


def test_conversion_webhook_serves_every_version(client: httpx.Client, webhook: Object) -> None:
    versions = [
        {"name": name, "served": True, "storage": name == "v2", "schema": {"openAPIV3Schema": {
            "type": "object", "properties": {"spec": {"type": "object", "properties": {field: {"type": "integer"}}}}}}}
        for name, field in (("v1", "size"), ("v2", "count"))
    ]  # fmt: skip
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "boxes.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"plural": "boxes", "kind": "Box"}, "versions": versions,
            "conversion": {"strategy": "Webhook", "webhook": {"clientConfig": webhook, "conversionReviewVersions": ["v1"]}},
        },
    }  # fmt: skip
    assert client.post(CRDS, json=definition).status_code == 201
    old, new = (f"/apis/example.com/{version}/namespaces/default/boxes" for version in ("v1", "v2"))
    made = client.post(
        old, json={"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "a"}, "spec": {"size": 3}}
    )
    assert (made.status_code, made.json()["spec"]) == (201, {"size": 3})
    assert client.get(f"{new}/a").json()["spec"] == {"count": 3}
    assert [one["spec"] for one in client.get(old).json()["items"]] == [{"size": 3}]
    client.patch(f"{new}/a", headers=MERGE, json={"spec": {"count": 4}})
    assert client.get(f"{old}/a").json()["spec"] == {"size": 4}


def settled(client: httpx.Client, path: str, accepts: Callable[[Object], bool]) -> None:
    wait_until(lambda: accepts(client.get(path).json()), f"{path} did not settle")


def pod_spec() -> Object:
    return {"containers": [{"name": "main", "image": "image:1"}]}


def test_deployment_service_and_job_complete(client: httpx.Client) -> None:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": pod_spec()}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    path = "/apis/apps/v1/namespaces/default/deployments"
    client.post(path, json={"metadata": {"name": "web"}, "spec": spec})
    settled(client, f"{path}/web", lambda one: one.get("status", {}).get("availableReplicas") == 2)
    service = {
        "metadata": {"name": "web", "labels": {"kind": "discovery"}},
        "spec": {"selector": labels, "ports": [{"port": 80}]},
    }
    client.post("/api/v1/namespaces/default/services", json=service)
    slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kind%3Ddiscovery"
    settled(client, slices, lambda one: [len(item["endpoints"]) for item in one["items"]] == [2])
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    job = {"metadata": {"name": "j"}, "spec": {"template": {"spec": {**pod_spec(), "restartPolicy": "Never"}}}}
    assert client.post(jobs, json=job).status_code == 201
    settled(client, f"{jobs}/j", lambda one: one.get("status", {}).get("succeeded") == 1)


def test_leader_worker_set_and_clique_set_become_ready(client: httpx.Client) -> None:
    for definition in workload_definitions():
        assert client.post(CRDS, json=definition).status_code == 201
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
    parts = {"size": 2, "workerTemplate": {"spec": pod_spec()}}
    body = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "l"},
        "spec": {"replicas": 2, "leaderWorkerTemplate": parts},
    }
    assert client.post(path, json=body).status_code == 201
    settled(client, f"{path}/l", lambda one: one.get("status", {}).get("readyReplicas") == 2)
    cliques = [
        {"name": name, "spec": {"roleName": name, "replicas": 1, "podSpec": pod_spec()}}
        for name in ("front", "ldr", "wkr")
    ]
    groups = [{"name": "decode", "cliqueNames": ["ldr", "wkr"], "replicas": 2}]
    path = "/apis/grove.io/v1alpha1/namespaces/default/podcliquesets"
    spec = {"replicas": 1, "template": {"cliques": cliques, "podCliqueScalingGroups": groups}}
    body = {"apiVersion": "grove.io/v1alpha1", "kind": "PodCliqueSet", "metadata": {"name": "p"}, "spec": spec}
    assert client.post(path, json=body).status_code == 201
    settled(client, f"{path}/p", lambda one: one.get("status", {}).get("availableReplicas") == 1)


def test_faults_are_injected(client: httpx.Client, own_kubernetes: KubernetesServer) -> None:
    own_kubernetes.act(path=".*configmaps", status=429, retry_after_s=3)
    refused = client.get(CONFIG_MAPS)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
    revision = client.get(CONFIG_MAPS).json()["metadata"]["resourceVersion"]
    for name in ("a", "b"):
        client.post(CONFIG_MAPS, json={"metadata": {"name": name}})
    page = client.get(CONFIG_MAPS, params={"limit": "1"}).json()["metadata"]["continue"]
    client.delete(f"{CONFIG_MAPS}/a")
    own_kubernetes.act(action="compact")
    stale = client.get(CONFIG_MAPS, params={"watch": "1", "resourceVersion": revision, "timeoutSeconds": "5"}).json()
    assert (stale["type"], stale["object"]["code"], stale["object"]["reason"]) == ("ERROR", 410, "Expired")
    expired = client.get(CONFIG_MAPS, params={"limit": "1", "continue": page})
    assert (expired.status_code, expired.json()["reason"]) == (410, "Expired")
