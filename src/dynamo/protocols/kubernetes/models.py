"""Resources that exist in nvidia.com/v1alpha1 only: models, checkpoints and the discovery records of workers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.kubernetes.common import (
    V1ALPHA1,
    CelRule,
    CheckpointIdentity,
    Conditions,
    Int32,
    Int64,
    KubeStruct,
    NonEmpty,
    ObjectMeta,
    PodTemplate,
    Preserved,
    Time,
)
from dynamo.protocols.kubernetes.v1alpha1 import GpuMemoryServiceSwitch, SharedMemory


class ModelSource(KubeStruct):
    """Place from which an adapter is loaded."""

    uri: Annotated[str, Meta(pattern="^(s3|hf)://.+")]
    """`s3://bucket/path` or `hf://org/model@revision`."""


class ModelSpec(KubeStruct):
    """A model or an adapter that workers serve."""

    model_name: NonEmpty
    base_model_name: NonEmpty
    """Name in the `modelRef` of the components that serve it."""
    model_type: Annotated[Literal["base", "lora", "adapter"] | None, Meta(extra_json_schema={"default": "base"})] = None
    source: ModelSource | None = None
    RULES = (
        CelRule(
            "!has(self.modelType) || self.modelType != 'lora' || has(self.source)",
            "source.uri is required for modelType lora",
        ),
    )


class ModelEndpoint(KubeStruct, kw_only=True):
    """One pod that serves the model."""

    address: str
    """`http://IP:PORT` of the system server."""
    pod_name: str = ""
    ready: bool
    lora_fallback_covered: bool = msgspec.field(name="loraFallbackCovered", default=False)
    """Whether the pod of an earlier release cannot load adapters, and another prefill worker of its graph has this one."""


class ModelStatus(KubeStruct):
    """Observed state of a model."""

    endpoints: list[ModelEndpoint] | None = None
    ready_endpoints: Int32 | None = None
    lora_fallback_covered_endpoints: Int32 | None = msgspec.field(name="loraFallbackCoveredEndpoints", default=None)
    total_endpoints: Int32 | None = None
    conditions: Conditions | None = None
    observed_generation: Int64 | None = None


class DynamoModel(KubeStruct, kw_only=True):
    """A base model, or an adapter that is loaded into the workers of its base model."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoModel"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ModelSpec
    status: ModelStatus | None = None


class CheckpointJob(KubeStruct):
    """Job that runs the worker once and captures it."""

    pod_template_spec: PodTemplate
    target_container_name: str | None = None
    shared_memory: SharedMemory | None = None
    active_deadline_seconds: Annotated[int | None, Meta(extra_json_schema={"default": 3600, "format": "int64"})] = None
    backoff_limit: Annotated[int | None, Meta(extra_json_schema={"default": 3, "format": "int32"})] = None
    ttl_seconds_after_finished: Annotated[int | None, Meta(extra_json_schema={"default": 300, "format": "int32"})] = (
        None
    )


class CheckpointSpec(KubeStruct, kw_only=True):
    """Identity of a checkpoint and the job that creates it."""

    identity: CheckpointIdentity
    gpu_memory_service: GpuMemoryServiceSwitch | None = None
    job: CheckpointJob


class CheckpointStatus(KubeStruct):
    """Observed state of a checkpoint."""

    phase: Literal["Pending", "Creating", "Ready", "Failed"] | None = None
    checkpoint_id: str | None = msgspec.field(name="checkpointID", default=None)
    pod_snapshot_name: str | None = None
    identity_hash: str | None = None
    location: str | None = None
    storage_type: Literal["pvc", "s3", "oci"] | None = None
    job_name: str | None = None
    created_at: Time | None = None
    message: str | None = None
    conditions: Conditions | None = None


class DynamoCheckpoint(KubeStruct, kw_only=True):
    """A captured worker from which pods start."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoCheckpoint"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: CheckpointSpec
    status: CheckpointStatus | None = None


class WorkerMetadataSpec(KubeStruct):
    """Endpoints and model cards of one pod."""

    data: Preserved
    """`endpoints` by `namespace/component/endpoint`, `model_cards` and `event_channels`."""


class DynamoWorkerMetadata(KubeStruct, kw_only=True):
    """Discovery record of one pod; it has the pod's name and is owned by it."""

    api_version: str = V1ALPHA1
    kind: str = "DynamoWorkerMetadata"
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: WorkerMetadataSpec
