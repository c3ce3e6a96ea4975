"""Rights: the operator and the processes of a graph run with exactly the roles that are rendered for them."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_ports
from tests.cluster.cluster import MODEL
from tests.cluster.kubernetes.operated import SPACE, Object, OperatedCluster, graph, is_successful, run_on
from tests.cluster.kubernetes.pods import MadePod, call
from tests.cluster.kubernetes.released import ASSETS, ReleasedKubernetes, released_assets
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import account_kubeconfig, administrator, install_definitions
from tests.cluster.processes import ProcessGroup, wait_until

from dynamo.core.codec import json_encode
from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import DEPLOYMENTS, GRAPHS, KINDS, MODELS, SCALING_ADAPTERS
from dynamo.operator.permissions import (
    CLUSTER_RULES,
    ELECTION_RULES,
    GPU_DISCOVERY_RULES,
    GRAPH_RULES,
    WORKLOAD_RULES,
    cells,
    granted,
    missing,
    rules_of,
)
from dynamo.operator.reconcile.names import GraphContext, OperatorSettings
from dynamo.operator.reconcile.shared import joint_objects
from dynamo.operator.webhook_configurations import CONFIGURATIONS
from dynamo.protocols.kubernetes.crds import CONVERSION_NAMESPACE
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

pytestmark = pytest.mark.integration

Right = tuple[str, str, str]
ACCOUNT = "dynamo-operator"
GRAPH_PATH = f"/apis/nvidia.com/v1beta1/namespaces/{SPACE}/dynamographdeployments"
PLACE = re.compile(
    r"/apis?/(?P<group>.+/)?v[^/]+/(?:namespaces/[^/]+/)?(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def right_of(method: str, path: str, query: str) -> Right:
    """Return API group, resource and verb of a request."""
    found = PLACE.fullmatch(path)
    assert found is not None, path
    resource = f"{found['plural']}/{found['sub']}" if found["sub"] else found["plural"]
    verb = VERBS.get(method) or ("get" if found["name"] else "watch" if "watch=true" in query else "list")
    return (found["group"] or "").rstrip("/"), resource, verb


def cluster_rules() -> list[Object]:
    return rules_of(GRAPH_RULES, WORKLOAD_RULES, CLUSTER_RULES, GPU_DISCOVERY_RULES)


def declared() -> set[Right]:
    return {cell for rule in [*cluster_rules(), *rules_of(ELECTION_RULES)] for cell in cells(rule)}


def manifest(rules: list[Object]) -> list[Object]:
    """Return the operator's account with its cluster role, and its role in its own namespace, as the chart has them."""
    account = {"name": ACCOUNT, "namespace": CONVERSION_NAMESPACE}
    subjects = [{"kind": "ServiceAccount", **account}]
    values: list[Object] = [{"kind": "ServiceAccount", "metadata": account}]
    for prefix, metadata, own in (("Cluster", {"name": ACCOUNT}, rules), ("", account, rules_of(ELECTION_RULES))):
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": ACCOUNT}
        values.append({"kind": f"{prefix}Role", "metadata": metadata, "rules": own})
        values.append(
            {"kind": f"{prefix}RoleBinding", "metadata": metadata, "subjects": subjects, "roleRef": reference}
        )
    return values


def test_rights_that_the_operator_grants_are_its_own() -> None:
    assert missing(cluster_rules(), granted()) == []


def full_graph(image: str = "image:1") -> Object:
    """Return a graph with a planner, a scaling adapter, an Ingress and a claim."""
    value = graph(image=image)
    value["spec"]["components"][1]["scalingAdapter"] = {}
    value["spec"]["components"].append({"name": "planner", "type": "planner", "replicas": 1})
    planner = {"spec": {"containers": [{"name": "main", "image": "planner:1"}]}}
    value["spec"]["components"][2]["podTemplate"] = planner
    claim = {"name": "cache", "create": True, "size": "1Gi", "storageClass": "fast"}
    services = {"Frontend": {"ingress": {"enabled": True, "host": "chat.example.com"}}}
    text = json_encode({"pvcs": [claim], "services": services}).decode()
    value["metadata"]["annotations"] = {"nvidia.com/dgd-spec": text}
    return value


