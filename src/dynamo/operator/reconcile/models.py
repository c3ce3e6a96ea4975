"""Reconcile of a DynamoModel: the pods that serve its base model, and whether its adapter is loaded in each. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.operator.reconcile.conditions import with_condition
from dynamo.operator.reconcile.multinode import framework_in
from dynamo.operator.reconcile.names import (
    COMPONENT_TYPE,
    GRAPH,
    MAIN,
    PREFIX,
    SELECTOR,
    SUB_COMPONENT_TYPE,
    SYSTEM_PORT,
)
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.protocols.kubernetes.common import Condition, KubeObject, encode
from dynamo.protocols.kubernetes.models import DynamoModel, ModelEndpoint, ModelStatus

SERVICE_NAME = "kubernetes.io/service-name"
FINALIZER = f"{PREFIX}finalizer"
NO_ADAPTERS = ("lora management not available", "_lora' not found in local registry")
"""Errors of workers that cannot load adapters at all: the prefill workers of vLLM in earlier releases."""
RETRY_S = 30.0
"""Interval in which adapters that could not be loaded are loaded again."""


@dataclass(frozen=True, slots=True)
class ServingPod:
    """A pod that serves a base model."""

    address: str
    """`http://IP:PORT` of its system server."""
    name: str
    uid: str


def has_adapter(model: DynamoModel) -> bool:
    """Return whether a model is loaded into the workers of its base model."""
    return model.spec.model_type == "lora" and model.spec.source is not None


def serving_pods(slices: Iterable[KubeObject]) -> list[ServingPod]:
    """Return the pods of EndpointSlices, each once, also those that are not ready: the caller finds that out."""
    found: dict[str, ServingPod] = {}
    for endpoint in (one for value in slices for one in value.get("endpoints") or ()):
        target, addresses = endpoint.get("targetRef") or {}, endpoint.get("addresses") or []
        if target.get("kind") != "Pod" or not addresses:
            continue
        address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        key = target.get("uid") or target["name"]
        found.setdefault(key, ServingPod(f"http://{address}:{SYSTEM_PORT}", target["name"], key))
    return sorted(found.values(), key=lambda one: one.name)


def lacks_adapters(error: str | None) -> bool:
    """Return whether a pod has the error of workers that cannot load adapters at all."""
    return error is not None and error.startswith("500: ") and any(one in error.lower() for one in NO_ADAPTERS)


def prefill_group(pod: KubeObject) -> str | None:
    """Return what the vLLM prefill workers of one graph or workload share; None for another pod."""
    labels = pod["metadata"].get("labels") or {}
    kind = labels.get(COMPONENT_TYPE)
    if (labels.get(SUB_COMPONENT_TYPE) if kind == "worker" else kind) != "prefill":
        return None
    main: KubeObject = next((one for one in pod["spec"]["containers"] if one["name"] == MAIN), {})
    if framework_in(main) != ["vllm"]:
        return None
    owner = next((one["name"] for one in pod["metadata"].get("ownerReferences") or () if one.get("controller")), "")
    if labels.get(GRAPH):
        return f"graph:{labels[GRAPH]}"
    workload = labels.get(SELECTOR) or owner
    return f"workload:{workload}" if workload else None


def covered_pods(loaded: Mapping[str, str | None], pods: Mapping[str, KubeObject]) -> frozenset[str]:
    """Return the uids of ready prefill workers that cannot load adapters, where another one of their group has loaded it.

    This is the state during an update from an earlier release. `pods` are the pods by uid.
    """
    groups = {uid: prefill_group(pod) for uid, pod in pods.items()}
    capable = {groups.get(uid) for uid, error in loaded.items() if error is None} - {None}
    return frozenset(
        uid
        for uid, error in loaded.items()
        if lacks_adapters(error) and groups.get(uid) in capable and _is_ready(pods[uid])
    )


def model_plan(
    model: DynamoModel,
    slices: Sequence[KubeObject],
    loaded: Mapping[str, str | None],
    now: str,
    covered: Collection[str] = (),
) -> Plan:
    """Return the status of a model. `loaded` has the error of each pod by its uid, None where the adapter is loaded.

    Pods that are `covered` need not have it. Base models are served where their pods are; their endpoints are never ready, as in upstream.
    """
    pods = serving_pods(slices)
    services = {value["metadata"].get("labels", {}).get(SERVICE_NAME) for value in slices} - {None}
    is_adapter = has_adapter(model)
    ready = {one.uid for one in pods if is_adapter and loaded.get(one.uid, "") is None}
    spared = {one.uid for one in pods} & set(covered)
    before = model.status or ModelStatus()
    conditions = before.conditions or []
    events: list[EventNote] = []
    for condition in (
        _services_found(model, len(services), bool(pods)),
        _endpoints_ready(model, len(pods), len(ready), len(spared)),
    ):
        condition.observed_generation = model.metadata.generation
        if condition.type == "EndpointsReady" and condition.reason != _reason(before, condition.type):
            is_good = condition.status == "True"
            events.append(EventNote("Normal" if is_good else "Warning", condition.reason, condition.message))
        conditions = with_condition(conditions, condition, now)
    failures = sorted(f"{one.name}: {loaded[one.uid]}" for one in pods if loaded.get(one.uid) and one.uid not in spared)
    if failures:
        events.append(EventNote("Warning", "PartialEndpointFailure", "; ".join(failures)))
    status = ModelStatus(
        endpoints=[
            ModelEndpoint(
                address=one.address,
                pod_name=one.name,
                ready=one.uid in ready,
                lora_fallback_covered=one.uid in spared,
            )
            for one in pods
        ]
        or None,
        ready_endpoints=len(ready),
        lora_fallback_covered_endpoints=len(spared) or None,
        total_endpoints=len(pods),
        conditions=conditions,
        observed_generation=model.metadata.generation,
    )
    is_complete = not is_adapter or len(ready) + len(spared) == len(pods)
    return Plan(status=encode(status), events=events, requeue_s=None if is_complete else RETRY_S)


def _services_found(model: DynamoModel, count: int, has_pods: bool) -> Condition:
    if count and has_pods:
        return Condition(
            type="ServicesFound", status="True", reason="ServicesFound", message=f"Found {count} service(s)"
        )
    text = f"No endpoint slices found for base model {model.spec.base_model_name}"
    return Condition(type="ServicesFound", status="False", reason="NoServicesFound", message=text)


def _is_ready(pod: KubeObject) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _endpoints_ready(model: DynamoModel, total: int, ready: int, covered: int) -> Condition:
    status, reason = "False", "NoEndpoints"
    text = f"No endpoint slices found for base model {model.spec.base_model_name}"
    if total and not has_adapter(model):
        status, reason, text = "True", "EndpointsDiscovered", f"Found {total} endpoint(s) for base model"
    elif total and ready + covered == total:
        status, reason, text = "True", "AllEndpointsReady", f"All {total} endpoint(s) are ready"
        if covered:
            text += f" or covered by a capable prefill worker ({covered})"
    elif total:
        reason, text = "NotReady", f"Found {ready} ready endpoint(s) out of {total} total"
        if covered:
            text += f", and {covered} covered by a capable prefill worker"
    return Condition(type="EndpointsReady", status="True" if status == "True" else "False", reason=reason, message=text)


def _reason(status: ModelStatus, kind: str) -> str:
    return next((one.reason for one in status.conditions or () if one.type == kind), "")
