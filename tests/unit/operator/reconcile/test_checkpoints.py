"""DynamoCheckpoints: identity, job, phases, and convergence from every state between two writes."""

from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.operator.reconcile.checkpoints import (
    CannotCheckpoint,
    checkpoint_job,
    checkpoint_plan,
    identity_hash,
    job_name,
)
from dynamo.operator.reconcile.plan import Plan
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.models import CheckpointStatus, DynamoCheckpoint

NOW = "2026-01-01T00:00:00Z"
IDENTITY: dict[str, Any] = {"model": "org/m", "backendFramework": "vllm"}
MAIN = {"name": "main", "image": "i", "command": ["python3", "-m", "dynamo.vllm"], "args": ["--model", "org/m"]}


def checkpoint(
    identity: dict[str, Any] | None = None, *, name: str = "c", created: str = "1", **job: Any
) -> DynamoCheckpoint:
    value: dict[str, Any] = {
        "metadata": {"name": name, "namespace": "space", "creationTimestamp": created},
        "spec": {
            "identity": IDENTITY | (identity or {}),
            "job": {"podTemplateSpec": {"spec": {"containers": [dict(MAIN)]}}} | job,
        },
    }
    return decode(DynamoCheckpoint, value)


def ended(kind: str, **metadata: Any) -> KubeObject:
    return {"metadata": metadata, "status": {"conditions": [{"type": kind, "status": "True", "message": "why"}]}}


def after(value: DynamoCheckpoint, plan: Plan) -> DynamoCheckpoint:
    """Return a checkpoint with the status that a plan gives it."""
    assert plan.status is not None
    return replace(value, status=decode(CheckpointStatus, plan.status))


def test_checkpoint_identity_equals_that_of_upstream_and_ignores_defaults() -> None:
    assert identity_hash(checkpoint().spec.identity) == identity_hash(
        checkpoint({"tensorParallelSize": 1, "pipelineParallelSize": 1, "extraParameters": {}}).spec.identity
    )
    assert identity_hash(checkpoint({"dtype": "fp8"}).spec.identity) != identity_hash(checkpoint().spec.identity)
    first, second = {"extraParameters": {"a": "1", "b": "2"}}, {"extraParameters": {"b": "2", "a": "1"}}
    assert identity_hash(checkpoint(first).spec.identity) == identity_hash(checkpoint(second).spec.identity)


