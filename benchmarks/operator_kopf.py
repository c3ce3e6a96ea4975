"""Prototype of the graph reconcile on kopf, to which `operator_scale.py` compares the operator.

It makes the same objects: the plans are those of `dynamo.operator.reconcile`. Different is what surrounds them: watches, queues,
handlers and the record of what was handled are kopf's, requests are sent with aiohttp. Run by kopf in an environment of
its own: `kopf run -A benchmarks/operator_kopf.py`.
"""

import asyncio
import collections
import datetime as dt
import importlib
import os
import ssl
from typing import Any

import yaml

from dynamo.k8s.kinds import BY_NAME, COMPONENTS, DEPLOYMENTS, GRAPHS, ObjectKind
from dynamo.operator.applier import owned
from dynamo.operator.reconcile.component import component_plan
from dynamo.operator.reconcile.graph import graph_plan
from dynamo.operator.reconcile.graph_pass import ObservedGraph
from dynamo.operator.reconcile.names import GRAPH, OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoComponentDeployment, DynamoGraphDeployment

kopf: Any = importlib.import_module("kopf")
aiohttp: Any = importlib.import_module("aiohttp")
SETTINGS, FACTS = OperatorSettings(), ClusterFacts()
GROUP, VERSION = GRAPHS.api_version.split("/")
GRAPH_KIND, COMPONENT_KIND = (GROUP, VERSION, GRAPHS.plural), (GROUP, VERSION, COMPONENTS.plural)
DEPLOYMENT_KIND = ("apps", "v1", DEPLOYMENTS.plural)
ATTEMPTS, RETRY_S = 20, 0.2
APPLY = {"Content-Type": "application/apply-patch+yaml"}


class Api:
    """Server-side apply over one connection pool."""

    def __init__(self) -> None:
        with open(os.environ["KUBECONFIG"], encoding="utf-8") as file:
            config = yaml.safe_load(file)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # The server of the benchmark, on loopback.
        connector = aiohttp.TCPConnector(ssl=context)
        headers = {"Authorization": f"Bearer {user['token']}", **APPLY}
        self._session = aiohttp.ClientSession(cluster["server"], headers=headers, connector=connector)

    async def apply(self, kind: ObjectKind, value: KubeObject, subresource: str | None = None) -> None:
        """Create or update an object or its status."""
        metadata = value["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], subresource)
        named = {"apiVersion": kind.api_version, "kind": kind.kind, **value}
        parameters = {"fieldManager": "kopf", "force": "true"}
        for _ in range(ATTEMPTS):  # Events are not handled again: a conflict must be resolved here.
            async with self._session.patch(path, json=named, params=parameters) as response:
                if response.status in {200, 201, 404}:
                    return
                text = await response.text()
            await asyncio.sleep(RETRY_S)
        raise kopf.TemporaryError(text, delay=1)

    async def status(self, kind: ObjectKind, owner: KubeObject, status: KubeObject | None) -> None:
        """Write a status that differs from the present one."""
        if status is not None and status != owner.get("status"):
            metadata = {name: owner["metadata"][name] for name in ("name", "namespace")}
            await self.apply(kind, {"metadata": metadata, "status": status}, "status")


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def planned(graph: KubeObject, components: Any) -> Any:
    """Return the plan of a graph."""
    key = (graph["metadata"]["namespace"], graph["metadata"]["name"])
    found = [decode(DynamoComponentDeployment, one) for one in components.get(key, ())]
    return graph_plan(decode(DynamoGraphDeployment, graph), ObservedGraph(components=found), SETTINGS, FACTS, now())


@kopf.on.startup()
async def start(settings: Any, memo: Any, **_: Any) -> None:
    settings.posting.enabled = False
    memo.api, memo.locks = Api(), collections.defaultdict(asyncio.Lock)


@kopf.index(*GRAPH_KIND)
def graphs(namespace: str, name: str, body: Any, **_: Any) -> Any:
    return {(namespace, name): dict(body)}


@kopf.index(*COMPONENT_KIND)
def components(namespace: str, labels: Any, body: Any, **_: Any) -> Any:
    return {(namespace, labels.get(GRAPH, "")): dict(body)}


@kopf.index(*COMPONENT_KIND)
def by_name(namespace: str, name: str, body: Any, **_: Any) -> Any:
    return {(namespace, name): dict(body)}


@kopf.index(*DEPLOYMENT_KIND, labels={GRAPH: kopf.PRESENT})
def workloads(namespace: str, name: str, body: Any, **_: Any) -> Any:
    return {(namespace, name): dict(body)}


@kopf.on.resume(*GRAPH_KIND)
@kopf.on.create(*GRAPH_KIND)
@kopf.on.update(*GRAPH_KIND)
async def reconcile_graph(body: Any, memo: Any, components: Any, **_: Any) -> None:
    graph = dict(body)
    plan = planned(graph, components)
    for value in plan.apply:
        await memo.api.apply(BY_NAME[value["apiVersion"], value["kind"]], owned(value, graph, GRAPHS))


@kopf.on.event(*COMPONENT_KIND)
async def component_changed(
    namespace: str,
    name: str,
    labels: Any,
    memo: Any,
    by_name: Any,
    workloads: Any,
    graphs: Any,
    components: Any,
    **_: Any,
) -> None:
    await report_component(memo, (namespace, name), by_name, workloads)
    key = (namespace, labels.get(GRAPH, ""))
    async with memo.locks[key]:  # Events of several components are handled at once; the last one must write last.
        for graph in graphs.get(key, ()):
            await memo.api.status(GRAPHS, graph, planned(graph, components).status)


@kopf.on.resume(*COMPONENT_KIND)
@kopf.on.create(*COMPONENT_KIND)
@kopf.on.update(*COMPONENT_KIND)
async def reconcile_component(body: Any, memo: Any, **_: Any) -> None:
    component = dict(body)
    plan = component_plan(decode(DynamoComponentDeployment, component), None, SETTINGS, FACTS, now())
    for value in plan.apply:
        await memo.api.apply(BY_NAME[value["apiVersion"], value["kind"]], owned(value, component, COMPONENTS))


@kopf.on.event(*DEPLOYMENT_KIND, labels={GRAPH: kopf.PRESENT})
async def workload_changed(namespace: str, name: str, memo: Any, by_name: Any, workloads: Any, **_: Any) -> None:
    await report_component(memo, (namespace, name), by_name, workloads)


async def report_component(memo: Any, key: tuple[str, str], by_name: Any, workloads: Any) -> None:
    async with memo.locks[("component", *key)]:
        for component in by_name.get(key, ()):
            workload = next(iter(workloads.get(key, ())), None)
            deployed = decode(DynamoComponentDeployment, component)
            plan = component_plan(deployed, workload, SETTINGS, FACTS, now())
            await memo.api.status(COMPONENTS, component, plan.status)
