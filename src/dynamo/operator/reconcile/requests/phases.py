"""Phases of a request: Pending, Profiling, then Ready, or Deploying and Deployed; Failed from each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

import msgspec
import yaml

from dynamo.operator.reconcile.plan import ObjectPatch, ObjectRef, Plan
from dynamo.operator.reconcile.requests.draft import (
    DEPLOYMENT_READY,
    PROFILING,
    SPEC_GENERATED,
    SUCCEEDED,
    VALIDATION,
    StatusDraft,
)
from dynamo.operator.reconcile.requests.hardware import HardwareUnknown, with_discovered
from dynamo.operator.reconcile.requests.job import (
    PROFILER,
    CannotProfile,
    RequestSettings,
    is_tracked,
    profiled_spec,
    profiling_access,
    profiling_job,
    profiling_job_name,
)
from dynamo.operator.reconcile.requests.result import (
    FINAL_CONFIG,
    REPORTED_STATUS,
    NoGraph,
    final_objects,
    own_output,
    reported_error,
)
from dynamo.operator.validation.requests import is_graph
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject
from dynamo.protocols.kubernetes.v1beta1 import (
    DeploymentInfo,
    DynamoGraphDeploymentRequest,
    ProfilingPhase,
    ProfilingResults,
    RequestSpec,
)

FROZEN = frozenset({"Profiling", "Ready", "Deploying", "Deployed"})
"""Phases in which the specification does not change any more."""
GENERATED_SPEC = "nvidia.com/generated-dgd-spec"
"""Annotation with the generated graph in YAML, for a user who applies it."""
MAX_ANNOTATION = 250_000
PULL_FAILURES = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName"})
RESULT_GRACE_S = 60.0
"""Time after the end of a job in which its result is waited for: it may be observed later than the job's end."""
RESULT_RETRY_S = 5.0
LOOK_S = 30.0
"""Interval in which the pods of a graph are looked at that does not become ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRequest:
    """State of the cluster that concerns one request."""

    job: KubeObject | None = None
    """Job of name `profiling_job_name`."""
    pods: Sequence[KubeObject] = ()
    """Pods of the job."""
    output: KubeObject | None = None
    """ConfigMap of name `output_name`."""
    graph: KubeObject | None = None
    """Graph of name `status.dgdName`, in version v1beta1."""
    graph_pods: Sequence[KubeObject] = ()
    """Pods of the graph, while it is not ready."""
    config_maps: Sequence[KubeObject] = ()
    """ConfigMaps with the labels of the request, without the output."""
    nodes: Sequence[KubeObject] | None = None
    """Nodes of the cluster; None if they may not be read."""
    has_model_cache: bool = True
    """Whether the claim of `spec.modelCache` exists."""


def needs_job(request: DynamoGraphDeploymentRequest, job: KubeObject | None) -> bool:
    """Return whether a pass makes the profiling job, for which it needs the nodes and the model cache."""
    phase = request.status and request.status.phase
    return phase in (None, "Pending", "Profiling") and _own_job(request, job) is None


def request_plan(
    request: DynamoGraphDeploymentRequest, observed: ObservedRequest, settings: RequestSettings, now: str
) -> Plan:
    """Return what a request requires next, and its status. `now` is a timestamp of RFC 3339."""
    draft = StatusDraft.of(request, now)
    phase = draft.status.phase or "Pending"
    _reject_change(request, draft)
    if phase == "Pending":
        return _pending(request, observed, settings, draft)
    if phase == "Profiling":
        return _profiling(request, observed, settings, draft)
    if phase in ("Deploying", "Deployed"):
        return _deploying(request, observed, draft)
    return draft.plan()  # Ready and Failed: the rest is the user's.


def _reject_change(request: DynamoGraphDeploymentRequest, draft: StatusDraft) -> None:
    """Note once that a changed specification has no effect."""
    status, generation = draft.status, request.metadata.generation
    if status.phase not in FROZEN or not status.observed_generation or status.observed_generation == generation:
        return
    known = draft.condition(VALIDATION)
    if known is not None and known.reason == "SpecChangeRejected" and known.observed_generation == generation:
        return
    text = (
        f"Cannot modify spec in phase '{status.phase}'. DynamoGraphDeploymentRequest is immutable once profiling starts. "
        "Create a new resource with a different name instead."
    )
    draft.set(VALIDATION, False, "SpecChangeRejected", text)
    changed = draft.condition(VALIDATION)
    if changed is not None:
        changed.observed_generation = generation
    draft.note("Warning", "SpecChangeRejected", text)


def _pending(
    request: DynamoGraphDeploymentRequest, observed: ObservedRequest, settings: RequestSettings, draft: StatusDraft
) -> Plan:
    """Start profiling. A job that exists was made by a pass whose status was not written."""
    if not draft.status.observed_generation:
        draft.note("Normal", "Initialized", "DGDR initialized successfully")
    draft.status.observed_generation = request.metadata.generation
    job = _own_job(request, observed.job)
    profiled = profiled_spec(job)
    if profiled is not None:
        draft.status.observed_generation = profiled[1]
    create: list[KubeObject] = []
    apply: list[KubeObject] = []
    if job is None:
        problems = _problems(request.spec, observed)
        try:
            hardware = with_discovered(request.spec.hardware, observed.nodes)
        except HardwareUnknown as error:
            problems.append(str(error))
        if problems:
            draft.fail(VALIDATION, "ValidationFailed", "; ".join(problems), event="ValidationFailed")
            return draft.plan()
        try:
            apply = [profiling_job(request, hardware, settings)]
        except CannotProfile as error:
            return _no_job(draft, str(error))
        create = profiling_access(request.metadata.namespace)
    draft.set(VALIDATION, True, "ValidationPassed", "Spec is valid")
    draft.enter("Profiling")
    draft.status.profiling_job_name = profiling_job_name(request.metadata.name)
    draft.status.profiling_phase = "Initializing"
    draft.set(PROFILING, False, "Initializing", "Profiling job created, entering initialization phase")
    draft.note("Normal", "ProfilingJobCreated", "Profiling job created")
    return draft.plan(create, apply=apply, if_rejected=lambda error: _no_job(draft, error))


def _no_job(draft: StatusDraft, error: str) -> Plan:
    draft.events = [one for one in draft.events if one.reason != "ProfilingJobCreated"]
    draft.status.profiling_job_name = draft.status.profiling_phase = None
    draft.fail(PROFILING, "JobCreationFailed", error, event="ProfilingJobFailed")
    return draft.plan()


def _problems(spec: RequestSpec, observed: ObservedRequest) -> list[str]:
    problems = []
    if spec.search_strategy == "thorough" and (spec.backend or "auto") == "auto":
        problems.append(
            "spec.backend: auto cannot be used with spec.searchStrategy thorough: set sglang, trtllm or vllm"
        )
    override = spec.overrides and spec.overrides.dgd
    if override and not is_graph(override):  # Otherwise found only after hours of profiling.
        problems.append("spec.overrides.dgd: must be a DynamoGraphDeployment of a known version")
    if spec.model_cache is not None and spec.model_cache.pvc_name and not observed.has_model_cache:
        problems.append(f"spec.modelCache.pvcName: claim {spec.model_cache.pvc_name!r} does not exist")
    return problems


def _profiling(
    request: DynamoGraphDeploymentRequest, observed: ObservedRequest, settings: RequestSettings, draft: StatusDraft
) -> Plan:
    job, output = _own_job(request, observed.job), own_output(request, observed.output)
    ended = _ended(job)
    has_result = FINAL_CONFIG in output and (job is None or "Complete" in ended)
    _relay(output.get("phase", ""), output.get("message", ""), draft)
    profiled = profiled_spec(job, observed.output if output else None)
    if ended and output.get(REPORTED_STATUS) == "failed":
        return _failed_profiling(f"profiling failed: {reported_error(output)}", draft)
    if has_result:
        return _generated(request, request.spec if profiled is None else profiled[0], output[FINAL_CONFIG], draft)
    if job is None:
        return _job_again(request, profiled, observed, settings, draft)
    if "Failed" in ended:
        details = "; ".join(one for one in (_details(observed.pods), reported_error(output)) if one)
        text = f"profiling job failed: {ended['Failed'].get('message') or 'unknown reason'}"
        return _failed_profiling(text + (f". Details: {details}" if details else ""), draft)
    if "Complete" in ended:
        if _age_s(ended["Complete"].get("lastTransitionTime"), draft.now) <= RESULT_GRACE_S:
            return draft.plan(requeue_s=RESULT_RETRY_S)
        return _no_graph(f"the profiling job ended without {FINAL_CONFIG} in its output", draft)
    failure = pull_failure(observed.pods)
    if failure:
        known = draft.condition(PROFILING)
        if known is None or known.reason != "ImagePullFailed":
            draft.note("Warning", "ImagePullFailed", failure)
        draft.set(PROFILING, False, "ImagePullFailed", failure)
    return draft.plan()


def _failed_profiling(text: str, draft: StatusDraft) -> Plan:
    draft.fail(PROFILING, f"{draft.status.profiling_phase or 'Profiling'}Failed", text, event="ProfilingJobFailed")
    return draft.plan()


def _job_again(
    request: DynamoGraphDeploymentRequest,
    profiled: tuple[RequestSpec, int] | None,
    observed: ObservedRequest,
    settings: RequestSettings,
    draft: StatusDraft,
) -> Plan:
    """Make a job that was deleted before it had a result, for the specification with which profiling started."""
    metadata, began = request.metadata, draft.status.observed_generation
    if profiled is not None:
        metadata = msgspec.structs.replace(metadata, generation=profiled[1])
        request = msgspec.structs.replace(request, spec=profiled[0], metadata=metadata)
    elif began and began != metadata.generation:
        text = "the profiling job was deleted, and the spec has changed since profiling started: create another request"
        draft.fail(PROFILING, "JobCreationFailed", text, event="ProfilingJobFailed")
        return draft.plan()
    try:
        job = profiling_job(request, with_discovered(request.spec.hardware, observed.nodes), settings)
    except (CannotProfile, HardwareUnknown) as error:
        draft.fail(PROFILING, "JobCreationFailed", str(error), event="ProfilingJobFailed")
        return draft.plan()
    return draft.plan(profiling_access(request.metadata.namespace), apply=[job])


def _relay(phase: str, message: str, draft: StatusDraft) -> None:
    """Copy the profiler's phase, which its sidecar publishes, into the status."""
    known = next((one for one in get_args(ProfilingPhase) if one == phase), None)
    condition = draft.condition(PROFILING)
    is_stuck = condition is not None and condition.reason == "ImagePullFailed"
    if known is None or (is_stuck and known == draft.status.profiling_phase):
        return
    draft.status.profiling_phase = known
    reason = "Completed" if known == "Done" else known
    draft.set(PROFILING, False, reason, message)
    draft.set(SUCCEEDED, False, reason, message)