def test_checkpoint_job_has_deadline_ttl_and_source_labels() -> None:
    job = checkpoint_job(checkpoint())
    digest = identity_hash(checkpoint().spec.identity)
    assert job["metadata"]["name"] == f"checkpoint-job-{digest}-1"
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["ttlSecondsAfterFinished"]) == (3600, 300)
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["nvidia.com/snapshot-is-checkpoint-source"] == "true"
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["securityContext"]["seccompProfile"]["localhostProfile"] == "profiles/block-iouring.json"
    assert template["spec"]["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert template["spec"]["containers"][0]["command"] == MAIN["command"]


def test_limits_of_the_specification_take_precedence() -> None:
    job = checkpoint_job(checkpoint(activeDeadlineSeconds=60, backoffLimit=0, ttlSecondsAfterFinished=0))
    assert [job["spec"][name] for name in ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished")] == [
        60,
        0,
        0,
    ]


def test_multi_gpu_checkpoint_starts_under_the_launcher() -> None:
    main = checkpoint_job(checkpoint({"tensorParallelSize": 2}))["spec"]["template"]["spec"]["containers"][0]
    assert main["command"] == ["cuda-checkpoint"]
    assert main["args"] == ["--launch-job", *MAIN["command"], *MAIN["args"]]


def test_environment_of_the_template_takes_precedence() -> None:
    template = {"spec": {"containers": [MAIN | {"env": [{"name": "DYN_NAMESPACE", "value": "own"}]}]}}
    main = checkpoint_job(checkpoint(podTemplateSpec=template))["spec"]["template"]["spec"]["containers"][0]
    assert [one["value"] for one in main["env"] if one["name"] == "DYN_NAMESPACE"] == ["own"]


def test_shared_memory_can_be_disabled_or_enlarged() -> None:
    assert "volumes" not in checkpoint_job(checkpoint(sharedMemory={"disabled": True}))["spec"]["template"]["spec"]
    volumes = checkpoint_job(checkpoint(sharedMemory={"size": "16Gi"}))["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["emptyDir"]["sizeLimit"] == "16Gi"


@pytest.mark.parametrize(
    ("identity", "job", "field"),
    [
        ({}, {"podTemplateSpec": {}}, "containers: must have at least one"),
        ({}, {"targetContainerName": "x"}, "spec.job.targetContainerName: 'x'"),
        (
            {"tensorParallelSize": 2},
            {"podTemplateSpec": {"spec": {"containers": [{"name": "a"}]}}},
            "'a' must have a command",
        ),
    ],
)
def test_template_without_a_usable_container_is_refused_with_its_field(
    identity: dict[str, Any], job: dict[str, Any], field: str
) -> None:
    with pytest.raises(CannotCheckpoint, match=field):
        checkpoint_job(checkpoint(identity, **job))
    plan = checkpoint_plan(checkpoint(identity, **job), None, [], NOW)
    assert plan.status is not None and (plan.apply, plan.status["phase"]) == ((), "Failed")


def test_checkpoint_phases_follow_the_job() -> None:
    value = checkpoint()
    plan = checkpoint_plan(value, None, [], NOW)
    assert plan.status is not None
    assert ([one["kind"] for one in plan.apply], plan.status["phase"]) == (["Job"], "Pending")
    value = after(value, plan)
    plan = checkpoint_plan(value, {"metadata": {}}, [], NOW)
    assert plan.status is not None
    assert (plan.apply, plan.status["phase"], plan.status["conditions"][0]["type"]) == ((), "Creating", "JobCreated")
    plan = checkpoint_plan(after(value, plan), ended("Complete"), [], NOW)
    assert plan.status is not None
    assert (plan.status["phase"], plan.status["createdAt"]) == ("Ready", NOW)
    assert [one.reason for one in plan.events] == ["CheckpointReady"]
    final = after(value, plan)
    again = checkpoint_plan(final, None, [], "later")  # The job is removed after its time.
    assert (again.apply, again.events, again.status) == ((), (), plan.status)


@pytest.mark.parametrize(
    "job", [ended("Failed"), ended("Complete", annotations={"nvidia.com/snapshot-checkpoint-status": "failed"})]
)
def test_a_failed_job_or_capture_fails_the_checkpoint(job: KubeObject) -> None:
    plan = checkpoint_plan(checkpoint(), job, [], NOW)
    assert plan.status is not None and plan.status["phase"] == "Failed"
    assert [one.reason for one in plan.events] == ["CheckpointFailed"]


def test_checkpoint_job_deleted_before_its_end_is_recreated() -> None:
    value = checkpoint()
    value = after(value, checkpoint_plan(value, {"metadata": {}}, [], NOW))
    plan = checkpoint_plan(value, None, [], NOW)
    assert plan.status is not None
    assert (len(plan.apply), plan.status["phase"]) == (1, "Pending")


def test_newer_checkpoint_with_an_existing_identity_fails() -> None:
    old, young = checkpoint(name="z", created="1"), checkpoint(name="a", created="2")
    both = [old, young, checkpoint({"dtype": "fp8"}, name="other", created="0")]
    assert (checkpoint_plan(old, None, both, NOW).status or {})["phase"] == "Pending"
    failed = checkpoint_plan(young, None, both, NOW)
    assert failed.status is not None and failed.apply == ()
    assert failed.status["message"].endswith("is already owned by z")


@pytest.mark.parametrize("job", [None, {"metadata": {}}, ended("Complete"), ended("Failed")])
@pytest.mark.parametrize("phase", [None, "Pending", "Creating", "Ready", "Failed"])
def test_repeated_checkpoint_reconciliation_changes_nothing(phase: str | None, job: KubeObject | None) -> None:
    value = checkpoint()
    plan = checkpoint_plan(value, {"metadata": {}}, [], NOW)
    assert plan.status is not None
    value = after(value, Plan(status=plan.status | ({"phase": phase} if phase else {})))
    first = checkpoint_plan(value, job, [], NOW)
    job = first.apply[0] if first.apply else job
    settled = checkpoint_plan(after(value, first), job, [], "later")
    second = checkpoint_plan(after(value, settled), job, [], "even later")
    assert (second.apply, second.events, second.status) == ((), (), settled.status)


def test_job_name_contains_the_artifact_version() -> None:
    value = checkpoint()
    value.metadata.annotations["nvidia.com/snapshot-artifact-version"] = "3"
    assert job_name(value).endswith("-3")
