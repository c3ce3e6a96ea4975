"""A graph whose processes find each other through the API server: one pod's variables for each process."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.kubernetes.pods import MadePod, call, install_crds, ready_pod, set_ready
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.runtime.discovery.pod_identity import id_of_name

pytestmark = pytest.mark.integration

METADATA = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
AWAY = {"path": "/apis/(nvidia|discovery).*", "status": 503, "count": -1}


class KubernetesGraph(Cluster):
    """A frontend and mockers, each with the identity of a pod."""

    def __init__(self, folder: Path, server: AnyKubernetes) -> None:
        self.server = server
        self._pod = ready_pod(server, "frontend")
        super().__init__(folder, "--discovery-backend", "kubernetes", "--router-mode", "kv")

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "KUBECONFIG": str(self.server.kubeconfig), **self._pod.variables}

    def pod(self, name: str, **variables: str) -> "tuple[MadePod, subprocess.Popen[bytes]]":
        """Start a mocker in a ready pod, and return when the frontend lists it."""
        pod = ready_pod(self.server, name)
        before = self.workers()
        flags = ("--model-name", MODEL, "--discovery-backend", "kubernetes")
        process = self.run("mocker", *flags, **pod.variables, **variables)
        self.wait_until(lambda: self.workers() > before, f"{name} never appeared")
        return pod, process

    def chat(self) -> httpx.Response:
        return self.post(CHAT)


@pytest.fixture
def graph(tmp_path: Path, kubernetes_api: AnyKubernetes) -> Iterator[KubernetesGraph]:
    install_crds(kubernetes_api)
    with KubernetesGraph(tmp_path, kubernetes_api) as made:
        yield made


@pytest.fixture
def own_graph(tmp_path: Path, own_kubernetes: KubernetesServer) -> Iterator[KubernetesGraph]:
    install_crds(own_kubernetes)
    with KubernetesGraph(tmp_path, own_kubernetes) as made:
        yield made


def records(server: AnyKubernetes) -> dict[str, list[str]]:
    """Return the endpoints of each DynamoWorkerMetadata."""
    items = call(server, "GET", METADATA)["items"]
    return {one["metadata"]["name"]: sorted(one["spec"]["data"]["endpoints"]) for one in items}


def test_requests_reach_workers_of_ready_pods_only(graph: KubernetesGraph) -> None:
    first, _ = graph.pod("worker-0")
    graph.pod("worker-1")
    assert graph.chat().status_code == 200
    set_ready(graph.server, first, False)
    graph.wait_until(lambda: graph.workers() == 1, "a pod that is not ready is still listed")
    assert all(graph.chat().status_code == 200 for _ in range(5))
    set_ready(graph.server, first, True)
    graph.wait_until(lambda: graph.workers() == 2, "a pod that is ready again is not listed")


def test_worker_that_ends_removes_its_records_and_a_deleted_pod_its_object(graph: KubernetesGraph) -> None:
    pod, process = graph.pod("worker-0")
    assert f"dynamo/backend/generate/{id_of_name('worker-0'):x}" in records(graph.server)["worker-0"]
    process.terminate()
    assert process.wait(60) == 0
    graph.wait_until(lambda: graph.workers() == 0, "a worker that ended is still listed")
    assert records(graph.server)["worker-0"] == []
    call(graph.server, "DELETE", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}")
    graph.wait_until(lambda: "worker-0" not in records(graph.server), "the object outlives its pod")


def test_requests_are_served_while_the_api_server_is_away_and_new_workers_are_found_afterwards(
    own_graph: KubernetesGraph, own_kubernetes: KubernetesServer
) -> None:
    _, first = own_graph.pod("worker-0")
    own_kubernetes.act(**AWAY)
    own_kubernetes.act(action="drop_watches")
    own_graph.wait_until(
        lambda: own_graph.metric("dynamo_component_discovery_reachable") == 0, "the outage is not shown in the metrics"
    )
    assert all(own_graph.chat().status_code == 200 for _ in range(5))
    own_kubernetes.act(action="clear")
    own_graph.pod("worker-1")
    first.kill()
    own_graph.wait_until(lambda: own_graph.chat().status_code == 200, "no request succeeds after a worker was killed")
    assert own_graph.metric("dynamo_component_discovery_reachable") == 1


def test_metadata_of_the_system_server_shows_the_records_of_the_process(graph: KubernetesGraph) -> None:
    port = free_port()
    graph.pod("worker-0", DYN_SYSTEM_PORT=str(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metadata", timeout=10) as response:
        shown = json.load(response)
    assert sorted(shown["endpoints"]) == records(graph.server)["worker-0"]
    assert {"endpoints", "model_cards", "event_channels", "event_sources"} <= set(shown)


def test_process_outside_a_pod_ends_with_one_line_that_names_the_variable(
    graph: KubernetesGraph,
) -> None:
    process = graph.run("mocker", "--model-name", MODEL, "--discovery-backend", "kubernetes", POD_UID="")
    assert process.wait(60) == 2
    assert "POD_UID: required by --discovery-backend kubernetes" in graph.logs()
