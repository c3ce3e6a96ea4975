"""From `helm install` to a streamed chat completion: the charts, the operator and a graph, with processes as pods."""

import gc
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helm_python.config import Config
from tests.cluster.kubernetes.process_kubelet import ProcessKubelet
from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.operator.permissions import missing

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
CHARTS = ROOT / "deploy" / "helm" / "charts"
SYSTEM = "dynamo-system"
GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
HOOKS = "/apis/admissionregistration.k8s.io/v1"
DEADLINE_S = 120.0
PLANNER = {
    "environment": "kubernetes", "backend": "mocker", "mode": "agg", "optimization_target": "load", "min_endpoint": 2,
    "max_gpu_budget": 4, "decode_engine_num_gpu": 1, "load_adjustment_interval_seconds": 1, "live_dashboard_port": 0,
    "report_interval_hours": None, "decode_scale_up_kv_rate": 60, "decode_scale_down_kv_rate": 10,
    "prefill_scale_up_queue_tokens": 2000, "prefill_scale_down_queue_tokens": 100,
}  # fmt: skip
SMALL = ("--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "8")
"""A worker that the load of `loaded` exceeds."""
Object = dict[str, Any]


def component(name: str, kind: str, *words: str, **more: Any) -> Object:
    container = {"name": "main", "image": "dynamo", "command": ["python3", "-m", *words]}
    return {"name": name, "type": kind, "replicas": 1, "podTemplate": {"spec": {"containers": [container]}}, **more}


def adapted(words: list[str], ip: str) -> list[str]:
    """Return the operator's command with the address of its pod, which has no network of its own here."""
    serves = "dynamo.operator" in words and "--remove-webhooks" not in words
    return [*words, f"--host={ip}"] if serves else words


class Installed:
    """A cluster in which both charts are installed."""

    def __init__(self, server: KubernetesServer, kubelet: ProcessKubelet, folder: Path) -> None:
        self.server, self.kubelet, self.http = server, kubelet, kubelet.http
        assert self.http.post("/api/v1/namespaces", json={"metadata": {"name": SYSTEM}}).is_success
        self.definitions, self.platform = (
            Config(kubeconfig_path=server.kubeconfig, namespace=namespace, storage_driver="memory")
            for namespace in ("default", SYSTEM)
        )

    def wait_until(self, condition: Callable[[], object], message: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{message}\n{self.kubelet.logs()}"
            time.sleep(0.2)

    def install(self) -> None:
        self.definitions.install(str(CHARTS / "dynamo-crds"), "dynamo-crds")
        self.platform.install(str(CHARTS / "dynamo-platform"), "dynamo-platform")
        self.wait_until(lambda: self.kubelet.pods("dynamo-operator"), "the operator is not ready")
        (operator,) = self.kubelet.pods("dynamo-operator")
        service = f"{SYSTEM}/dynamo-operator-webhook-service"
        self.server.server.webhooks.service_addresses[service] = f"https://{operator.ip}:9443"

    def graph(self) -> Object:
        found: Object = self.http.get(f"{GRAPHS}/chat").json()
        return found

    def rules(self) -> list[Object]:
        """Return all rules that the chart gives the operator."""
        roles = self.http.get("/apis/rbac.authorization.k8s.io/v1/clusterroles").json()["items"]
        roles += self.http.get(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles").json()["items"]
        return [rule for role in roles for rule in role["rules"]]


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with (
        KubernetesServer(tmp_path / "kubernetes", tls=True) as server,
        ProcessKubelet(server, logs, adapted) as kubelet,
    ):
        made = Installed(server, kubelet, tmp_path)
        made.install()
        yield made
        made.definitions.close()
        made.platform.close()
    with warnings.catch_warnings():  # Helm keeps its connections, which the server thus does not close.
        warnings.simplefilter("ignore", ResourceWarning)
        del made, server, kubelet
        gc.collect()


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


def test_install_serve_scale_and_uninstall(installed: Installed) -> None:
    http = installed.http
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
    installed.wait_until(lambda: installed.kubelet.pods("chat-frontend"), "the frontend is not ready")
    (frontend,) = installed.kubelet.pods("chat-frontend")
    url = f"http://{frontend.ip}:8000"
    installed.wait_until(lambda: httpx.get(f"{url}/v1/models").json()["data"], "the frontend found no worker")
    assert streamed(url)

    with loaded(url):
        installed.wait_until(lambda: len(installed.kubelet.pods("chat-decode")) >= 2, "the planner did not scale")
    installed.wait_until(lambda: installed.graph()["status"]["state"] == "successful", "the graph is not successful")
    instances = httpx.get(f"{url}/health").json()["instances"]
    assert sum(one["endpoint"] == "generate" for one in instances) >= 2
    alpha = http.get(f"{GRAPHS.replace('v1beta1', 'v1alpha1')}/chat").json()
    assert alpha["spec"]["services"]["decode"]["replicas"] >= 2, "the operator converts versions"

    authorizer = installed.server.server.authorizer
    assert authorizer.refused == []
    account = f"system:serviceaccount:{SYSTEM}:dynamo-operator"
    used = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
        for user, group, resource, verb in authorizer.used if user == account
    ]  # fmt: skip
    assert len(used) > 40
    assert missing(installed.rules(), used) == []

    installed.platform.upgrade(
        str(CHARTS / "dynamo-platform"), "dynamo-platform", {"dynamo-operator": {"controllerManager": {"replicas": 1}}}
    )
    hooks = http.get(f"{HOOKS}/validatingwebhookconfigurations/dynamo-operator-validating").json()["webhooks"]
    assert all(one["clientConfig"].get("caBundle") for one in hooks), "an upgrade keeps the certificates"
    installed.platform.uninstall("dynamo-platform", timeout=60)
    for kind in ("validating", "mutating"):
        assert http.get(f"{HOOKS}/{kind}webhookconfigurations").json()["items"] == []
    conversions = {
        one["metadata"]["name"]: (one["spec"].get("conversion") or {}).get("strategy", "None")
        for one in http.get(CRDS).json()["items"]
    }
    assert set(conversions.values()) == {"None"}, "a webhook that no longer exists would refuse every request"
    kept = installed.graph()
    assert kept["status"]["state"] == "successful"
    assert http.delete(f"{GRAPHS}/chat").is_success
    installed.definitions.uninstall("dynamo-crds")
    assert len(http.get(CRDS).json()["items"]) == len(conversions), "the definitions and their resources are kept"
