"""Models, checkpoints and discovery records of workers."""

import msgspec
import pytest

from dynamo.protocols.kubernetes.common import decode, encode
from dynamo.protocols.kubernetes.crds import version_schema
from dynamo.protocols.kubernetes.models import (
    CheckpointStatus,
    DynamoCheckpoint,
    DynamoModel,
    DynamoWorkerMetadata,
    ModelEndpoint,
)
from dynamo.protocols.kubernetes.schema import problems, with_defaults

CHECKPOINT = {
    "spec": {
        "identity": {"model": "m", "backendFramework": "vllm"},
        "job": {"podTemplateSpec": {"spec": {"containers": [{"name": "main"}]}}},
    }
}


def test_adapter_is_read_with_its_source() -> None:
    spec = {"modelName": "a", "baseModelName": "b", "modelType": "lora", "source": {"uri": "hf://org/a"}}
    model = decode(DynamoModel, {"spec": spec})
    assert model.spec.source is not None
    assert encode(model)["spec"] == spec
    assert model.api_version == "nvidia.com/v1alpha1"


def test_uri_of_another_scheme_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.spec\.source\.uri"):
        decode(DynamoModel, {"spec": {"modelName": "a", "baseModelName": "b", "source": {"uri": "/tmp/a"}}})


def test_endpoint_that_is_not_ready_is_encoded_with_ready_false() -> None:
    found = encode(ModelEndpoint(address="http://10.0.0.1:9090", ready=False))
    assert found == {"address": "http://10.0.0.1:9090", "ready": False}


def test_checkpoint_job_receives_the_defaults_of_its_schema() -> None:
    filled = with_defaults(CHECKPOINT, version_schema("DynamoCheckpoint", "v1alpha1"))
    job = decode(DynamoCheckpoint, filled).spec.job
    assert (job.active_deadline_seconds, job.backoff_limit, job.ttl_seconds_after_finished) == (3600, 3, 300)
    assert encode(CheckpointStatus(checkpoint_id="c")) == {"checkpointID": "c"}


def test_worker_metadata_keeps_unlisted_fields() -> None:
    record = {"spec": {"data": {"endpoints": {"a/b/c": {"x": 1}}, "later": [1]}}}
    assert list(problems(record, version_schema("DynamoWorkerMetadata", "v1alpha1"))) == []
    assert decode(DynamoWorkerMetadata, record).spec.data["later"] == [1]
