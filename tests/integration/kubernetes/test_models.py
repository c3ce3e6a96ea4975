"""DynamoModels on an API server: the pods of their base model, loading again when these change, and unloading at the end."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from tests.cluster.kubernetes.operated import (
    DEADLINE_S,
    SPACE,
    Case,
    Object,
    OperatedCluster,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import EVENTS, MODELS, SERVICES
from dynamo.operator import manager
from dynamo.operator.reconcile.models import FINALIZER, ServingPod
from dynamo.operator.reconcile.names import BASE_MODEL_HASH, base_model_hash
from dynamo.protocols.kubernetes.common import V1ALPHA1
from dynamo.protocols.kubernetes.models import DynamoModel

pytestmark = pytest.mark.integration

BASE = "Qwen/Qwen3-0.6B"


class RecordingLoader:
    """Loader that records the pods of each call: those of the test have no process."""

    def __init__(self) -> None:
        self.loaded: list[list[str]] = []
        self.unloaded: list[list[str]] = []
        self.refusal: str | None = None

    async def load(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        self.loaded.append([one.name for one in pods])
        return {one.uid: self.refusal for one in pods}

    async def unload(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        self.unloaded.append([one.name for one in pods])
        return {one.uid: None for one in pods}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> RecordingLoader:
    made = RecordingLoader()
    monkeypatch.setattr(manager, "AdapterLoader", lambda: made)
    return made


@pytest.fixture
def run(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(kubernetes_api, monkeypatch)


def serving(workers: int) -> Object:
    """Return a graph whose workers serve the base model."""
    value = graph(workers=workers)
    value["spec"]["components"][1]["modelRef"] = {"name": BASE}
    return value


def model(name: str, **spec: object) -> Object:
    value = {"modelName": f"org/{name}", "baseModelName": BASE, **spec}
    return {"apiVersion": V1ALPHA1, "kind": MODELS.kind, "metadata": {"name": name, "namespace": SPACE}, "spec": value}


async def until_model(cluster: OperatedCluster, name: str, is_reached: Callable[[Object], bool]) -> Object:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = await cluster.client.get(MODELS, name, SPACE) or {}
        status: Object = value.get("status") or {}
        if is_reached(status):
            return value
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)


def conditions(value: Object) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in value["status"]["conditions"]}


def test_adapter_follows_the_pods_of_its_base_model(run: Callable[[Case], None], loader: RecordingLoader) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.client.create(
                MODELS, model("tuned", modelType="lora", source={"uri": "hf://org/tuned"}), SPACE
            )
            value = await until_model(cluster, "tuned", lambda status: bool(status.get("conditions")))
            assert conditions(value) == {
                "ServicesFound": ("False", "NoServicesFound"),
                "EndpointsReady": ("False", "NoEndpoints"),
            }
            await cluster.apply(serving(2))
            await cluster.until(is_successful(1))
            value = await until_model(cluster, "tuned", lambda status: status.get("readyEndpoints") == 2)
            assert conditions(value) == {
                "ServicesFound": ("True", "ServicesFound"),
                "EndpointsReady": ("True", "AllEndpointsReady"),
            }
            assert value["metadata"]["finalizers"] == [FINALIZER]
            (service,) = [one for one in await cluster.names(SERVICES) if one.startswith("dynamo-model-")]
            made = await cluster.client.get(SERVICES, service, SPACE)
            assert made is not None
            assert made["spec"]["selector"] == {BASE_MODEL_HASH: base_model_hash(BASE)}
            await cluster.apply(serving(3))
            await until_model(cluster, "tuned", lambda status: status.get("readyEndpoints") == 3)
            assert len(set(loader.loaded[-1])) == 3
            await cluster.until_at_rest(operator)
            before = len(loader.loaded)
            await asyncio.sleep(1.0)
            assert len(loader.loaded) == before
            await cluster.client.delete(MODELS, "tuned", SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while await cluster.client.get(MODELS, "tuned", SPACE) is not None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert [len(one) for one in loader.unloaded] == [3]

    run(case)


def test_pods_that_refuse_an_adapter_are_reported(run: Callable[[Case], None], loader: RecordingLoader) -> None:
    async def case(cluster: OperatedCluster) -> None:
        loader.refusal = "500: no such bucket"
        async with cluster.operator():
            await cluster.apply(serving(1))
            await cluster.until(is_successful(1))
            await cluster.client.create(MODELS, model("tuned", modelType="lora", source={"uri": "s3://b/k"}), SPACE)
            value = await until_model(cluster, "tuned", lambda status: status.get("totalEndpoints") == 1)
            assert conditions(value)["EndpointsReady"] == ("False", "NotReady")
            deadline = time.monotonic() + DEADLINE_S
            while True:
                events = (await cluster.client.list(EVENTS, SPACE)).items
                if any("no such bucket" in (one.get("message") or one.get("note") or "") for one in events):
                    break
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)

    run(case)


def test_base_model_is_discovered_and_nothing_is_loaded(run: Callable[[Case], None], loader: RecordingLoader) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.client.create(MODELS, model("base"), SPACE)
            await cluster.apply(serving(2))
            value = await until_model(cluster, "base", lambda status: status.get("totalEndpoints") == 2)
            assert conditions(value)["EndpointsReady"] == ("True", "EndpointsDiscovered")
            assert loader.loaded == []

    run(case)


@pytest.mark.parametrize("source", [None, {"uri": "https://example.com/a"}])
def test_adapter_without_a_source_that_can_be_loaded_is_refused(
    run: Callable[[Case], None], source: Object | None
) -> None:
    async def case(cluster: OperatedCluster) -> None:
        more = {"source": source} if source else {}
        with pytest.raises(KubeRefused, match="source"):
            await cluster.client.create(MODELS, model("tuned", modelType="lora", **more), SPACE)

    run(case)
