"""Building blocks of all Kubernetes resources: metadata, conditions, references and annotated field types."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

GROUP = "nvidia.com"
V1ALPHA1 = f"{GROUP}/v1alpha1"
V1BETA1 = f"{GROUP}/v1beta1"

KubeObject = dict[str, Any]
"""A Kubernetes object as JSON: any kind at the API boundary, or a part that Kubernetes itself defines."""

Preserved = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]
"""An object whose fields are not listed here and are kept."""
Embedded = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True, "x-kubernetes-embedded-resource": True}),
]
"""A whole Kubernetes object inside another."""
Int32 = Annotated[int, Meta(extra_json_schema={"format": "int32"})]
Int64 = Annotated[int, Meta(extra_json_schema={"format": "int64"})]
Count = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int32"})]
PositiveCount = Annotated[int, Meta(ge=1, extra_json_schema={"format": "int32"})]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Quantity = str | int
"""A Kubernetes quantity such as `8Gi`, `500m` or `4`."""
NonEmpty = Annotated[str, Meta(min_length=1)]
DomainName = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
"""Logical name of a topology level, such as `rack`."""
RuntimeVersion = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$")]
"""Version of the runtime in an image, such as `1.6.1`."""
LABEL_KEY_PATTERN = (
    r"^(([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*/)?"
    r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)$"
)
BackendFramework = Literal["sglang", "vllm", "trtllm"]
RestartStrategyType = Literal["Sequential", "Parallel"]
GraphState = Literal["initializing", "pending", "successful", "failed"]
RestartPhase = Literal["Pending", "Restarting", "Completed", "Failed", "Superseded"]
RolloutPhaseName = Literal["", "Pending", "InProgress", "Completed", "Failed"]
WorkloadKind = Literal["PodClique", "PodCliqueScalingGroup", "Deployment", "LeaderWorkerSet"]

ENV_SCHEMA = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1}, "value": {"type": "string"}},
}
EnvVar = Annotated[dict[str, Any], Meta(extra_json_schema=ENV_SCHEMA)]
"""A core/v1 EnvVar."""
CONTAINER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "x-kubernetes-preserve-unknown-fields": True,
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "workingDir": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": ENV_SCHEMA},
        "envFrom": {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        "ports": {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        "volumeMounts": {
            "type": "array",
            "items": {
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": True,
                "required": ["name", "mountPath"],
                "properties": {"name": {"type": "string"}, "mountPath": {"type": "string"}},
            },
        },
        "resources": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "livenessProbe": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "readinessProbe": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "startupProbe": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "securityContext": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}
NAMED_CONTAINER_SCHEMA = {**CONTAINER_SCHEMA, "required": ["name"]}
Container = Annotated[dict[str, Any], Meta(extra_json_schema=CONTAINER_SCHEMA)]
POD_SPEC_PROPERTIES: dict[str, Any] = {
    "containers": {"type": "array", "items": NAMED_CONTAINER_SCHEMA},
    "initContainers": {"type": "array", "items": NAMED_CONTAINER_SCHEMA},
    "volumes": {
        "type": "array",
        "items": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
    "imagePullSecrets": {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    "tolerations": {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
    "affinity": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "securityContext": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    "serviceAccountName": {"type": "string"},
    "schedulerName": {"type": "string"},
    "priorityClassName": {"type": "string"},
    "terminationGracePeriodSeconds": {"type": "integer", "format": "int64"},
}
STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {"annotations": STRING_MAP, "labels": STRING_MAP},
        },
        "spec": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": POD_SPEC_PROPERTIES,
        },
    },
}
PodTemplate = Annotated[dict[str, Any], Meta(extra_json_schema=POD_TEMPLATE_SCHEMA)]
"""A core/v1 PodTemplateSpec. The listed fields are checked; all others are kept for the API server to check."""

SELECTABLE_KEY_SCHEMA = {
    "type": "object",
    "required": ["key"],
    "properties": {"name": {"type": "string"}, "key": {"type": "string"}, "optional": {"type": "boolean"}},
}
ConfigMapKey = Annotated[dict[str, Any], Meta(extra_json_schema=SELECTABLE_KEY_SCHEMA)]
"""A core/v1 ConfigMapKeySelector."""


class CelRule(NamedTuple):
    """One `x-kubernetes-validations` rule of an object."""

    rule: str
    message: str


class KubeStruct(msgspec.Struct, omit_defaults=True, rename="camel"):
    """Base of all API types: camel case on the wire, absent fields stay absent."""

    RULES: ClassVar[tuple[CelRule, ...]] = ()


class OwnerReference(KubeStruct, omit_defaults=False):
    """Reference to the object that owns this one."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = True
    block_owner_deletion: bool = True