def test_every_request_of_the_operator_is_among_its_declared_rights(
    own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(cluster: OperatedCluster) -> None:
        used: set[Right] = set()
        client = KubeClient()

        send = client._connection.request

        def record(method: str, target: str, *more: Any) -> Any:
            path, _, query = target.partition("?")
            if PLACE.fullmatch(path):  # Others list the kinds of a group, which everyone may do.
                used.add(right_of(method, path, query))
            return send(method, target, *more)

        monkeypatch.setattr(client._connection, "request", record)
        async with cluster.operator(client):
            await cluster.apply(full_graph())
            await cluster.until(is_successful(1))
            scale = {"spec": {"replicas": 3}}
            await cluster.client.patch(SCALING_ADAPTERS, "chat-decode", scale, SPACE, subresource="scale")
            await cluster.until(is_successful(2))
            model = {"modelName": "base", "baseModelName": "base"}
            await cluster.client.create(MODELS, {"metadata": {"name": "m"}, "spec": model}, SPACE)
            await cluster.apply(full_graph("image:2"))
            await cluster.until(lambda status: (status.get("rollingUpdate") or {}).get("phase") == "Completed")
        await client.close()
        known = {(one.api_version.rpartition("/")[0], one.plural) for one in (*KINDS, *CONFIGURATIONS.values())}
        places = {one for one in used if (one[0], one[1].partition("/")[0]) in known}
        assert places <= declared()
        patched = {(group, name) for group, name, verb in places if verb == "patch"}
        assert ("apps", "deployments") in patched and ("nvidia.com", "dynamographdeployments/status") in patched
        assert ("nvidia.com", "dynamocomponentdeployments", "delete") in places

    run_on(own_kubernetes, monkeypatch)(case)


@pytest.fixture
def released(request: pytest.FixtureRequest) -> Iterator[ReleasedKubernetes]:
    if released_assets() is None:
        pytest.skip(f"{ASSETS} does not name a folder with kube-apiserver and etcd; only these apply RBAC")
    server: ReleasedKubernetes = request.getfixturevalue("released_server")
    install_definitions(server)
    with administrator(server) as api:
        api.post("/api/v1/namespaces", json={"metadata": {"name": CONVERSION_NAMESPACE}})
    yield server
    server.reset()


def create(server: ReleasedKubernetes, values: list[Object]) -> None:
    """Create accounts, roles and bindings."""
    plurals = {"ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts"}
    for value in values:
        kind = value["kind"]
        space = "" if kind.startswith("Cluster") else f"namespaces/{value['metadata'].get('namespace')}/"
        path = plurals.get(kind, "").format(value["metadata"].get("namespace"))
        call(server, "POST", path or f"/apis/rbac.authorization.k8s.io/v1/{space}{kind.lower()}s", value)


class OperatorProcess(ProcessGroup):
    """The operator as its account runs it, with webhooks."""

    def __init__(self, folder: Path, server: ReleasedKubernetes) -> None:
        super().__init__(folder)
        config = account_kubeconfig(server, folder, CONVERSION_NAMESPACE, ACCOUNT)
        health, webhooks = free_ports(2)
        flags = (
            "--port",
            str(health),
            "--webhook-port",
            str(webhooks),
            "--webhook-url",
            f"https://127.0.0.1:{webhooks}",
        )
        self.start("operator", [sys.executable, "-m", "dynamo.operator", *flags], {"KUBECONFIG": str(config)})


def until_ready(server: ReleasedKubernetes, group: ProcessGroup, generation: int) -> Object:
    def is_ready() -> bool:
        status = call(server, "GET", f"{GRAPH_PATH}/chat").get("status") or {}
        return is_successful(generation)(status)

    group.wait_until(is_ready, "the graph is not ready")
    found: Object = call(server, "GET", f"{GRAPH_PATH}/chat")
    return found


def test_operator_runs_with_its_role_and_installs_its_webhooks(released: ReleasedKubernetes, tmp_path: Path) -> None:
    create(released, manifest(cluster_rules()))
    group = OperatorProcess(tmp_path, released)
    try:
        hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
        group.wait_until(lambda: call(released, "GET", hooks)["items"], "the webhooks are not installed")
        call(released, "POST", GRAPH_PATH, full_graph())
        made = until_ready(released, group, 1)
        assert "nvidia.com/dynamo-operator-origin-version" in made["metadata"]["annotations"]
        account = f"/api/v1/namespaces/{SPACE}/serviceaccounts/planner-serviceaccount"
        assert call(released, "GET", account)["metadata"]["ownerReferences"][0]["name"] == "chat"
        adapters = f"/apis/nvidia.com/v1alpha1/namespaces/{SPACE}/dynamographdeploymentscalingadapters"
        reference = call(released, "GET", f"{adapters}/chat-decode")["spec"]["dgdRef"]
        assert reference == {"name": "chat", "serviceName": "decode"}  # Converted by the webhook.
        call(released, "PATCH", f"{adapters}/chat-decode/scale", {"spec": {"replicas": 3}})
        until_ready(released, group, 2)
        call(released, "DELETE", f"{GRAPH_PATH}/chat")
        deployments = f"/apis/apps/v1/namespaces/{SPACE}/deployments"
        group.wait_until(lambda: not call(released, "GET", deployments)["items"], "deployments were not collected")
        assert "forbidden" not in group.logs()
    finally:
        group.stop()


def test_processes_of_a_graph_find_each_other_with_the_account_of_the_graph(
    released: ReleasedKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(released.kubeconfig))

    async def with_graph() -> None:
        client = KubeClient()
        cluster = OperatedCluster(released, client)
        async with cluster.operator():
            await cluster.apply(graph(workers=1))
            await cluster.until(is_successful(1))
        await client.close()

    asyncio.run(with_graph())
    config = account_kubeconfig(released, tmp_path, SPACE, "chat-k8s-service-discovery")
    pods = call(released, "GET", f"/api/v1/namespaces/{SPACE}/pods")["items"]
    group = ProcessGroup(tmp_path)
    port = free_ports(1)[0]
    modules = {"frontend": ("--http-port", str(port)), "decode": ("--model-name", MODEL)}
    try:
        for component, flags in modules.items():
            metadata = next(one["metadata"] for one in pods if f"-{component}" in one["metadata"]["name"])
            pod = MadePod(metadata["name"], SPACE, metadata["uid"])
            module = "dynamo.frontend" if component == "frontend" else "dynamo.mocker"
            command = [sys.executable, "-m", module, *flags, "--discovery-backend", "kubernetes"]
            group.start(component, command, {"KUBECONFIG": str(config), **pod.variables})
        group.wait_until(lambda: MODEL in models(port), "the frontend does not list the worker's model")
    finally:
        group.stop()


def models(port: int) -> str:
    found = subprocess.run(
        ["curl", "-s", f"http://127.0.0.1:{port}/v1/models"], capture_output=True, text=True, check=False
    )
    return found.stdout


def test_planner_scales_a_component_with_its_account_and_may_not_delete_the_graph(
    released: ReleasedKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = GraphContext(name="chat", namespace=SPACE, settings=OperatorSettings(), worker_hash="")
    create(released, list(joint_objects([ComponentSpec(name="planner", type="planner")], context)))
    call(released, "POST", GRAPH_PATH, graph())
    config = account_kubeconfig(released, tmp_path, SPACE, "planner-serviceaccount")
    monkeypatch.setenv("KUBECONFIG", str(config))

    async def case() -> None:
        client = KubeClient()
        try:
            await client.patch(GRAPHS, "chat", {"metadata": {"labels": {"a": "b"}}}, SPACE)
            for kind, action in (
                (GRAPHS, client.delete(GRAPHS, "chat", SPACE)),
                (DEPLOYMENTS, client.list(DEPLOYMENTS, SPACE)),
            ):
                with pytest.raises(Exception, match="403 Forbidden"):
                    await action
                assert kind
        finally:
            await client.close()

    asyncio.run(case())


WITHOUT: tuple[tuple[str, Callable[[Object], bool]], ...] = (
    ("deployments", lambda rule: "deployments" in rule["resources"]),
    ("roles", lambda rule: "roles" in rule["resources"]),
    ("pods of the granted role", lambda rule: "pods" in rule["resources"]),
    ("status of graphs", lambda rule: any(one.endswith("/status") for one in rule["resources"])),
)


@pytest.mark.parametrize("removed", [name for name, _ in WITHOUT])
def test_operator_without_a_rule_does_not_make_a_graph_ready(
    released: ReleasedKubernetes, tmp_path: Path, removed: str
) -> None:
    is_removed = dict(WITHOUT)[removed]
    create(released, manifest([rule for rule in cluster_rules() if not is_removed(rule)]))
    group = OperatorProcess(tmp_path, released)
    try:
        call(released, "POST", GRAPH_PATH, graph())
        wait_until(
            lambda: "forbidden" in group.logs().lower(), f"nothing was refused without {removed}\n{group.logs()}"
        )
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            status = call(released, "GET", f"{GRAPH_PATH}/chat").get("status") or {}
            assert status.get("state") != "successful"
            time.sleep(0.2)
    finally:
        group.stop()
