"""Resources of nvidia.com/v1beta1, the storage version: graphs, components, requests and scaling adapters."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.kubernetes.common import (
    V1BETA1,
    BackendFramework,
    CelRule,
    CheckpointIdentity,
    Conditions,
    Count,
    DomainName,
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
    PodTemplate,
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

ComponentType = Literal["frontend", "worker", "prefill", "decode", "planner", "epp"]
SharingMode = Literal["IntraPod", "InterPod"]
GpuSku = Literal[
    "vr_nvl72", "gb200", "gb200_sxm", "gb10", "b300_sxm", "b200_sxm", "h200_sxm", "h100_sxm", "h100_pcie", "a100_sxm",
    "a100_pcie", "a30", "l40s", "l40", "l4", "v100_sxm", "v100_pcie", "t4", "mi200", "mi300",
]  # fmt: skip
RequestPhase = Literal["Pending", "Profiling", "Ready", "Deploying", "Deployed", "Failed"]
ProfilingPhase = Literal[
    "Initializing", "SweepingPrefill", "SweepingDecode", "SelectingConfig", "BuildingCurves", "GeneratingDGD", "Done"
]
STRING_SET = {"x-kubernetes-list-type": "set"}
CONTAINER_NAME_SCHEMA = {
    "default": "main",
    "minLength": 1,
    "maxLength": 63,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
}
SELF_NAMED_PATTERN = "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$"


class ScalingAdapter(KubeStruct):
    """Presence creates a DynamoGraphDeploymentScalingAdapter that owns the component's replicas."""


class CompilationCache(KubeStruct):
    """Claim that holds the engine's compilation cache."""

    pvc_name: NonEmpty
    mount_path: str | None = None
    """Default: the backend's own cache directory."""


class GpuMemoryService(KubeStruct):
    """Sharing of GPU memory between the containers of a pod, or between pods."""

    mode: Annotated[SharingMode | None, Meta(extra_json_schema={"default": "IntraPod"})] = None
    device_class_name: Annotated[str | None, Meta(extra_json_schema={"default": "gpu.nvidia.com"})] = None
    extra_client_containers: Annotated[list[str] | None, Meta(extra_json_schema=STRING_SET)] = None
    extra_client_pods: Annotated[list[Preserved] | None, Meta(extra_json_schema={"maxItems": 0})] = None
    """Reserved: no value is accepted yet."""
    RULES = (
        CelRule(
            "!has(self.extraClientContainers) || size(self.extraClientContainers) == 0 || self.mode == 'IntraPod'",
            "extraClientContainers is supported only with mode IntraPod",
        ),
    )


class Failover(KubeStruct):
    """Standby engines that take over when the active one fails."""

    mode: Annotated[SharingMode | None, Meta(extra_json_schema={"default": "IntraPod"})] = None
    num_shadows: Annotated[
        int | None, Meta(extra_json_schema={"minimum": 1, "maximum": 1, "default": 1, "format": "int32"})
    ] = None


class ComponentCheckpoint(KubeStruct):
    """Start of pods from a checkpoint."""

    enabled: bool | None = None
    startup_policy: Annotated[
        Literal["Immediate", "WaitForCheckpoint"] | None, Meta(extra_json_schema={"default": "Immediate"})
    ] = None
    deletion_policy: Annotated[Literal["Delete", "Retain"] | None, Meta(extra_json_schema={"default": "Delete"})] = None
    checkpoint_ref: str | None = None
    target_container_name: Annotated[str | None, Meta(extra_json_schema=CONTAINER_NAME_SCHEMA)] = None
    job: Preserved | None = None
    mode: Literal["Auto", "Manual"] | None = None
    """Deprecated and ignored."""
    identity: CheckpointIdentity | None = None
    """Deprecated and ignored with `checkpointRef`."""
    RULES = (
        CelRule(
            "!has(self.job) || !has(self.checkpointRef) || size(self.checkpointRef) == 0",
            "job and checkpointRef are mutually exclusive",
        ),
    )


class GroveOptions(KubeStruct):
    """Rendering with Grove."""

    force_scaling_group: bool | None = None
    """Render a component of one node as a scaling group."""


class ComponentExperimental(KubeStruct):
    """Preview features of one component."""

    gpu_memory_service: GpuMemoryService | None = None
    failover: Failover | None = None
    checkpoint: ComponentCheckpoint | None = None
    grove: GroveOptions | None = None