class ObjectMeta(KubeStruct):
    """Metadata of an object: the fields that the operator reads or writes."""

    name: str = ""
    namespace: str = ""
    generate_name: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: list[str] = msgspec.field(default_factory=list)
    owner_references: list[dict[str, Any]] = msgspec.field(default_factory=list)


class Condition(KubeStruct, kw_only=True, omit_defaults=False):
    """A metav1.Condition."""

    type: Annotated[str, Meta(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    last_transition_time: Time = ""
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)] = ""
    observed_generation: Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})] = 0


Conditions = Annotated[
    list[Condition],
    Meta(extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


class RestartStrategy(KubeStruct):
    """Order in which a restart visits the components."""

    type: Annotated[RestartStrategyType | None, Meta(extra_json_schema={"default": "Sequential"})] = None
    order: list[str] | None = None


class Restart(KubeStruct):
    """Request to restart all components; a new id starts it."""

    id: NonEmpty
    strategy: RestartStrategy | None = None


class RestartStatus(KubeStruct):
    """Progress of a restart."""

    observed_id: str | None = msgspec.field(name="observedID", default=None)
    """Id of the restart that the status describes."""
    phase: RestartPhase | None = None
    in_progress: list[str] | None = None
    """Names of the components that are restarting."""


class ModelReference(KubeStruct):
    """Model that a component serves."""

    name: NonEmpty
    revision: str | None = None


class CheckpointIdentity(KubeStruct):
    """Inputs that decide whether two checkpoints are equivalent."""

    model: str
    backend_framework: BackendFramework
    dynamo_version: str | None = None
    tensor_parallel_size: Annotated[int | None, Meta(extra_json_schema={"minimum": 1, "default": 1})] = None
    pipeline_parallel_size: Annotated[int | None, Meta(extra_json_schema={"minimum": 1, "default": 1})] = None
    dtype: str | None = None
    max_model_len: PositiveCount | None = None
    extra_parameters: dict[str, str] | None = None


class ProviderOverride(KubeStruct, kw_only=True):
    """Fragment of the object that a workload provider, such as Grove, generates."""

    api_version: NonEmpty
    """Group and version of the provider's schema, such as `grove.io/v1alpha1`."""
    target: str | None = None
    """Kind or embedded type that the fragment is of; may be absent where only one is possible."""
    value: Preserved
    """Fields to set; Grove accepts the topology constraint."""


class NodeRole(KubeStruct):
    """Settings of the leader or of the workers of one replica."""

    provider_override: ProviderOverride | None = None


class Multinode(KubeStruct):
    """Nodes that together run one replica."""

    node_count: Annotated[int | None, Meta(extra_json_schema={"minimum": 2, "default": 2, "format": "int32"})] = None
    leader: NodeRole | None = None
    worker: NodeRole | None = None


class TopologyConstraint(KubeStruct):
    """Topology domain into which the pods of one replica are packed."""

    pack_domain: DomainName


class EppConfig(KubeStruct):
    """Configuration of the endpoint picker."""

    config_map_ref: ConfigMapKey | None = None
    """Key of a ConfigMap with an EndpointPickerConfig."""
    config: Preserved | None = None
    """An EndpointPickerConfig; the operator writes it into a ConfigMap."""
    RULES = (
        CelRule("has(self.configMapRef) != has(self.config)", "exactly one of configMapRef and config must be set"),
    )


class KvTransferPolicy(KubeStruct, kw_only=True):
    """Preference for KV cache transfers within one topology domain."""

    label_key: Annotated[str, Meta(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)] | None = None
    """Node label whose value names the domain."""
    cluster_topology_name: NonEmpty | None = None
    domain: DomainName
    enforcement: Annotated[Literal["required", "preferred"] | None, Meta(extra_json_schema={"default": "required"})] = (
        None
    )
    preferred_weight: Annotated[float, Meta(ge=0, le=1)] | None = None
    RULES = (
        CelRule(
            "has(self.labelKey) != has(self.clusterTopologyName)",
            "exactly one of labelKey and clusterTopologyName must be set",
        ),
        CelRule(
            "(has(self.enforcement) && self.enforcement == 'preferred') == has(self.preferredWeight)",
            "preferredWeight is required with enforcement preferred, and must be absent otherwise",
        ),
    )


T = TypeVar("T", bound=KubeStruct)


def decode(kind: type[T], value: object) -> T:
    """Return JSON data as a Struct; unknown fields are dropped. Raises `msgspec.ValidationError` with the path."""
    return msgspec.convert(value, kind)


def encode(value: msgspec.Struct) -> KubeObject:
    """Return a Struct as JSON data without its absent fields."""
    encoded: KubeObject = msgspec.to_builtins(value)
    return encoded
