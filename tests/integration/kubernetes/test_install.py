"""From `helm install` to a streamed chat completion: the charts, the operator and a graph, with processes as pods."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.cluster.kubernetes.installed import CHARTS, GRAPHS, SYSTEM, Installed, component, installed

from dynamo import __version__
from dynamo.operator.permissions import CLUSTER_RULES, ELECTION_RULES, GRAPH_RULES, cells, missing, rules_of
from dynamo.protocols.kubernetes.crds import KINDS

pytestmark = [pytest.mark.integration, pytest.mark.install]

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
HOOKS = "/apis/admissionregistration.k8s.io/v1"
PLANNER = {
    "environment": "kubernetes", "backend": "mocker", "mode": "agg", "optimization_target": "load", "min_endpoint": 2,
    "max_gpu_budget": 4, "decode_engine_num_gpu": 1, "load_adjustment_interval_seconds": 1, "live_dashboard_port": 0,
    "report_interval_hours": None, "decode_scale_up_kv_rate": 60, "decode_scale_down_kv_rate": 10,
    "prefill_scale_up_queue_tokens": 2000, "prefill_scale_down_queue_tokens": 100,
}  # fmt: skip
SMALL = ("--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "8")
"""A worker that the load of `loaded` exceeds."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Installed]:
    """A cluster with the definitions of an earlier release, which the operator brings to its own."""
    earlier = tmp_path / "dynamo-crds"
    shutil.copytree(CHARTS / "dynamo-crds", earlier)
    chart = earlier / "Chart.yaml"
    chart.write_text(chart.read_text().replace(__version__, "1.0.0"))
    with installed(tmp_path, earlier) as made:
        yield made


IDLE = {
    "dynamocheckpoints/status", "dynamographdeploymentrequests/status", "dynamomodels/status", "dynamoworkermetadatas",
    "dynamographdeploymentscalingadapters/scale", "pods/log", *(f"{one.plural}/finalizers" for one in KINDS),
}  # fmt: skip
"""Resources that the operator does not use for this graph: other kinds, and rights that it only grants."""


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Keep chats in progress during the block."""
    is_over = threading.Event()

    def chats(number: int) -> None:
        with httpx.Client(timeout=60) as client:
            turn = 0
            while not is_over.is_set():
                turn += 1
                messages = [{"role": "user", "content": f"{number} {turn} " + "word " * 120}]
                answer = client.post(
                    f"{url}/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 40}
                )
                assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(24) as threads:
        running = [threads.submit(chats, number) for number in range(24)]
        try:
            yield
        finally:
            is_over.set()
        for one in running:
            one.result()


def streamed(url: str) -> str:
    """Return the text of a streamed chat completion."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def test_install_serve_scale_and_uninstall(cluster: Installed) -> None:
    http = cluster.http
    mocker = component("decode", "worker", "dynamo.mocker", "--model-name", "m", *SMALL, scalingAdapter={})
    planner = component("Planner", "planner", "dynamo.planner", "--config", json.dumps(PLANNER))
    spec = {"components": [component("Frontend", "frontend", "dynamo.frontend"), mocker, planner]}
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat"},
        "spec": spec,
    }

    bad = json.loads(json.dumps(graph))
    bad["spec"]["components"][0]["replicas"] = -1
    refused = http.post(GRAPHS, json=bad)
    assert refused.status_code in (403, 422), refused.text
    assert "replicas" in refused.text

    made = http.post(GRAPHS, json=graph)
    assert made.status_code == 201, made.text
    cluster.wait_until(lambda: cluster.kubelet.pods("chat-frontend"), "the frontend is not ready")
    (frontend,) = cluster.kubelet.pods("chat-frontend")
    url = f"http://{frontend.ip}:8000"
    cluster.wait_until(lambda: httpx.get(f"{url}/v1/models").json()["data"], "the frontend found no worker")
    assert streamed(url)

    with loaded(url):
        cluster.wait_until(lambda: len(cluster.kubelet.pods("chat-decode")) >= 2, "the planner did not scale")
    cluster.wait_until(lambda: cluster.graph()["status"]["state"] == "successful", "the graph is not successful")
    instances = httpx.get(f"{url}/health").json()["instances"]
    assert sum(one["endpoint"] == "generate" for one in instances) >= 2
    alpha = http.get(f"{GRAPHS.replace('v1beta1', 'v1alpha1')}/chat").json()
    assert alpha["spec"]["services"]["decode"]["replicas"] >= 2, "the operator converts versions"

    authorizer = cluster.server.server.authorizer
    assert authorizer.refused == []
    account = f"system:serviceaccount:{SYSTEM}:dynamo-operator"
    used = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
        for user, group, resource, verb in authorizer.used if user == account
    ]  # fmt: skip
    assert len(used) > 40
    assert missing(cluster.rules(), used) == []
    needed = {(group, resource) for rule in used for group, resource, _ in cells(rule)}
    core = rules_of(GRAPH_RULES, CLUSTER_RULES, ELECTION_RULES)
    idle = {resource for rule in core for group, resource, _ in cells(rule) if (group, resource) not in needed}
    assert idle == IDLE, "without one of the other rules, this test fails"

    graph_definition = f"{CRDS}/dynamographdeployments.nvidia.com"
    assert cluster.http.get(graph_definition).json()["metadata"]["labels"]["app.kubernetes.io/version"] == __version__
    before = cluster.graph()
    cluster.definitions.upgrade(str(CHARTS / "dynamo-crds"), "dynamo-crds")
    webhook = cluster.http.get(graph_definition).json()["spec"]["conversion"]["webhook"]
    assert webhook["clientConfig"].get("caBundle"), "an upgrade keeps the certificate of the conversion"
    after = cluster.graph()  # The planner goes on scaling it, so that numbers may differ.
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["components"].keys() == before["status"]["components"].keys()
    cluster.platform.upgrade(
        str(CHARTS / "dynamo-platform"), "dynamo-platform", {"dynamo-operator": {"controllerManager": {"replicas": 1}}}
    )
    hooks = http.get(f"{HOOKS}/validatingwebhookconfigurations/dynamo-operator-validating").json()["webhooks"]
    assert all(one["clientConfig"].get("caBundle") for one in hooks), "an upgrade keeps the certificates"
    cluster.platform.uninstall("dynamo-platform", timeout=60)
    for kind in ("validating", "mutating"):
        assert http.get(f"{HOOKS}/{kind}webhookconfigurations").json()["items"] == []
    conversions = {
        one["metadata"]["name"]: (one["spec"].get("conversion") or {}).get("strategy", "None")
        for one in http.get(CRDS).json()["items"]
    }
    assert set(conversions.values()) == {"None"}, "a webhook that no longer exists would refuse every request"
    kept = cluster.graph()
    assert kept["metadata"]["uid"] == before["metadata"]["uid"]
    assert kept["status"]["components"].keys() == before["status"]["components"].keys()
    assert http.delete(f"{GRAPHS}/chat").is_success
    cluster.definitions.uninstall("dynamo-crds")
    assert len(http.get(CRDS).json()["items"]) == len(conversions), "the definitions and their resources are kept"
