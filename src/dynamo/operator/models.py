"""Reconciles DynamoModels: loads adapters into the workers of their base model, and unloads them at the end."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import ENDPOINT_SLICES, MODELS, PODS, ObjectKind
from dynamo.k8s.times import seconds_time
from dynamo.operator.applier import Applier, EventLog
from dynamo.operator.reconcile.models import (
    FINALIZER,
    ServingPod,
    covered_pods,
    has_adapter,
    lacks_adapters,
    model_plan,
    prefill_group,
    serving_pods,
)
from dynamo.operator.reconcile.names import BASE_MODEL_HASH, base_model_hash
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, ObjectRef, Plan
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import DynamoModel

UNLOAD_S = 60.0
"""Limit of the unloading of a deleted model; what still has the adapter then keeps it until it ends."""


class Loader(Protocol):
    """Loads adapters: `AdapterLoader`, or a fake in tests."""

    async def load(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]: ...
    async def unload(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]: ...


class PodReader(Protocol):
    """Reads pods: `KubeClient`, or a fake in tests."""

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...


class ModelReconciler:
    """Reconciles DynamoModels. An adapter is loaded again whenever the pods change, because one may have restarted."""

    kind: ClassVar = MODELS

    def __init__(
        self,
        view: ClusterView,
        applier: Applier,
        events: EventLog,
        loader: Loader,
        reader: PodReader,
        clock: Clock | None = None,
    ) -> None:
        self._view = view
        self._reader = reader
        self._applier = applier
        self._events = events
        self._loader = loader
        self._clock = clock or SystemClock()
        self._loaded: dict[ObjectKey, tuple[object, dict[str, str | None]]] = {}
        """What was loaded by model: the specification and the pods' slices it was for, and the outcome by pod."""

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Make the pods serve a model. Return the seconds after which failed pods are tried again, or None."""
        value = self._view.get(MODELS, *key)
        if value is None:
            self._loaded.pop(key, None)
            return None
        try:
            model = decode(DynamoModel, value)
        except msgspec.ValidationError as error:
            self._events.record(MODELS, value, "Warning", "InvalidObject", str(error))
            return None
        slices = self._slices(model)
        if model.metadata.deletion_timestamp:
            await self._end(key, value, model, slices)
            return None
        if has_adapter(model) and FINALIZER not in model.metadata.finalizers:
            value = await self._set_finalizers(value, [*model.metadata.finalizers, FINALIZER])
        outcome = await self._load(key, model, slices) if has_adapter(model) else {}
        now = seconds_time(self._clock.wall())
        covered = covered_pods(outcome, await self._pods_of(outcome, slices))
        plan = model_plan(model, slices, outcome, now, covered)
        if plan.requeue_s is not None:
            self._loaded.pop(key, None)
        await self._applier.write_status(plan, value, MODELS, now)
        return plan.requeue_s

    def _slices(self, model: DynamoModel) -> list[KubeObject]:
        wanted = base_model_hash(model.spec.base_model_name)
        return [
            value
            for (namespace, _), value in self._view.objects(ENDPOINT_SLICES).items()
            if namespace == model.metadata.namespace
            and (value["metadata"].get("labels") or {}).get(BASE_MODEL_HASH) == wanted
        ]

    async def _load(self, key: ObjectKey, model: DynamoModel, slices: Sequence[KubeObject]) -> Mapping[str, str | None]:
        state = (model.metadata.generation, sorted(_version(one) for one in slices))
        known = self._loaded.get(key)
        if known is not None and known[0] == state:
            return known[1]
        found = await self._loader.load(model, serving_pods(slices))
        self._loaded[key] = (state, found)
        return found

    async def _pods_of(
        self, outcome: Mapping[str, str | None], slices: Sequence[KubeObject]
    ) -> Mapping[str, KubeObject]:
        """Return the pods by uid if one of them cannot load adapters; otherwise none, which saves the reads."""
        found = dict[str, KubeObject]()
        if any(map(lacks_adapters, outcome.values())):
            namespace = slices[0]["metadata"]["namespace"]
            for one in serving_pods(slices):
                pod = await self._reader.get(PODS, one.name, namespace)
                if pod is not None:
                    found[one.uid] = pod
        return found

    async def _end(self, key: ObjectKey, value: KubeObject, model: DynamoModel, slices: Sequence[KubeObject]) -> None:
        """Unload the adapter, and let the object go even if that fails: the pods may be gone as well."""
        self._loaded.pop(key, None)
        if FINALIZER not in model.metadata.finalizers:
            return
        pods = serving_pods(slices)
        if has_adapter(model) and pods:
            try:
                async with asyncio.timeout(UNLOAD_S):
                    outcome = await self._loader.unload(model, pods)
                    found = await self._pods_of(outcome, slices)
                errors = {
                    uid: error for uid, error in outcome.items() if error and not _never_had(error, found.get(uid))
                }
            except TimeoutError:
                errors = {"": f"not complete within {UNLOAD_S:g} s"}
            text = f"Unloaded LoRA from {len(pods) - len(errors)} of {len(pods)} endpoint(s)"
            details = "; ".join(sorted({error for error in errors.values() if error}))
            note = EventNote("Warning", "LoRAUnloadFailed", f"{text}: {details}") if errors else None
            note = note or EventNote("Normal", "LoRAUnloaded", text)
            self._events.record(MODELS, value, note.type, note.reason, note.message)
        await self._set_finalizers(value, [one for one in model.metadata.finalizers if one != FINALIZER])

    async def _set_finalizers(self, value: KubeObject, finalizers: Sequence[str]) -> KubeObject:
        """Replace the finalizers; refused by the server if the object has changed since."""
        metadata = value["metadata"]
        ref = ObjectRef(MODELS.api_version, MODELS.kind, metadata["namespace"], metadata["name"])
        body = {"metadata": {"finalizers": list(finalizers), "resourceVersion": metadata["resourceVersion"]}}
        await self._applier.write_objects(Plan(patch=[ObjectPatch(ref, body)]), value, MODELS)
        return self._view.get(MODELS, ref.namespace, ref.name) or value


def _never_had(error: str, pod: KubeObject | None) -> bool:
    """Return whether a pod is a prefill worker that cannot load adapters."""
    return lacks_adapters(error) and pod is not None and prefill_group(pod) is not None


def _version(value: KubeObject) -> tuple[str, str]:
    return value["metadata"]["name"], value["metadata"].get("resourceVersion", "")
