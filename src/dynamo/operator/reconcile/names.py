"""Names, labels and settings that the objects of one graph share."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

PREFIX = f"{GROUP}/"
SELECTOR = f"{PREFIX}selector"
GRAPH = f"{PREFIX}dynamo-graph-deployment-name"
COMPONENT = f"{PREFIX}dynamo-component"
COMPONENT_TYPE = f"{PREFIX}dynamo-component-type"
SUB_COMPONENT_TYPE = f"{PREFIX}dynamo-sub-component-type"
COMPONENT_CLASS = f"{PREFIX}dynamo-component-class"
NAMESPACE = f"{PREFIX}dynamo-namespace"
WORKER_HASH = f"{PREFIX}dynamo-worker-hash"
DISCOVERY_BACKEND = f"{PREFIX}dynamo-discovery-backend"
DISCOVERY_ENABLED = f"{PREFIX}dynamo-discovery-enabled"
METRICS_ENABLED = f"{PREFIX}metrics-enabled"
ENABLE_METRICS = f"{PREFIX}enable-metrics"
CURRENT_WORKER_HASH = f"{PREFIX}current-worker-hash-v2"
RESTART_AT = f"{PREFIX}restartAt"
STRATEGY = f"{PREFIX}deployment-strategy"
MAX_SURGE = f"{PREFIX}deployment-rolling-update-max-surge"
MAX_UNAVAILABLE = f"{PREFIX}deployment-rolling-update-max-unavailable"
BASE_MODEL_HASH = f"{PREFIX}dynamo-base-model-hash"
MANAGED_BY, OPERATOR = f"{PREFIX}managed-by", "dynamo-operator"
BASE_MODEL = f"{PREFIX}dynamo-base-model"
GLOBAL_NAMESPACE = "dynamo"
MAIN = "main"
"""Name of the container that runs a component."""
HTTP_PORT, SYSTEM_PORT, NIXL_PORT, PLANNER_METRICS_PORT, STEP_METRICS_PORT = 8000, 9090, 19090, 9085, 20380
GRPC_PORT, GRPC_HEALTH_PORT = 9002, 9003
"""Ports of the endpoint picker."""
DISCOVERY_BACKEND_ANNOTATION = f"{PREFIX}dynamo-discovery-backend"
HASH_LENGTH = 8
WORKER_TYPES = frozenset({"worker", "prefill", "decode"})
NOT_HASHED = ("replicas", "scaling_adapter")
"""Fields whose change does not replace the workers."""


PullSecrets: TypeAlias = Callable[[str, str], Sequence[str]]
"""Returns the names of the pull secrets of a namespace that are for the registry of an image."""


ClaimedGpus: TypeAlias = Mapping[str, int | str]
"""GPUs that components claim of a device driver, by name; a text is why their number is not known."""


def no_pull_secrets(namespace: str, image: str) -> Sequence[str]:
    """Return no secrets."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Services of the cluster that processes use; an empty address is not set."""

    discovery_backend: str = "kubernetes"
    nats_address: str = ""
    etcd_endpoints: str = ""
    model_express_url: str = ""
    prometheus_endpoint: str = ""
    grove_termination_delay: str = "4h0m0s"
    """Time for which a gang of Grove may have too few pods before it is ended, as a Go duration."""
    ingress_class: str = ""
    """Class of the Ingress of frontends that have none of their own."""
    ingress_tls_secret: str = ""
    ingress_host_suffix: str = ""
    virtual_service_gateway: str = ""
    """Istio gateway of the VirtualService of frontends that have none of their own."""
    pull_secrets: PullSecrets = field(default=no_pull_secrets, compare=False)
    claimed_gpus: ClaimedGpus = field(default_factory=dict, compare=False)


RestoreState = Literal["Ready", "Waiting", "Failed", "Absent"]