class ComponentSpec(KubeStruct):
    """One component of a graph."""

    name: Annotated[str, Meta(min_length=1, max_length=63, pattern=SELF_NAMED_PATTERN)]
    """Name within the graph; unique without regard to case."""
    type: ComponentType | None = None
    replicas: Count | None = None
    min_available: PositiveCount | None = None
    """Replicas that Grove schedules together; only with Grove."""
    pod_template: PodTemplate | None = None
    """Template of the pods; the container `main` receives the operator's defaults."""
    multinode: Multinode | None = None
    shared_memory_size: Quantity | None = None
    """Size of /dev/shm; default 8Gi, "0" disables it."""
    global_dynamo_namespace: bool | None = None
    model_ref: ModelReference | None = None
    scaling_adapter: ScalingAdapter | None = None
    frontend_sidecar: str | None = None
    """Name of the container that runs a frontend in the worker's pods."""
    compilation_cache: CompilationCache | None = None
    epp_config: EppConfig | None = None
    topology_constraint: TopologyConstraint | None = None
    runtime_version_override: RuntimeVersion | None = None
    """Version of the runtime in the image, for images without a version in their tag."""
    provider_override: ProviderOverride | None = None
    experimental: ComponentExperimental | None = None
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
        CelRule(
            "!has(self.eppConfig) || (has(self.type) && self.type == 'epp')",
            "eppConfig may only be set on a component of type epp",
        ),
    )


class GraphTopologyConstraint(KubeStruct):
    """Topology that the components' constraints refer to, with a default domain."""

    cluster_topology_name: NonEmpty
    pack_domain: DomainName | None = None


class GraphExperimental(KubeStruct):
    """Preview features of a graph."""

    kv_transfer_policy: KvTransferPolicy | None = None


class GraphSpec(KubeStruct):
    """Desired state of a graph."""

    annotations: dict[str, str] | None = None
    """Annotations of all child objects; a component's pod template takes precedence."""
    labels: dict[str, str] | None = None
    priority_class_name: str | None = None
    """Priority class of Grove PodCliqueSets."""
    env: list[EnvVar] | None = None
    """Environment variables of every component; a component's own take precedence."""
    backend_framework: BackendFramework | None = None
    restart: Restart | None = None
    topology_constraint: GraphTopologyConstraint | None = None
    experimental: GraphExperimental | None = None
    provider_override: ProviderOverride | None = None
    components: Annotated[
        list[ComponentSpec] | None,
        Meta(
            extra_json_schema={
                "maxItems": 25,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            }
        ),
    ] = None
    RULES = (
        CelRule(
            "!has(self.components) || self.components.filter(c, has(c.type) && c.type == 'epp').size() <= 1",
            "at most one component may have type epp",
        ),
    )


class ComponentStatus(KubeStruct):
    """Replicas of one component."""

    component_kind: WorkloadKind | None = None
    component_name: str | None = None
    component_names: list[str] | None = None
    replicas: Count | None = None
    updated_replicas: Count | None = None
    ready_replicas: Count | None = None
    available_replicas: Count | None = None
    scheduled_replicas: Count | None = None
    runtime_namespace: str | None = None
    """Dynamo namespace in which the workers register."""
    runtime_component_name: str | None = None
    """Dynamo component in which the workers register."""
    served_model_name: str | None = None
    gpus_per_engine: Count | None = None
    gpus_per_replica: Count | None = None
    gpu_power_limit_watts: Count | None = None
    """Power limit of one GPU, of the annotation dynamo.nvidia.com/gpu-power-limit."""


class RolloutStatus(KubeStruct):
    """Progress of a managed rolling update."""

    phase: RolloutPhaseName | None = None
    start_time: Time | None = None
    end_time: Time | None = None
    updated_components: list[str] | None = None


class ComponentCheckpointStatus(KubeStruct):
    """Checkpoint of one component."""

    checkpoint_name: str | None = None
    checkpoint_id: str | None = msgspec.field(name="checkpointID", default=None)
    identity_hash: str | None = None
    ready: bool | None = None


class PlacementStatus(KubeStruct):
    """Quality of the placement in the topology."""

    score: float | None = None
    state: str | None = None


class GraphStatus(KubeStruct):
    """Observed state of a graph."""

    observed_generation: Int64 | None = None
    state: Annotated[GraphState | None, Meta(extra_json_schema={"default": "initializing"})] = None
    conditions: Conditions | None = None
    components: dict[str, ComponentStatus] | None = None
    restart: RestartStatus | None = None
    checkpoints: dict[str, ComponentCheckpointStatus] | None = None
    rolling_update: RolloutStatus | None = None
    placement: PlacementStatus | None = None


class DynamoGraphDeployment(KubeStruct):
    """A graph of components that serves models."""

    api_version: str = V1BETA1
    kind: str = "DynamoGraphDeployment"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: GraphSpec = msgspec.field(default_factory=GraphSpec)
    status: GraphStatus | None = None


class ComponentDeploymentSpec(ComponentSpec, kw_only=True):
    """Desired state of one component outside a graph; the operator creates one per component of a graph."""

    name: Annotated[str | None, Meta(extra_json_schema={"maxLength": 63, "pattern": SELF_NAMED_PATTERN})] = None  # type: ignore[assignment]
    """Default: the object's name."""
    backend_framework: BackendFramework | None = None


class ComponentDeploymentStatus(KubeStruct):
    """Observed state of one component."""

    conditions: Conditions | None = None
    pod_selector: dict[str, str] | None = None
    component: ComponentStatus | None = None
    observed_generation: Int64 | None = None


class DynamoComponentDeployment(KubeStruct):
    """One component: a workload with its Service and Ingress."""

    api_version: str = V1BETA1
    kind: str = "DynamoComponentDeployment"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ComponentDeploymentSpec = msgspec.field(default_factory=ComponentDeploymentSpec)
    status: ComponentDeploymentStatus | None = None


