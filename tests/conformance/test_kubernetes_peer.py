"""Our processes and the released ones find each other through one Kubernetes API server: the same objects and ids."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.ports import free_port
from tests.cluster.kubernetes.pods import call, install_crds, ready_pod, set_ready
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.peers import HttpResponse, PeerCluster, require_peer

from dynamo.protocols.worker_control import WORKER_CONTROL

pytestmark = pytest.mark.conformance

METADATA = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas/worker-0"
MODEL = "served"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 8}


class PodCluster(PeerCluster):
    """One frontend, and workers, each process with the identity of a pod."""

    def __init__(self, folder: Path, server: KubernetesServer, frontend: str, *flags: str) -> None:
        folder.mkdir()
        self.server = server
        pod = ready_pod(server, "frontend")
        variables = {"DYN_DISCOVERY_BACKEND": "kubernetes", "KUBECONFIG": str(server.kubeconfig), **pod.variables}
        super().__init__(folder, *flags, frontends=(frontend,), variables=variables)
        self.frontend = frontend

    def worker(self, implementation: str, name: str = "worker-0") -> Any:
        """Start a mocker in a ready pod, and return the pod."""
        pod = ready_pod(self.server, name)
        python = {"ours": sys.executable, "theirs": peer_python()}[implementation]
        command = [python, "-m", "dynamo.mocker", "--model-path", bench_model(), "--model-name", MODEL]
        variables = {"DYN_SYSTEM_PORT": str(free_port()), "DYN_SYSTEM_HOST": "127.0.0.1"}
        self.run(command, **pod.variables, **variables)
        return pod

    def is_listed(self) -> bool:
        return self.models(self.frontend) == {MODEL}

    def chat(self) -> HttpResponse:
        return self.request(self.ports[self.frontend], "POST", "/v1/chat/completions", CHAT)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    require_peer()
    with KubernetesServer(tmp_path / "kubernetes") as made:
        install_crds(made)
        yield made


@pytest.mark.parametrize(("frontend", "worker"), [("ours", "theirs"), ("theirs", "ours"), ("ours", "ours")])
def test_each_implementation_finds_and_calls_the_other_and_sees_that_a_pod_is_not_ready(
    tmp_path: Path, server: KubernetesServer, frontend: str, worker: str
) -> None:
    with PodCluster(tmp_path / "processes", server, frontend) as cluster:
        pod = cluster.worker(worker)
        cluster.wait_until(cluster.is_listed, "the worker is not listed")
        response = cluster.chat()
        assert (response.status, response.json["usage"]["completion_tokens"]) == (200, 8)
        set_ready(server, pod, False)
        cluster.wait_until(lambda: not cluster.is_listed(), "a pod that is not ready is still listed")


def test_both_write_equal_objects(tmp_path: Path) -> None:
    require_peer()
    found: dict[str, dict[str, Any]] = {}
    for implementation in ("theirs", "ours"):
        folder = tmp_path / implementation
        with KubernetesServer(folder) as server:
            install_crds(server)
            with PodCluster(folder / "processes", server, implementation, "--router-mode", "kv") as cluster:
                cluster.worker(implementation)
                cluster.wait_until(cluster.is_listed, "the worker is not listed")
                cluster.wait_until(lambda: has_events(call(server, "GET", METADATA)), "no event source")
                found[implementation] = call(server, "GET", METADATA)
    ours, theirs = (described(found[name]) for name in ("ours", "theirs"))
    assert ours["owner"] == theirs["owner"]
    assert ours["fields"] == theirs["fields"]
    added = ours["records"].items() - theirs["records"].items()
    assert [key for (_, key), _ in added] == [f"dynamo/backend/{WORKER_CONTROL}/ID"], "an endpoint that only we have"
    assert {"endpoints", "model_cards", "event_channels", "event_sources"} == {field for field, _ in ours["records"]}


def has_events(value: dict[str, Any]) -> bool:
    """Return whether the worker has registered its source of KV events, the last of its records."""
    return bool(value["spec"]["data"]["event_sources"])


def described(value: dict[str, Any]) -> dict[str, Any]:
    """Return the owner, the fields and the records, with ids and addresses replaced and without cards."""
    (owner,) = value["metadata"]["ownerReferences"]
    records = {}
    for field, entries in value["spec"]["data"].items():
        for key, record in entries.items():
            shown = {name: one for name, one in record.items() if name not in ("card_json", "response_frames")}
            records[field, plain(key)] = plain(json.dumps(shown, sort_keys=True))
    return {"owner": owner | {"uid": ""}, "fields": sorted(value["spec"]["data"]), "records": records}


def plain(text: str) -> str:
    """Replace addresses and ids, decimal or hexadecimal, by their kind."""
    text = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{11,19}\b|(?<=_)(?=[0-9a-f]*\d)[0-9a-f]{11,19}(?=[/\",}]|$)", "ID", text)
