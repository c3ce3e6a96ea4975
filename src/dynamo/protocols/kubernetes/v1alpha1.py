"""Resources of nvidia.com/v1alpha1 that v1beta1 replaces: graphs with a `services` map, components, requests and adapters."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.kubernetes.common import (
    CONTAINER_SCHEMA,
    POD_SPEC_PROPERTIES,
    V1ALPHA1,
    BackendFramework,
    CelRule,
    CheckpointIdentity,
    Conditions,
    Count,
    Embedded,
    EnvVar,
    EppConfig,
    GraphState,
    Int32,
    Int64,
    KubeStruct,
    KvTransferPolicy,
    ModelReference,
    Multinode,
    NonEmpty,
    ObjectMeta,
    PositiveCount,
    Preserved,
    ProviderOverride,
    Quantity,
    Restart,
    RestartStatus,
    RolloutPhaseName,
    RuntimeVersion,
    Time,
    TopologyConstraint,
    WorkloadKind,
)

RequestStateV1Alpha1 = Literal[
    "", "Initializing", "Pending", "Profiling", "Deploying", "Ready", "DeploymentDeleted", "Failed"
]
EXTRA_POD_SPEC_SCHEMA = {
    "x-kubernetes-preserve-unknown-fields": True,
    "properties": {**POD_SPEC_PROPERTIES, "mainContainer": CONTAINER_SCHEMA},
}


class PersistentVolume(KubeStruct):
    """Claim that components mount by name; created by the operator if `create` is set."""

    name: str
    create: bool | None = None
    storage_class: str | None = None
    size: Quantity | None = None
    volume_access_mode: str | None = None


class ResourceItem(KubeStruct):
    """Amounts of one side, requests or limits."""

    cpu: str | None = None
    memory: str | None = None
    gpu: str | None = None
    gpu_type: str | None = None
    """Resource name of the GPUs; default nvidia.com/gpu."""
    custom: dict[str, str] | None = None


class ServiceResources(KubeStruct):
    """Resources of the main container."""

    requests: ResourceItem | None = None
    limits: ResourceItem | None = None
    claims: list[Preserved] | None = None


class ServiceVolumeMount(KubeStruct):
    """Mount of a claim of the graph."""

    name: str
    mount_point: str | None = None
    use_as_compilation_cache: bool | None = None


class IngressTls(KubeStruct):
    """Certificate of an Ingress."""

    secret_name: str | None = None


class IngressSpec(KubeStruct):
    """Exposure of a component outside the cluster."""

    enabled: bool | None = None
    host: str | None = None
    use_virtual_service: bool | None = None
    virtual_service_gateway: str | None = None
    host_prefix: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    tls: IngressTls | None = None
    host_suffix: str | None = None
    ingress_controller_class_name: str | None = None


class SharedMemory(KubeStruct):
    """Memory file system at /dev/shm."""

    disabled: bool | None = None
    size: Quantity | None = None


class ExtraPodMetadata(KubeStruct):
    """Labels and annotations of the pods alone."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class ScalingAdapterSwitch(KubeStruct):
    """Whether a scaling adapter owns the replicas."""

    enabled: bool | None = None


class FrontendSidecar(KubeStruct):
    """Frontend in the pods of a worker."""

    image: str
    args: list[str] | None = None
    env_from_secret: str | None = None
    envs: list[EnvVar] | None = None


class ServiceCheckpoint(KubeStruct):
    """Start of pods from a checkpoint."""

    enabled: Annotated[bool | None, Meta(extra_json_schema={"default": False})] = None
    mode: Annotated[Literal["Auto", "Manual"] | None, Meta(extra_json_schema={"default": "Auto"})] = None
    checkpoint_ref: str | None = None
    identity: CheckpointIdentity | None = None
    startup_policy: Literal["Immediate", "WaitForCheckpoint"] | None = None
    deletion_policy: Literal["Delete", "Retain"] | None = None
    target_container_name: str | None = None
    job: Preserved | None = None


class GpuMemoryServiceSwitch(KubeStruct):
    """Sharing of GPU memory."""

    enabled: bool | None = None
    mode: Literal["intraPod", "interPod"] | None = None
    device_class_name: str | None = None
    extra_client_containers: list[str] | None = None
    extra_client_pods: Annotated[list[Preserved] | None, Meta(extra_json_schema={"maxItems": 0})] = None
    """Reserved: no value is accepted yet."""


class FailoverSwitch(KubeStruct):
    """Standby engines."""

    enabled: bool | None = None
    mode: Literal["intraPod", "interPod"] | None = None
    num_shadows: PositiveCount | None = None


