"""Reconcile of a DynamoModel: the pods that serve its base model, and whether its adapter is loaded in each. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.operator.reconcile.conditions import with_condition
from dynamo.operator.reconcile.names import PREFIX, SYSTEM_PORT
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.protocols.kubernetes.common import Condition, KubeObject, encode
from dynamo.protocols.kubernetes.models import DynamoModel, ModelEndpoint, ModelStatus

SERVICE_NAME = "kubernetes.io/service-name"
FINALIZER = f"{PREFIX}finalizer"
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


def model_plan(model: DynamoModel, slices: Sequence[KubeObject], loaded: Mapping[str, str | None], now: str) -> Plan:
    """Return the status of a model. `loaded` has the error of each pod by its uid, None where the adapter is loaded.

    Base models are served where their pods are; their endpoints are never ready, as in upstream.
    """
    pods = serving_pods(slices)
    services = {value["metadata"].get("labels", {}).get(SERVICE_NAME) for value in slices} - {None}
    is_adapter = has_adapter(model)
    ready = {one.uid for one in pods if is_adapter and loaded.get(one.uid, "") is None}
    before = model.status or ModelStatus()
    conditions = before.conditions or []
    events: list[EventNote] = []
    for condition in (
        _services_found(model, len(services), bool(pods)),
        _endpoints_ready(model, len(pods), len(ready)),
    ):
        condition.observed_generation = model.metadata.generation
        if condition.type == "EndpointsReady" and condition.reason != _reason(before, condition.type):
            is_good = condition.status == "True"
            events.append(EventNote("Normal" if is_good else "Warning", condition.reason, condition.message))
        conditions = with_condition(conditions, condition, now)
    failures = sorted(f"{one.name}: {loaded[one.uid]}" for one in pods if loaded.get(one.uid))
    if failures:
        events.append(EventNote("Warning", "PartialEndpointFailure", "; ".join(failures)))
    status = ModelStatus(
        endpoints=[ModelEndpoint(one.address, one.name, one.uid in ready) for one in pods] or None,
        ready_endpoints=len(ready),
        total_endpoints=len(pods),
        conditions=conditions,
        observed_generation=model.metadata.generation,
    )
    is_complete = not is_adapter or len(ready) == len(pods)
    return Plan(status=encode(status), events=events, requeue_s=None if is_complete else RETRY_S)


def _services_found(model: DynamoModel, count: int, has_pods: bool) -> Condition:
    if count and has_pods:
        return Condition(
            type="ServicesFound", status="True", reason="ServicesFound", message=f"Found {count} service(s)"
        )
    text = f"No endpoint slices found for base model {model.spec.base_model_name}"
    return Condition(type="ServicesFound", status="False", reason="NoServicesFound", message=text)


def _endpoints_ready(model: DynamoModel, total: int, ready: int) -> Condition:
    status, reason = "False", "NoEndpoints"
    text = f"No endpoint slices found for base model {model.spec.base_model_name}"
    if total and not has_adapter(model):
        status, reason, text = "True", "EndpointsDiscovered", f"Found {total} endpoint(s) for base model"
    elif total and ready == total:
        status, reason, text = "True", "AllEndpointsReady", f"All {total} endpoint(s) are ready"
    elif total:
        reason, text = "NotReady", f"Found {ready} ready endpoint(s) out of {total} total"
    return Condition(type="EndpointsReady", status="True" if status == "True" else "False", reason=reason, message=text)


def _reason(status: ModelStatus, kind: str) -> str:
    return next((one.reason for one in status.conditions or () if one.type == kind), "")
