"""Operator: it reconciles when the view is complete and it leads; health and metrics report its state."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.scrapes import SERIES, fill, turns_during
from tests.settle import turns, until
from tests.unit.operator.kube_store import KubeStore

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeListing, KubeUnavailable, WatchChange
from dynamo.k8s.kinds import GRAPHS, LEADER_WORKER_SETS
from dynamo.operator.controllers import SETTLE_S
from dynamo.operator.manager import Operator
from dynamo.operator.optional_kinds import RETRY_S
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.protocols.kubernetes.common import KubeObject

GRAPH: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "space"},
    "spec": {"components": [{"name": "Frontend", "type": "frontend", "replicas": 0}]},
}


@pytest.fixture
def store() -> KubeStore:
    return KubeStore()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def operator(store: KubeStore, clock: ManualClock) -> AsyncIterator[Operator]:
    made = Operator(store, OperatorSettings(), clock=clock)  # type: ignore[arg-type]
    yield made
    await made.close()


async def get(operator: Operator, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=operator._application())
    async with httpx.AsyncClient(transport=transport, base_url="http://operator") as client:
        return await client.get(path)


async def until_idle(operator: Operator, clock: ManualClock) -> None:
    for _ in range(200):
        await turns(50)
        clock.advance(SETTLE_S)
        await turns(50)
        if operator.is_idle:
            return
    raise AssertionError("the operator is not idle")


async def test_operator_is_ready_after_every_kind_was_listed(operator: Operator) -> None:
    assert (await get(operator, "/healthz")).status_code == 200
    waiting = await get(operator, "/readyz")
    assert waiting.status_code == 503
    assert "dynamographdeployments" in waiting.text
    assert operator.has_grove() is None
    operator.start()
    await turns(50)
    assert (await get(operator, "/readyz")).status_code == 200
    assert operator.has_grove() is False


async def test_cluster_kinds_are_read_again_until_the_server_responds() -> None:
    clock = ManualClock()

    class UnavailableStore(KubeStore):
        is_away = True

        async def kinds_of(self, api_version: str) -> Any:
            if self.is_away:
                raise KubeUnavailable("away")
            return await super().kinds_of(api_version)

    server = UnavailableStore()
    server.kinds = {LEADER_WORKER_SETS}
    made = Operator(server, OperatorSettings(), clock=clock)  # type: ignore[arg-type]
    made.start()
    await turns(50)
    assert not made.is_ready
    server.is_away = False
    clock.advance(RETRY_S)
    await until(lambda: made.view.has(LEADER_WORKER_SETS))
    await made.close()


async def test_metrics_count_objects_reconciliations_and_writes(
    operator: Operator, store: KubeStore, clock: ManualClock
) -> None:
    store.put(GRAPHS, GRAPH)
    operator.view.start()
    operator.events.start()
    for one in operator._running:
        assert one.controller is not None
        one.controller.start()
    await until_idle(operator, clock)
    text = (await get(operator, "/metrics")).text
    graphs = 'resource_type="DynamoGraphDeployment",namespace="space"'
    assert f'dynamo_operator_resources_total{{{graphs},status="ready"}} 1' in text
    assert f'dynamo_operator_reconcile_total{{{graphs},result="' in text
    assert 'dynamo_operator_writes{operation="applied"}' in text


async def test_metrics_are_rendered_in_turns(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(operator.metrics.registry)
    assert await turns_during(get(operator, "/metrics"), monkeypatch) > SERIES / 2


async def test_follower_writes_nothing(store: KubeStore) -> None:
    class Never:
        is_leader = False

        def start(self) -> None: ...

        async def wait_until_leader(self) -> None:
            import asyncio

            await asyncio.Event().wait()

        async def close(self) -> None: ...

    store.put(GRAPHS, GRAPH)
    clock = ManualClock()
    follower = Operator(store, OperatorSettings(), election=Never(), clock=clock)  # type: ignore[arg-type]
    follower.start()
    for _ in range(5):
        await turns(50)
        clock.advance(SETTLE_S)
    await turns(50)
    assert follower.is_ready
    assert store.calls == []
    await follower.close()


AWAY_S = 600
REQUESTS_PER_MINUTE = 20
"""Limit for each watched kind while the server is away: its retries are up to 5 s apart, half of it at random."""


class OutageStore(KubeStore):
    """Cluster whose API server has an outage, during which its watches end."""

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


def replicated(replicas: int) -> KubeObject:
    components = [{"name": "Frontend", "type": "frontend", "replicas": replicas}]
    return {"metadata": {"name": "chat", "namespace": "space"}, "spec": {"components": components}}


async def pass_time(clock: ManualClock, seconds: float, step: float = 0.5) -> None:
    for _ in range(int(seconds / step)):
        clock.advance(step)
        await turns(20)


async def test_ten_minute_outage_causes_few_requests_and_is_recovered() -> None:
    store, clock = OutageStore(), ManualClock()
    operator = Operator(store, OperatorSettings(), clock=clock)  # type: ignore[arg-type]
    operator.start()
    await turns(50)
    store.put(GRAPHS, replicated(1))
    await pass_time(clock, 5)
    deployed = store.objects["deployments", "space", "chat-frontend"]
    assert deployed["spec"]["replicas"] == 1
    kinds = len(store.lists) + 1
    store.go_away()
    store.put(GRAPHS, replicated(2))  # A change by another client: seen when the server is back.
    await pass_time(clock, AWAY_S)
    assert 0 < store.refused < REQUESTS_PER_MINUTE * kinds * AWAY_S / 60
    assert operator.is_ready
    store.is_away = False
    await pass_time(clock, 20)
    assert store.objects["deployments", "space", "chat-frontend"]["spec"]["replicas"] == 2
    await operator.close()