class ServiceSpec(KubeStruct):
    """One service of a graph."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    service_name: str | None = None
    component_type: str | None = None
    """frontend, worker, prefill, decode, planner or epp; other values receive the defaults of no role."""
    sub_component_type: str | None = None
    """prefill or decode, on a worker."""
    dynamo_namespace: str | None = None
    """Deprecated and ignored."""
    global_dynamo_namespace: bool | None = None
    resources: ServiceResources | None = None
    autoscaling: Preserved | None = None
    """Deprecated and ignored."""
    envs: list[EnvVar] | None = None
    env_from_secret: str | None = None
    volume_mounts: list[ServiceVolumeMount] | None = None
    ingress: IngressSpec | None = None
    model_ref: ModelReference | None = None
    shared_memory: SharedMemory | None = None
    extra_pod_metadata: ExtraPodMetadata | None = None
    extra_pod_spec: Annotated[dict[str, Any] | None, Meta(extra_json_schema=EXTRA_POD_SPEC_SCHEMA)] = None
    """A core/v1 PodSpec with one more field, `mainContainer`."""
    liveness_probe: Preserved | None = None
    readiness_probe: Preserved | None = None
    replicas: Count | None = None
    min_available: PositiveCount | None = None
    """Replicas that Grove schedules together; only with Grove."""
    multinode: Multinode | None = None
    scaling_adapter: ScalingAdapterSwitch | None = None
    epp_config: EppConfig | None = None
    frontend_sidecar: FrontendSidecar | None = None
    checkpoint: ServiceCheckpoint | None = None
    topology_constraint: TopologyConstraint | None = None
    gpu_memory_service: GpuMemoryServiceSwitch | None = None
    failover: FailoverSwitch | None = None
    runtime_version_override: RuntimeVersion | None = None
    """Version of the runtime in the image, for images without a version in their tag."""
    provider_override: ProviderOverride | None = None
    RULES = (
        CelRule(
            "!has(self.minAvailable) || (has(self.replicas) && self.replicas == 0) ||"
            " self.minAvailable <= (has(self.replicas) ? self.replicas : 1)",
            "minAvailable must be at most the number of replicas, unless this is 0",
        ),
        CelRule(
            "!has(oldSelf.minAvailable) || (has(self.minAvailable) && self.minAvailable == oldSelf.minAvailable)",
            "minAvailable is immutable",
        ),
    )


class GraphTopologyConstraintV1Alpha1(KubeStruct):
    """Topology that the services' constraints refer to."""

    cluster_topology_name: str | None = None
    topology_profile: str | None = None
    """Older name of `clusterTopologyName`."""
    pack_domain: str | None = None


class GraphExperimentalV1Alpha1(KubeStruct):
    """Preview features of a graph."""

    kv_transfer_policy: KvTransferPolicy | None = None
    component_groups: list[Preserved] | None = None


class GraphSpecV1Alpha1(KubeStruct):
    """Desired state of a graph."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    priority_class_name: str | None = None
    pvcs: Annotated[
        list[PersistentVolume] | None,
        Meta(
            extra_json_schema={
                "maxItems": 100,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            }
        ),
    ] = None
    services: Annotated[dict[str, ServiceSpec] | None, Meta(extra_json_schema={"maxProperties": 25})] = None
    envs: list[EnvVar] | None = None
    backend_framework: BackendFramework | None = None
    restart: Restart | None = None
    topology_constraint: GraphTopologyConstraintV1Alpha1 | None = None
    experimental: GraphExperimentalV1Alpha1 | None = None
    provider_override: ProviderOverride | None = None


class ServiceStatus(KubeStruct):
    """Replicas of one service."""

    component_kind: WorkloadKind | None = None
    component_name: str | None = None
    component_names: list[str] | None = None
    replicas: Count | None = None
    updated_replicas: Count | None = None
    ready_replicas: Count | None = None
    available_replicas: Count | None = None
    scheduled_replicas: Count | None = None
    runtime_namespace: str | None = None
    gpus_per_engine: Count | None = None


class RolloutStatusV1Alpha1(KubeStruct):
    """Progress of a managed rolling update."""

    phase: RolloutPhaseName | None = None
    start_time: Time | None = None
    end_time: Time | None = None
    updated_services: list[str] | None = None


class ServiceCheckpointStatus(KubeStruct):
    """Checkpoint of one service."""

    checkpoint_name: str | None = None
    checkpoint_id: str | None = msgspec.field(name="checkpointID", default=None)
    identity_hash: str | None = None
    ready: bool | None = None


class PlacementStatusV1Alpha1(KubeStruct):
    """Quality of the placement in the topology."""

    score: float | None = None
    state: str | None = None


class GraphStatusV1Alpha1(KubeStruct):
    """Observed state of a graph."""

    observed_generation: Int64 | None = None
    state: Annotated[GraphState | None, Meta(extra_json_schema={"default": "initializing"})] = None
    conditions: Conditions | None = None
    services: dict[str, ServiceStatus] | None = None
    restart: RestartStatus | None = None
    checkpoints: dict[str, ServiceCheckpointStatus] | None = None
    rolling_update: RolloutStatusV1Alpha1 | None = None
    placement: PlacementStatusV1Alpha1 | None = None


class DynamoGraphDeploymentV1Alpha1(KubeStruct):
    """A graph of services that serves models."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoGraphDeployment"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: GraphSpecV1Alpha1 = msgspec.field(default_factory=GraphSpecV1Alpha1)
    status: GraphStatusV1Alpha1 | None = None