def _generated(request: DynamoGraphDeploymentRequest, spec: RequestSpec, text: str, draft: StatusDraft) -> Plan:
    try:
        found = final_objects(request, spec, text)
    except NoGraph as error:
        return _no_graph(str(error), draft)
    status = draft.status
    status.profiling_phase = None
    status.dgd_name = found.graph["metadata"]["name"]
    status.profiling_results = ProfilingResults(selected_config=found.graph)
    draft.set(PROFILING, True, "ProfilingCompleted", "Profiling job completed successfully")
    is_applied = spec.auto_apply is None or spec.auto_apply
    text = "DynamoGraphDeployment spec generated successfully"
    draft.note("Normal", "SpecGenerated", text)
    annotations: dict[str, str | None] = {}
    if not is_applied:
        document = yaml.safe_dump(found.graph, sort_keys=False)
        if len(document) <= MAX_ANNOTATION:
            annotations[GENERATED_SPEC] = document
            text = f"Generated spec is available in annotation {GENERATED_SPEC}"
        else:
            text = "Generated spec is available in status.profilingResults.selectedConfig"
    draft.set(SPEC_GENERATED, True, "SpecGenerated", text)
    draft.enter("Deploying" if is_applied else "Ready")
    create = [*found.others, found.graph] if is_applied else found.others
    return draft.plan(create, annotations=annotations, if_rejected=lambda error: _rejected(draft, error))