class ComponentRef(KubeStruct):
    """A component of a graph."""

    name: NonEmpty
    """Name of the DynamoGraphDeployment."""
    component_name: NonEmpty


class ScalingAdapterSpec(KubeStruct):
    """Desired replicas of one component."""

    replicas: Count
    dgd_ref: ComponentRef


class ScalingAdapterStatus(KubeStruct):
    """Observed replicas of one component."""

    replicas: Int32 | None = None
    selector: str | None = None
    last_scale_time: Time | None = None


class DynamoGraphDeploymentScalingAdapter(KubeStruct, kw_only=True):
    """Scale subresource of one component of a graph."""

    api_version: str = V1BETA1
    kind: str = "DynamoGraphDeploymentScalingAdapter"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ScalingAdapterSpec
    status: ScalingAdapterStatus | None = None


class Workload(KubeStruct):
    """Expected load."""

    isl: Annotated[int | None, Meta(extra_json_schema={"default": 4000, "format": "int32"})] = None
    """Input sequence length in tokens."""
    osl: Annotated[int | None, Meta(extra_json_schema={"default": 1000, "format": "int32"})] = None
    """Output sequence length in tokens."""
    concurrency: float | None = None
    request_rate: float | None = None
    """Requests per second."""


class Sla(KubeStruct):
    """Latency targets in milliseconds."""

    ttft: float | None = None
    """Time to first token; default 2000."""
    itl: float | None = None
    """Inter-token latency; default 30."""
    e2e_latency: float | None = None
    optimization_type: Literal["latency", "throughput"] | None = None
    RULES = (
        CelRule(
            "!has(self.e2eLatency) || (!has(self.ttft) && !has(self.itl))",
            "e2eLatency and ttft or itl are mutually exclusive",
        ),
    )


class ModelCache(KubeStruct):
    """Claim with model weights."""

    pvc_name: str | None = None
    pvc_model_path: str | None = None
    pvc_mount_path: Annotated[str | None, Meta(extra_json_schema={"default": "/opt/model-cache"})] = None


class Hardware(KubeStruct):
    """GPUs of the cluster; absent fields are discovered."""

    gpu_sku: GpuSku | None = None
    vram_mb: float | None = None
    total_gpus: Int32 | None = None
    num_gpus_per_node: Int32 | None = None
    interconnect: str | None = None
    rdma: bool | None = None


class FeatureSwitch(KubeStruct):
    """A feature that is on or off."""

    enabled: bool | None = None


class Features(KubeStruct):
    """Optional parts of the generated graph."""

    planner: Preserved | None = None
    """Configuration of the planner; presence adds one."""
    kv_router: FeatureSwitch | None = None
    mocker: FeatureSwitch | None = None


class Overrides(KubeStruct):
    """Changes to the profiling job and to the generated graph."""

    profiling_job: Preserved | None = None
    """Patch of the batch/v1 JobSpec."""
    dgd: Embedded | None = None
    """Full or partial DynamoGraphDeployment that is merged into the generated one."""
    trust_remote_code: Annotated[bool | None, Meta(extra_json_schema={"default": False})] = None


class RequestSpec(KubeStruct):
    """Model and targets for which a graph is generated."""

    model: NonEmpty
    backend: Annotated[
        Literal["auto", "sglang", "trtllm", "vllm"] | None, Meta(extra_json_schema={"default": "auto"})
    ] = None
    image: str | None = None
    runtime_version_override: RuntimeVersion | None = None
    model_cache: ModelCache | None = None
    hardware: Hardware | None = None
    workload: Workload | None = None
    sla: Sla | None = None
    overrides: Overrides | None = None
    features: Features | None = None
    search_strategy: Annotated[Literal["rapid", "thorough"] | None, Meta(extra_json_schema={"default": "rapid"})] = None
    auto_apply: Annotated[bool | None, Meta(extra_json_schema={"default": True})] = None


class ParetoConfig(KubeStruct):
    """One configuration found by an older profiler."""

    config: Preserved


class ProfilingResults(KubeStruct):
    """Outcome of profiling."""

    pareto: list[ParetoConfig] | None = None
    selected_config: Preserved | None = None


class DeploymentInfo(KubeStruct):
    """Replicas of the deployed graph."""

    replicas: Int32 | None = None
    available_replicas: Int32 | None = None


class RequestStatus(KubeStruct):
    """Observed state of a request."""

    phase: RequestPhase | None = None
    profiling_phase: ProfilingPhase | None = None
    dgd_name: str | None = None
    profiling_job_name: str | None = None
    conditions: Conditions | None = None
    profiling_results: ProfilingResults | None = None
    deployment_info: DeploymentInfo | None = None
    observed_generation: Int64 | None = None


class DynamoGraphDeploymentRequest(KubeStruct, kw_only=True):
    """Request for a graph that serves a model within latency targets."""

    api_version: str = V1BETA1
    kind: str = "DynamoGraphDeploymentRequest"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: RequestSpec
    status: RequestStatus | None = None
