"""Models: adapters are loaded once per state of the pods, again after failures, and unloaded at the end."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.kinds import ENDPOINT_SLICES, MODELS, PODS
from dynamo.operator.applier import Applier
from dynamo.operator.models import ModelReconciler
from dynamo.operator.reconcile.models import FINALIZER, ServingPod
from dynamo.operator.reconcile.names import BASE_MODEL_HASH, base_model_hash
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.models import DynamoModel

KEY = ("space", "tuned")
PLACE = ("dynamomodels", "space", "tuned")


class FakeLoader:
    """Loader that records its calls; pods in `failing` refuse."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.failing: set[str] = set()
        self.incapable: set[str] = set()

    async def load(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        return self._call("load", pods)

    async def unload(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        return self._call("unload", pods)

    def _call(self, name: str, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        self.calls.append((name, [pod.name for pod in pods]))
        return {pod.uid: self._error(name, pod.name) for pod in pods}

    def _error(self, operation: str, pod: str) -> str | None:
        if pod in self.incapable:
            return f'500: {{"message": "Endpoint \'{operation}_lora\' not found in local registry"}}'
        return "refused" if pod in self.failing else None


class Subject:
    """A model, its pods and its reconciler."""

    def __init__(self) -> None:
        self.store = KubeStore()
        self.loader = FakeLoader()
        self.view = ClusterView(self.store)
        for kind in (MODELS, ENDPOINT_SLICES):
            self.view.watch(kind)
        applier = Applier(self.store, self.view, self.store)
        self.models = ModelReconciler(self.view, applier, self.store, self.loader, self.store)

    async def put(self, kind: str = "lora", **metadata: Any) -> None:
        spec: dict[str, Any] = {"modelName": "tuned", "baseModelName": "base", "modelType": kind}
        if kind == "lora":
            spec["source"] = {"uri": "hf://a/b"}
        known = self.store.objects.get(PLACE, {}).get("metadata", {})
        named = {**known, "name": "tuned", "namespace": "space", **metadata}
        self.store.put(MODELS, {"metadata": named, "spec": spec})
        await turns(20)

    async def pods(self, *names: str) -> None:
        endpoints = [
            {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": name, "uid": name}} for name in names
        ]
        labels = {BASE_MODEL_HASH: base_model_hash("base"), "kubernetes.io/service-name": "s"}
        metadata = {"name": "slice", "namespace": "space", "labels": labels}
        self.store.put(ENDPOINT_SLICES, {"metadata": metadata, "endpoints": endpoints})
        await turns(20)

    async def run(self) -> float | None:
        result = await self.models.reconcile(KEY)
        await turns(20)
        return result

    @property
    def finalizers(self) -> Any:
        return self.store.objects[PLACE]["metadata"].get("finalizers")


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    made = Subject()
    made.view.start()
    await turns(20)
    yield made
    await made.view.close()


async def test_adapter_is_loaded_once_into_every_pod(subject: Subject) -> None:
    await subject.put()
    await subject.pods("a", "b")
    assert await subject.run() is None
    assert await subject.run() is None
    assert subject.loader.calls == [("load", ["a", "b"])]
    assert subject.store.objects[PLACE]["status"]["readyEndpoints"] == 2
    assert subject.finalizers == [FINALIZER]


async def test_adapter_is_loaded_again_when_the_pods_change(subject: Subject) -> None:
    await subject.put()
    await subject.pods("a")
    await subject.run()
    await subject.pods("a", "b")
    await subject.run()
    assert subject.loader.calls[-1] == ("load", ["a", "b"])


async def test_failed_adapter_load_is_retried(subject: Subject) -> None:
    subject.loader.failing = {"b"}
    await subject.put()
    await subject.pods("a", "b")
    assert await subject.run() == 30.0
    subject.loader.failing = set()
    assert await subject.run() is None
    assert len(subject.loader.calls) == 2


async def test_prefill_worker_without_adapters_is_covered_by_a_newer_one(subject: Subject) -> None:
    labels = {"nvidia.com/dynamo-component-type": "prefill", "nvidia.com/dynamo-graph-deployment-name": "g"}
    main = {"name": "main", "command": ["python3", "-m", "dynamo.vllm"]}
    for name in ("old", "new"):
        metadata = {"name": name, "namespace": "space", "labels": labels}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        subject.store.put(PODS, {"metadata": metadata, "spec": {"containers": [main]}, "status": ready})
    subject.loader.incapable = {"old"}
    await subject.put()
    await subject.pods("old", "new")
    assert await subject.run() is None
    status = subject.store.objects[PLACE]["status"]
    assert (status["readyEndpoints"], status["loraFallbackCoveredEndpoints"], status["totalEndpoints"]) == (1, 1, 2)
    covered = {one["podName"]: one.get("loraFallbackCovered") for one in status["endpoints"]}
    assert covered == {"new": None, "old": True}
    assert "PartialEndpointFailure" not in [reason for reason, _ in subject.store.events]
    await subject.put(deletionTimestamp="2026-01-01T00:00:00Z")
    await subject.run()
    assert ("LoRAUnloaded", "Unloaded LoRA from 2 of 2 endpoint(s)") in subject.store.events


async def test_base_model_is_not_loaded_and_has_no_finalizer(subject: Subject) -> None:
    await subject.put("base")
    await subject.pods("a")
    await subject.run()
    assert (subject.loader.calls, subject.finalizers) == ([], None)


@pytest.mark.parametrize(("failing", "reason"), [(set(), "LoRAUnloaded"), ({"a"}, "LoRAUnloadFailed")])
async def test_deleted_model_is_unloaded_and_its_finalizer_removed(
    subject: Subject, failing: set[str], reason: str
) -> None:
    await subject.put()
    await subject.pods("a")
    await subject.run()
    await subject.put(deletionTimestamp="2026-01-01T00:00:00Z")
    subject.loader.failing = failing
    await subject.run()
    assert subject.loader.calls[-1] == ("unload", ["a"])
    assert subject.finalizers == []
    assert reason in [event for event, _ in subject.store.events]


async def test_malformed_model_is_an_event(subject: Subject) -> None:
    subject.store.put(MODELS, {"metadata": {"name": "tuned", "namespace": "space"}, "spec": {"modelName": 1}})
    await turns(20)
    assert await subject.run() is None
    assert [reason for reason, _ in subject.store.events] == ["InvalidObject"]