class ComponentDeploymentSpecV1Alpha1(ServiceSpec, kw_only=True):
    """Desired state of one component outside a graph."""

    backend_framework: BackendFramework | None = None
    dynamo_component: str | None = None
    """Legacy and ignored."""
    dynamo_tag: str | None = None
    """Legacy and ignored."""


class ComponentDeploymentStatusV1Alpha1(KubeStruct):
    """Observed state of one component."""

    conditions: Conditions | None = None
    pod_selector: dict[str, str] | None = None
    service: ServiceStatus | None = None
    observed_generation: Int64 | None = None


class DynamoComponentDeploymentV1Alpha1(KubeStruct):
    """One component: a workload with its Service and Ingress."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoComponentDeployment"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ComponentDeploymentSpecV1Alpha1 = msgspec.field(default_factory=ComponentDeploymentSpecV1Alpha1)
    status: ComponentDeploymentStatusV1Alpha1 | None = None


class ServiceRef(KubeStruct):
    """A service of a graph."""

    name: NonEmpty
    """Name of the DynamoGraphDeployment."""
    service_name: NonEmpty


class ScalingAdapterSpecV1Alpha1(KubeStruct):
    """Desired replicas of one service."""

    replicas: Count
    dgd_ref: ServiceRef


class ScalingAdapterStatusV1Alpha1(KubeStruct):
    """Observed replicas of one service."""

    replicas: Int32 | None = None
    selector: str | None = None
    last_scale_time: Time | None = None


class DynamoGraphDeploymentScalingAdapterV1Alpha1(KubeStruct, kw_only=True):
    """Scale subresource of one service of a graph."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoGraphDeploymentScalingAdapter"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ScalingAdapterSpecV1Alpha1
    status: ScalingAdapterStatusV1Alpha1 | None = None


class ProfilingConfigMapRef(KubeStruct):
    """Key of a ConfigMap with the base deployment."""

    name: str
    key: Annotated[str | None, Meta(extra_json_schema={"default": "disagg.yaml"})] = None


class ProfilingConfig(KubeStruct):
    """Configuration of the profiling job."""

    config: Preserved | None = None
    """Profiler configuration: `sla`, `engine`, `deployment`, `hardware`, `sweep`."""
    config_map_ref: ProfilingConfigMapRef | None = None
    profiler_image: str | None = None
    output_pvc: str | None = msgspec.field(name="outputPVC", default=None)
    resources: Preserved | None = None
    tolerations: list[Preserved] | None = None
    node_selector: dict[str, str] | None = None


class DeploymentOverrides(KubeStruct):
    """Metadata of the generated graph."""

    name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    workers_image: str | None = None


class RequestSpecV1Alpha1(KubeStruct):
    """Model and targets for which a graph is generated."""

    model: NonEmpty
    backend: Literal["auto", "vllm", "sglang", "trtllm"] | None = None
    use_mocker: Annotated[bool | None, Meta(extra_json_schema={"default": False})] = None
    profiling_config: ProfilingConfig | None = None
    enable_gpu_discovery: Annotated[bool | None, Meta(extra_json_schema={"default": True})] = None
    auto_apply: Annotated[bool | None, Meta(extra_json_schema={"default": False})] = None
    deployment_overrides: DeploymentOverrides | None = None
    runtime_version_override: RuntimeVersion | None = None


class GeneratedDeploymentStatus(KubeStruct):
    """The graph that the request created."""

    name: str | None = None
    namespace: str | None = None
    state: Annotated[GraphState | None, Meta(extra_json_schema={"default": "initializing"})] = None
    created: bool | None = None


class RequestStatusV1Alpha1(KubeStruct):
    """Observed state of a request."""

    state: Annotated[RequestStateV1Alpha1 | None, Meta(extra_json_schema={"default": "Initializing"})] = None
    backend: str | None = None
    observed_generation: Int64 | None = None
    conditions: Conditions | None = None
    profiling_results: str | None = None
    """Reference `configmap/<name>`."""
    generated_deployment: Embedded | None = None
    deployment: GeneratedDeploymentStatus | None = None


class DynamoGraphDeploymentRequestV1Alpha1(KubeStruct, kw_only=True):
    """Request for a graph that serves a model within latency targets."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoGraphDeploymentRequest"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: RequestSpecV1Alpha1
    status: RequestStatusV1Alpha1 | None = None
