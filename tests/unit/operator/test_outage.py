"""An API server that is away for ten minutes: bounded requests in the meantime, and a prompt return afterwards."""

from collections.abc import AsyncIterator
from typing import Any

from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeListing, KubeUnavailable, WatchChange
from dynamo.k8s.kinds import GRAPHS
from dynamo.operator.manager import Operator
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.protocols.kubernetes.common import KubeObject

AWAY_S = 600
REQUESTS_PER_MINUTE = 20
"""Limit for each watched kind while the server is away: its retries are up to 5 s apart, half of it at random."""


class OutageStore(KubeStore):
    """Cluster whose API server goes away; its watches end then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.refused = 0

    def _check(self) -> None:
        if self.is_away:
            self.refused += 1
            raise KubeUnavailable("away")

    def go_away(self) -> None:
        self.is_away = True
        self._wake.set()

    async def get(self, *args: Any, **named: Any) -> KubeObject | None:
        self._check()
        return await super().get(*args, **named)

    async def apply(self, *args: Any, **named: Any) -> KubeObject:
        self._check()
        return await super().apply(*args, **named)

    async def create(self, *args: Any, **named: Any) -> KubeObject:
        self._check()
        return await super().create(*args, **named)

    async def list(self, *args: Any, **named: Any) -> KubeListing:
        self._check()
        return await super().list(*args, **named)

    async def watch(self, *args: Any, **named: Any) -> AsyncIterator[WatchChange]:
        self._check()
        async for change in super().watch(*args, **named):
            self._check()
            yield change


def graph(replicas: int) -> KubeObject:
    components = [{"name": "Frontend", "type": "frontend", "replicas": replicas}]
    return {"metadata": {"name": "chat", "namespace": "space"}, "spec": {"components": components}}


async def pass_time(clock: ManualClock, seconds: float, step: float = 0.5) -> None:
    for _ in range(int(seconds / step)):
        clock.advance(step)
        await turns(20)


async def test_an_outage_of_ten_minutes_costs_few_requests_and_is_made_up_for() -> None:
    store, clock = OutageStore(), ManualClock()
    operator = Operator(store, OperatorSettings(), clock=clock)  # type: ignore[arg-type]
    operator.start()
    await turns(50)
    store.put(GRAPHS, graph(1))
    await pass_time(clock, 5)
    deployed = store.objects["deployments", "space", "chat-frontend"]
    assert deployed["spec"]["replicas"] == 1
    kinds = len(store.lists) + 1
    store.go_away()
    store.put(GRAPHS, graph(2))  # By another client, as it were: seen when the server is back.
    await pass_time(clock, AWAY_S)
    assert 0 < store.refused < REQUESTS_PER_MINUTE * kinds * AWAY_S / 60
    assert operator.is_ready
    store.is_away = False
    await pass_time(clock, 20)
    assert store.objects["deployments", "space", "chat-frontend"]["spec"]["replicas"] == 2
    await operator.close()
