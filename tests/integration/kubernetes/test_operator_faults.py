"""The operator under faults: killed after any write, an API server that refuses, drops or is away, a lost leader."""

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest
from tests.cluster.kubernetes.operated import (
    DEADLINE_S,
    SPACE,
    Case,
    DyingClient,
    Object,
    OperatedCluster,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.running import KubernetesServer
from tests.settle import until

from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import COMPONENTS, DEPLOYMENTS, GRAPHS, SERVICES
from dynamo.k8s.leader import LeaderElection, LeaseName, LeaseTimings
from dynamo.operator import manager
from dynamo.operator.manager import Operator
from dynamo.operator.reconcile.names import OperatorSettings

pytestmark = pytest.mark.integration

WRITES_OF_A_GRAPH, WRITES_OF_AN_UPDATE = 9, 5
"""Least number of writes; the statuses that are written between depend on the time."""


@pytest.fixture
def run(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    monkeypatch.setattr(manager, "STOP_S", 0.01)
    return run_on(own_kubernetes, monkeypatch)


async def survives(cluster: OperatedCluster, at: int, value: Object, generation: int) -> bool:
    """Apply a graph under an operator that dies at its write number `at`; return whether the graph was ready before."""
    client = DyingClient(at)
    operator = Operator(client, OperatorSettings())
    operator.start()
    try:
        await cluster.apply(value)
        deadline = time.monotonic() + DEADLINE_S
        while not client.has_died.is_set():
            assert time.monotonic() < deadline
            if is_successful(generation)(await cluster.status(value["metadata"]["name"])):
                return True
            await asyncio.sleep(0.02)
        return False
    finally:
        await operator.close()
        await client.close()


async def names_of(cluster: OperatedCluster, name: str) -> list[str]:
    found = [await cluster.names(kind) for kind in (COMPONENTS, DEPLOYMENTS, SERVICES)]
    return [one for names in found for one in names if one.startswith(f"{name}-")]


def test_graph_becomes_ready_after_an_operator_crash_at_any_write(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        for at in itertools.count(1, 2):
            name = f"g{at}"
            if await survives(cluster, at, graph(name), 1):
                assert at > WRITES_OF_A_GRAPH
                return
            async with cluster.operator():
                await cluster.until(is_successful(1), name)
                assert len(await names_of(cluster, name)) == 6
                await cluster.client.delete(GRAPHS, name, SPACE)
                deadline = time.monotonic() + DEADLINE_S
                while await names_of(cluster, name):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)

    run(case)


def test_rolling_update_completes_after_an_operator_crash_at_any_write(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        await cluster.apply(graph())
        async with cluster.operator():
            await cluster.until(is_successful(1))
        for generation in itertools.count(2):
            at = 2 * generation - 3
            if await survives(cluster, at, graph(image=f"image:{generation}"), generation):
                assert at > WRITES_OF_AN_UPDATE
                return
            async with cluster.operator():
                status = await cluster.until(is_successful(generation))
                assert status["rollingUpdate"]["phase"] == "Completed"
                assert len(await cluster.names(DEPLOYMENTS)) == 2

    run(case)


def test_graph_becomes_ready_despite_refused_requests_and_dropped_watches(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        act = cluster.server.act
        async with cluster.operator():
            act(method="PATCH", path=".*deployments.*", status=500, count=3)
            act(method="PATCH", path=".*", status=429, retry_after_s=0, count=3)
            act(method="GET", path=".*services.*", status=503, count=3)
            await cluster.client.create(GRAPHS, graph(), SPACE)
            for _ in range(5):
                act(action="drop_watches")
                await asyncio.sleep(0.1)
            act(action="compact")
            act(action="drop_watches")
            await cluster.until(is_successful(1))

    run(case)


def test_an_edit_during_an_outage_is_reconciled_after_it(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        act = cluster.server.act
        operators = KubeClient()
        async with cluster.operator(operators) as operator:
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            act(action="drop_watches")
            act(method="GET", path=".*", status=503, count=-1)
            await cluster.client.delete(DEPLOYMENTS, "chat-frontend", SPACE)
            await cluster.apply(graph(workers=3))
            await asyncio.sleep(0.5)
            assert operator.view.get(DEPLOYMENTS, SPACE, "chat-frontend") is not None
            act(action="clear")
            status = await cluster.until(is_successful(2))
            assert status["components"]["decode"]["readyReplicas"] == 3
            assert "chat-frontend" in await cluster.names(DEPLOYMENTS)
        await operators.close()

    run(case)


def test_second_operator_takes_over_when_the_leader_is_killed(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        timings = LeaseTimings(duration_s=10, renew_deadline_s=8.0, retry_s=0.2)
        first, second = DyingClient(4), KubeClient()
        leader = Operator(
            first, OperatorSettings(), election=LeaderElection(first, LeaseName(SPACE, "lock"), "one", timings=timings)
        )
        leader.start()
        election = LeaderElection(second, LeaseName(SPACE, "lock"), "two", timings=timings)
        await until(lambda: leader.is_ready)
        async with cluster.operator(second, election) as follower:
            await cluster.apply(graph())
            async with asyncio.timeout(DEADLINE_S):
                await first.has_died.wait()
            began = time.monotonic()
            await cluster.until(is_successful(1))
            assert follower.applier.counts.total > 0
            assert time.monotonic() - began < DEADLINE_S
        await leader.close()
        await first.close()
        await second.close()

    run(case)
