"""The operator against an API server: graphs become ready, heal, roll, restart, and cost nothing at rest."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import COMPONENTS, DEPLOYMENTS, EVENTS, GRAPHS, SERVICES, STORED_ADAPTERS
from dynamo.operator.manager import Operator
from dynamo.operator.reconcile.names import RESTART_AT, OperatorSettings
from dynamo.protocols.kubernetes.crds import manifests

pytestmark = pytest.mark.integration

Object = dict[str, Any]
SPACE = "default"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEADLINE_S = 20.0


def component(name: str, kind: str, replicas: int, image: str) -> Object:
    template = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": template}


def graph(name: str = "chat", *, image: str = "image:1", workers: int = 2, **more: Any) -> Object:
    components = [component("Frontend", "frontend", 1, "front:1"), component("decode", "decode", workers, image)]
    return {
        "apiVersion": GRAPHS.api_version,
        "kind": GRAPHS.kind,
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {"components": components, **more},
    }


class Cluster:
    """An API server with the resource definitions, and a client of it."""

    def __init__(self, server: KubernetesServer, client: KubeClient) -> None:
        self.server = server
        self.client = client

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """Run an operator."""
        made = Operator(self.client, OperatorSettings())
        made.start()
        try:
            yield made
        finally:
            await made.close()

    async def apply(self, value: Object) -> None:
        await self.client.apply(GRAPHS, value, SPACE, manager="user")

    async def status(self, name: str = "chat") -> Object:
        value = await self.client.get(GRAPHS, name, SPACE)
        return (value or {}).get("status") or {}

    async def until(self, is_reached: Callable[[Object], bool], name: str = "chat") -> Object:
        """Wait until the status of a graph has a property; return it."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_reached(status := await self.status(name)):
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)
        return status

    async def names(self, kind: Any) -> list[str]:
        listed = await self.client.list(kind, SPACE)
        return sorted(one["metadata"]["name"] for one in listed.items)


Case = Callable[[Cluster], Any]


@pytest.fixture
def run(kubernetes_api: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    """Return a function that runs a case with the resource definitions installed, without their conversion webhook."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))

    async def with_cluster(case: Case) -> None:
        client = KubeClient()
        headers = {"Authorization": f"Bearer {kubernetes_api.token}"}
        async with httpx.AsyncClient(base_url=kubernetes_api.url, headers=headers, timeout=30) as api:
            for _, crd in manifests():
                assert (await api.post(CRDS, json=crd)).status_code == 201
        try:
            await case(Cluster(kubernetes_api, client))
        finally:
            await client.close()

    return lambda case: asyncio.run(with_cluster(case))


def is_successful(generation: int) -> Callable[[Object], bool]:
    return lambda status: status.get("state") == "successful" and status.get("observedGeneration") == generation


def test_a_graph_becomes_ready_and_is_at_rest(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            status = await cluster.until(is_successful(1))
            assert status["components"]["decode"]["readyReplicas"] == 2
            assert len(await cluster.names(DEPLOYMENTS)) == len(await cluster.names(SERVICES)) == 2
            await asyncio.sleep(0.5)
            before = operator.applier.counts.total
            await asyncio.sleep(2.0)
            assert operator.applier.counts.total == before
            events = await cluster.client.list(EVENTS, SPACE)
            assert "Ready" in {one["reason"] for one in events.items}

    run(case)


def test_a_second_operator_writes_nothing_that_changes_an_object(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
        kinds = (GRAPHS, COMPONENTS, DEPLOYMENTS, SERVICES)
        before = [await cluster.client.list(kind, SPACE) for kind in kinds]
        async with cluster.operator() as operator:
            deadline = time.monotonic() + DEADLINE_S
            while not operator.is_idle:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
        after = [await cluster.client.list(kind, SPACE) for kind in kinds]
        assert [one.items for one in after] == [one.items for one in before]

    run(case)


def test_edited_and_deleted_children_are_restored(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            services, deployments = await cluster.names(SERVICES), await cluster.names(DEPLOYMENTS)
            await cluster.client.delete(SERVICES, services[0], SPACE)
            await cluster.client.delete(DEPLOYMENTS, deployments[0], SPACE)
            await cluster.client.patch(DEPLOYMENTS, deployments[1], {"spec": {"replicas": 5}}, SPACE)
            await asyncio.sleep(0.3)
            await cluster.until(is_successful(1))
            assert await cluster.names(SERVICES) == services
            assert await cluster.names(DEPLOYMENTS) == deployments
            restored = await cluster.client.get(DEPLOYMENTS, deployments[1], SPACE)
            assert restored is not None and restored["spec"]["replicas"] == 1

    run(case)


def test_a_new_image_rolls_the_workers_and_a_restart_reaches_every_pod(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            before = await cluster.names(DEPLOYMENTS)
            await cluster.apply(graph(image="image:2"))
            status = await cluster.until(is_successful(2))
            after = await cluster.names(DEPLOYMENTS)
            assert status["rollingUpdate"]["phase"] == "Completed"
            assert len(after) == 2 and len(set(before) & set(after)) == 1
            await cluster.apply(graph(image="image:2", restart={"id": "r1"}))
            await cluster.until(lambda found: (found.get("restart") or {}).get("phase") == "Completed")
            for name in after:
                value = await cluster.client.get(DEPLOYMENTS, name, SPACE)
                assert value is not None
                assert value["spec"]["template"]["metadata"]["annotations"][RESTART_AT] == "r1"

    run(case)


def test_an_object_of_someone_else_is_not_taken_over(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        foreign = {
            "metadata": {"name": "chat-frontend", "namespace": SPACE},
            "spec": {"selector": {"app": "other"}, "ports": [{"port": 1}]},
        }
        await cluster.client.create(SERVICES, {"apiVersion": "v1", "kind": "Service", **foreign}, SPACE)
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(lambda status: status.get("state") == "pending")
            await asyncio.sleep(0.5)
            found = await cluster.client.get(SERVICES, "chat-frontend", SPACE)
            assert found is not None and found["spec"]["selector"] == {"app": "other"}
            await cluster.client.delete(SERVICES, "chat-frontend", SPACE)
            await cluster.until(is_successful(1))

    run(case)


def test_a_deleted_graph_leaves_nothing(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while await cluster.names(DEPLOYMENTS) or await cluster.names(SERVICES) or len(operator.applier):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


def test_a_scaled_adapter_scales_the_component(run: Callable[[Case], None]) -> None:
    async def case(cluster: Cluster) -> None:
        value = graph()
        value["spec"]["components"][1]["scalingAdapter"] = {}
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            body = {"spec": {"replicas": 4}}
            await cluster.client.patch(STORED_ADAPTERS, "chat-decode", body, SPACE, subresource="scale")
            status = await cluster.until(is_successful(2))
            assert status["components"]["decode"]["readyReplicas"] == 4
            assert "rollingUpdate" not in status
            deadline = time.monotonic() + DEADLINE_S
            while True:
                adapter = await cluster.client.get(STORED_ADAPTERS, "chat-decode", SPACE)
                assert adapter is not None and time.monotonic() < deadline
                if (adapter.get("status") or {}).get("replicas") == 4:
                    break
                await asyncio.sleep(0.05)
            assert "nvidia.com/dynamo-component=decode" in adapter["status"]["selector"]

    run(case)
