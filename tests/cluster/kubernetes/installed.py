"""A cluster in which the charts are installed, and whose pods are processes of this machine."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helm_python.config import Config
from tests.cluster.kubernetes.process_kubelet import ProcessKubelet
from tests.cluster.kubernetes.running import KubernetesServer

CHARTS = Path(__file__).parents[3] / "deploy" / "helm" / "charts"
SYSTEM = "dynamo-system"
GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
DEADLINE_S = 120.0
SERVERS = ("dynamo.operator", "dynamo.epp")
"""Modules whose address is a flag."""
Object = dict[str, Any]


def component(name: str, kind: str, *words: str, **more: Any) -> Object:
    container = {"name": "main", "image": "dynamo", "command": ["python3", "-m", *words]}
    return {"name": name, "type": kind, "replicas": 1, "podTemplate": {"spec": {"containers": [container]}}, **more}


def adapted(words: list[str], ip: str) -> list[str]:
    """Return a command with the address of its pod, which has no network of its own here."""
    serves = any(one in words for one in SERVERS) and "--remove-webhooks" not in words
    return [*words, f"--host={ip}"] if serves else words


class Installed:
    """A cluster in which both charts are installed."""

    def __init__(self, server: KubernetesServer, kubelet: ProcessKubelet) -> None:
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

    def install(self, definitions: Path = CHARTS / "dynamo-crds") -> None:
        """Install both charts, and return when the operator is ready."""
        self.definitions.install(str(definitions), "dynamo-crds")
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


@contextmanager
def installed(
    folder: Path,
    definitions: Path = CHARTS / "dynamo-crds",
    adapt: Callable[[list[str], str], list[str]] = adapted,
) -> Iterator[Installed]:
    """Run the cluster during the block; `definitions` is the chart of the resource definitions.

    `adapt` changes the command of a pod, given its address.
    """
    logs = folder / "logs"
    logs.mkdir()
    with KubernetesServer(folder / "kubernetes", tls=True) as server, ProcessKubelet(server, logs, adapt) as kubelet:
        made = Installed(server, kubelet)
        made.install(definitions)
        yield made
        made.definitions.close()
        made.platform.close()
    with warnings.catch_warnings():  # Helm keeps its connections, which the server thus does not close.
        warnings.simplefilter("ignore", ResourceWarning)
        del made, server, kubelet
        gc.collect()