def _rejected(draft: StatusDraft, error: str) -> Plan:
    """Fail because the API server rejects the generated graph, which stays in the status."""
    draft.events = [one for one in draft.events if one.reason == "SpecGenerated"]
    draft.fail(DEPLOYMENT_READY, "DeploymentRejected", error, event="DeploymentCreationFailed")
    return draft.plan()


def _no_graph(text: str, draft: StatusDraft) -> Plan:
    draft.status.profiling_phase = None
    draft.fail(SPEC_GENERATED, "GenerationFailed", text, event="GenerationFailed")
    return draft.plan()


def _deploying(request: DynamoGraphDeploymentRequest, observed: ObservedRequest, draft: StatusDraft) -> Plan:
    """Follow the graph. It was deleted if it is absent and was observed once, which the condition keeps."""
    status, graph, known = draft.status, observed.graph, draft.condition(DEPLOYMENT_READY)
    name = status.dgd_name or "the generated graph"
    if graph is None:
        selected = status.profiling_results and status.profiling_results.selected_config
        if known is None and selected:
            return draft.plan([selected], if_rejected=lambda error: _rejected(draft, error))
        text = f"DGD {name} was deleted. DGDR will not recreate it. Delete this DGDR and create a new one to redeploy."
        status.dgd_name = status.deployment_info = None
        draft.fail(DEPLOYMENT_READY, "DeploymentDeleted", text, event="DeploymentDeleted")
        return draft.plan()
    if known is None:
        if not is_tracked(request, graph):
            text = f"DynamoGraphDeployment {name} exists and is not of this request: delete it, or set another name"
            draft.fail(DEPLOYMENT_READY, "NameConflict", text, event="DeploymentCreationFailed")
            return draft.plan()
        draft.note("Normal", "DeploymentCreated", f"DynamoGraphDeployment {name} created successfully")
    reported = graph.get("status") or {}
    state = reported.get("state") or "initializing"
    components = (reported.get("components") or {}).values()
    status.deployment_info = DeploymentInfo(
        replicas=sum(one.get("replicas") or 0 for one in components),
        available_replicas=sum(one.get("availableReplicas") or 0 for one in components),
    )
    adopted = _adopted(observed.config_maps, graph)
    if state == "successful":
        text = f"DynamoGraphDeployment {name} is ready"
        if status.phase != "Deployed":
            draft.note("Normal", "DeploymentReady", text)
        draft.enter("Deployed")
        draft.set(DEPLOYMENT_READY, True, "DeploymentReady", text)
        return draft.plan(patch=adopted)
    if status.phase == "Deployed":
        text = f"DynamoGraphDeployment {name} degraded from Ready to {state}"
        draft.note("Warning", "DeploymentDegraded", text)
        draft.set(DEPLOYMENT_READY, False, "DeploymentDegraded", f"Deployment degraded to {state}")
    elif known is None or known.reason != "DeploymentDegraded":
        draft.set(DEPLOYMENT_READY, False, "DeploymentInProgress", f"DGD {name} is in {state} state")
    failure = pull_failure(observed.graph_pods)
    if failure:
        draft.note("Warning", "ImagePullFailed", failure)
    draft.enter("Deploying")
    return draft.plan(patch=adopted, requeue_s=LOOK_S)