@dataclass(frozen=True, slots=True)
class SnapshotStorage:
    """Claim that has the checkpoints of a namespace, and its path in containers."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Checkpoint of one component."""

    name: str
    """Name of the checkpoint; empty if none has the wanted identity."""
    hash: str
    version: str
    state: RestoreState
    waits: bool
    """Whether pods are not started before the checkpoint is ready or has failed."""
    storage: SnapshotStorage | None = None

    @property
    def is_ready(self) -> bool:
        """Whether pods are restored."""
        return self.state == "Ready"

    @property
    def is_awaited(self) -> bool:
        """Whether pods are not started now."""
        return self.waits and self.state in ("Waiting", "Absent")

    @property
    def text(self) -> str:
        """What is awaited, or why pods start without a checkpoint."""
        named = f"DynamoCheckpoint {self.name}" if self.name else f"a DynamoCheckpoint of identity {self.hash}"
        states = {"Ready": "is ready", "Waiting": "is not ready", "Failed": "has failed", "Absent": "does not exist"}
        return f"{named} {states[self.state]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphContext:
    """One graph as its components see it."""

    name: str
    namespace: str
    settings: OperatorSettings
    worker_hash: str
    workload: str = ""
    """Name of the objects of a single component outside a graph; default: of the graph and the component."""
    restores: Mapping[str, Restore] = field(default_factory=dict)
    """Checkpoints of the components that have one, by name."""
    is_in_place: bool = False
    """Whether workers are updated in place, so that the names of objects have no generation."""

    def dynamo_namespace(self, component: ComponentSpec) -> str:
        """Return the Dynamo namespace of a component, without the suffix of the workers' generation."""
        return GLOBAL_NAMESPACE if component.global_dynamo_namespace else f"{self.namespace}-{self.name}"

    def discovery_backend(self, component: ComponentSpec) -> str:
        """Return the discovery backend of a component: that of its annotation, or else the operator's."""
        metadata = (component.pod_template or {}).get("metadata") or {}
        given = (metadata.get("annotations") or {}).get(DISCOVERY_BACKEND_ANNOTATION)
        return str(given or self.settings.discovery_backend)

    def object_name(self, component: ComponentSpec) -> str:
        """Return the name of a component's workload; that of workers has their generation."""
        if self.workload:
            return self.workload
        name = service_name(self.name, component.name)
        return f"{name}-{self.worker_hash}" if is_worker(component) and not self.is_in_place else name

    def labels(self, component: ComponentSpec) -> dict[str, str]:
        """Return the labels of a component's objects and pods."""
        labels = {
            GRAPH: self.name,
            COMPONENT: component.name,
            NAMESPACE: self.dynamo_namespace(component),
            SELECTOR: self.object_name(component),
        }
        if component.type:
            labels[COMPONENT_TYPE] = component.type
        if is_worker(component):
            labels |= {COMPONENT_CLASS: "worker", **({WORKER_HASH: self.worker_hash} if self.worker_hash else {})}
        if component.model_ref is not None and component.model_ref.name:
            labels[BASE_MODEL_HASH] = base_model_hash(component.model_ref.name)
        if self.discovery_backend(component) == "kubernetes":
            labels |= {DISCOVERY_BACKEND: "kubernetes", DISCOVERY_ENABLED: "true"}
        return labels


def is_worker(component: ComponentSpec) -> bool:
    """Return whether a component serves a model."""
    return component.type in WORKER_TYPES


def main_container(component: ComponentSpec) -> KubeObject:
    """Return the main container of a component's own template; empty if it has none."""
    containers: Sequence[KubeObject] = ((component.pod_template or {}).get("spec") or {}).get("containers") or ()
    return next((one for one in containers if one.get("name") == MAIN), {})


def replicas_of(component: ComponentSpec) -> int:
    """Return the desired replicas of a component; default 1."""
    return 1 if component.replicas is None else component.replicas


def service_name(graph: str, component: str) -> str:
    """Return the name of a component's service, which does not change with the workers' generation."""
    return f"{graph}-{component.lower()}"


def dns_label(name: str) -> str:
    """Return a name for a kind whose names allow no dots, such as a Service."""
    return name.lower().replace(".", "-")


def worker_hash(graph: DynamoGraphDeployment) -> str:
    """Return the generation of a graph's workers: eight hexadecimal digits of what makes them what they are."""
    workers = []
    for component in graph.spec.components or []:
        if is_worker(component):
            fields = msgspec.to_builtins(component)
            workers.append({name: value for name, value in fields.items() if name not in _wire_names()})
    shared = {"env": graph.spec.env, "backend": graph.spec.backend_framework}
    text = msgspec.json.encode([shared, sorted(workers, key=lambda one: one["name"])], order="deterministic")
    return hashlib.sha256(text).hexdigest()[:HASH_LENGTH]


def _wire_names() -> frozenset[str]:
    names = dict(zip(ComponentSpec.__struct_fields__, ComponentSpec.__struct_encode_fields__, strict=True))
    return frozenset(names[field] for field in NOT_HASHED)


def base_model_hash(name: str) -> str:
    """Return the label value of a base model, whose name may have characters that labels do not allow."""
    return hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]


def merged(*given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the union of labels or annotations; later ones take precedence."""
    found: dict[str, str] = {}
    for one in given:
        found |= one or {}
    return found
