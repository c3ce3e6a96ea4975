"""A cluster with the operator, for tests: the API server, the resource definitions, graphs and their status."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.cluster.kubernetes.reset import KEPT
from tests.cluster.kubernetes.servers import AnyKubernetes, install_definitions

from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import GRAPHS
from dynamo.k8s.leader import LeaderElection
from dynamo.operator.manager import Operator
from dynamo.operator.optional_kinds import OptionalSettings
from dynamo.operator.reconcile.names import OperatorSettings

Object = dict[str, Any]
SPACE = "default"
DEADLINE_S = 60.0
COLLECTED_S = 60.0
"""Limit of garbage collection: the released collector looks for new kinds every 30 s."""
LOOK_S = 0.5
"""Interval in which the operator looks for optional kinds."""
REST_S = 1.0


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


class OperatedCluster:
    """An API server with the resource definitions, and a client of it."""

    def __init__(self, server: AnyKubernetes, client: KubeClient) -> None:
        self.server = server
        self.client = client

    @asynccontextmanager
    async def operator(
        self, client: KubeClient | None = None, election: LeaderElection | None = None
    ) -> AsyncIterator[Operator]:
        """Run an operator, with a client of its own if one is given."""
        used = client or self.client
        made = Operator(used, OperatorSettings(), election=election, optional=OptionalSettings(look_s=LOOK_S))
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

    async def until_at_rest(self, operator: Operator) -> None:
        """Wait until the operator has written nothing for a while: controllers report after it is successful."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            before = operator.applier.counts.total
            await asyncio.sleep(REST_S)
            if operator.is_idle and operator.applier.counts.total == before:
                return
            assert time.monotonic() < deadline, operator.applier.counts

    async def names(self, kind: Any) -> list[str]:
        listed = await self.client.list(kind, SPACE)
        return sorted({one["metadata"]["name"] for one in listed.items} - KEPT)


class DyingClient(KubeClient):
    """Client whose process dies at one of its writes: the server executes the write, and no further one follows."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at
        self.has_died = asyncio.Event()

    async def _request(self, method: str, path: str, *more: Any, **named: Any) -> Any:
        if self.has_died.is_set():
            await asyncio.Event().wait()
        is_write = method in ("PATCH", "DELETE", "POST") and "/events" not in path
        result = await super()._request(method, path, *more, **named)
        if is_write:
            self.left -= 1
            if self.left == 0:
                self.has_died.set()
                await asyncio.Event().wait()
        return result


Case = Callable[[OperatedCluster], Any]


def run_on(
    kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch, definitions: Sequence[Object] = ()
) -> Callable[[Case], None]:
    """Return a function that runs a case with the resource definitions installed, without their conversion webhook.

    `definitions` are installed too.
    """
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))

    async def with_cluster(case: Case) -> None:
        install_definitions(kubernetes_api, *definitions)
        client = KubeClient()
        try:
            await case(OperatedCluster(kubernetes_api, client))
        finally:
            await client.close()

    return lambda case: asyncio.run(with_cluster(case))


def is_successful(generation: int) -> Callable[[Object], bool]:
    return lambda status: status.get("state") == "successful" and status.get("observedGeneration") == generation