def _adopted(config_maps: Sequence[KubeObject], graph: KubeObject) -> list[ObjectPatch]:
    """Return the changes by which the profiler's ConfigMaps, which no object owns, end with the graph."""
    patches = []
    for one in config_maps:
        metadata = one["metadata"]
        if metadata.get("ownerReferences"):
            continue
        owner = {"apiVersion": V1BETA1, "kind": "DynamoGraphDeployment", "controller": True, "blockOwnerDeletion": True}
        owner |= {name: graph["metadata"][name] for name in ("name", "uid")}
        ref = ObjectRef("v1", "ConfigMap", metadata["namespace"], metadata["name"])
        patches.append(ObjectPatch(ref, {"metadata": {"ownerReferences": [owner]}}))
    return patches


def _own_job(request: DynamoGraphDeploymentRequest, job: KubeObject | None) -> KubeObject | None:
    """Return the job unless it is that of an earlier request of the same name."""
    owners = [] if job is None else job["metadata"].get("ownerReferences") or []
    is_other = owners and request.metadata.uid and all(one.get("uid") != request.metadata.uid for one in owners)
    return None if is_other else job


def _ended(job: KubeObject | None) -> dict[str, KubeObject]:
    conditions = [] if job is None else (job.get("status") or {}).get("conditions") or []
    return {one["type"]: one for one in conditions if one.get("status") == "True"}


def _details(pods: Sequence[KubeObject]) -> str:
    """Return why the profiler's container ended, of the first pod that has failed."""
    for pod in pods:
        for one in _states(pod):
            ended = (one.get("state") or {}).get("terminated")
            if one.get("name") == PROFILER and ended and ended.get("exitCode"):
                text = f"pod {pod['metadata']['name']}: exit code {ended['exitCode']}, {ended.get('reason') or 'Error'}"
                return f"{text}, {ended['message']}" if ended.get("message") else text
    return ""


def pull_failure(pods: Sequence[KubeObject]) -> str:
    """Return which image of the first pod that waits for one cannot be pulled; empty if there is none."""
    for pod in pods:
        for one in _states(pod):
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in PULL_FAILURES:
                image = one.get("image") or f"of {one['name']}"
                return f"pod {pod['metadata']['name']}: image {image} cannot be pulled: {waiting['reason']}"
    return ""


def _states(pod: KubeObject) -> list[KubeObject]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _age_s(then: str | None, now: str) -> float:
    """Return the seconds between two timestamps; 0 if the first is missing."""
    return (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds() if then else 0.0
