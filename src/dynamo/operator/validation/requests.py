"""Rules of deployment requests, scaling adapters, models and checkpoints."""

from dynamo.operator.validation.facts import Findings, part, spec_of
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1, KubeObject

MODEL_SCHEMES = ("s3://", "hf://")
EDITABLE_PHASES = frozenset({"", "Initializing", "Pending"})
"""States of a request in which profiling has not started."""
TARGETS = ("isl", "osl", "ttft", "itl")
MAX_REQUEST_NAME = 63 - len("profile-")
"""The name of a request's job is a label of its pods."""
JOB_FIELDS = (
    "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "completions", "parallelism", "suspend",
)  # fmt: skip
POD_FIELDS = (
    "tolerations", "nodeSelector", "affinity", "priorityClassName", "serviceAccountName", "runtimeClassName",
    "dnsPolicy", "dnsConfig", "terminationGracePeriodSeconds", "topologySpreadConstraints",
    "automountServiceAccountToken",
)  # fmt: skip
MERGED_POD_FIELDS = ("securityContext", "volumes", "initContainers", "imagePullSecrets", "containers")
"""Fields of `overrides.profilingJob` that take effect: of the job, and of its pods."""


def check_request(value: KubeObject, found: Findings, *, is_alpha: bool) -> None:
    """Check a DynamoGraphDeploymentRequest by itself."""
    spec = spec_of(value)
    if not spec.get("model"):
        found.refuse("spec.model", "is required")
    name = part(value, "metadata").get("name") or ""
    if len(name) > MAX_REQUEST_NAME:
        found.refuse("metadata.name", f"must have at most {MAX_REQUEST_NAME} characters: it has {len(name)}")
    if is_alpha:
        _check_alpha_request(spec, found)
        return
    sla = part(spec, "sla")
    if sla.get("e2eLatency") is not None and (sla.get("ttft") is not None or sla.get("itl") is not None):
        found.refuse("spec.sla", "e2eLatency and ttft or itl are mutually exclusive")
    for name in ("ttft", "itl", "e2eLatency"):
        _check_positive(f"spec.sla.{name}", sla.get(name), found)
    load = part(spec, "workload")
    for name in ("isl", "osl", "concurrency", "requestRate"):
        _check_positive(f"spec.workload.{name}", load.get(name), found)
    if load.get("concurrency") is not None and load.get("requestRate") is not None:
        found.refuse("spec.workload", "concurrency and requestRate are mutually exclusive")
    cache = part(spec, "modelCache")
    if cache and not cache.get("pvcName"):
        found.refuse("spec.modelCache.pvcName", "is required")
    if spec.get("searchStrategy") == "thorough" and spec.get("backend", "auto") == "auto":
        found.warn("spec.backend", "auto fails with searchStrategy thorough: set sglang, trtllm or vllm")
    _check_overrides(part(spec, "overrides"), found)
    if part(spec, "features", "mocker").get("enabled") and part(spec, "features").get("planner") is None:
        found.warn("spec.features.mocker", "simulated workers are deployed; no model is served")


def _check_overrides(overrides: KubeObject, found: Findings) -> None:
    path, graph = "spec.overrides", part(overrides, "dgd")
    if graph and not is_graph(graph):
        what = f"{graph.get('apiVersion')} {graph.get('kind')}"
        found.refuse(f"{path}.dgd", f"{what!r} must be a DynamoGraphDeployment of {V1BETA1} or {V1ALPHA1}")
    job = part(overrides, "profilingJob")
    for name in sorted(set(job) - {*JOB_FIELDS, "template"}):
        found.warn(f"{path}.profilingJob.{name}", "has no effect")
    for name in sorted(set(part(job, "template", "spec")) - {*POD_FIELDS, *MERGED_POD_FIELDS}):
        found.warn(f"{path}.profilingJob.template.spec.{name}", "has no effect")


def is_graph(value: KubeObject) -> bool:
    """Return whether an object, perhaps a partial one, is a graph of a known version."""
    return value.get("kind") == "DynamoGraphDeployment" and value.get("apiVersion") in (V1ALPHA1, V1BETA1)


def _check_alpha_request(spec: KubeObject, found: Findings) -> None:
    config = part(spec, "profilingConfig", "config")
    path = "spec.profilingConfig.config"
    for name in TARGETS:
        _check_positive(f"{path}.sla.{name}", part(config, "sla").get(name), found)
    backend = part(config, "engine").get("backend")
    if backend and backend != spec.get("backend"):
        found.warn(f"{path}.engine.backend", f"{backend} is replaced by spec.backend {spec.get('backend')}")
    model = part(config, "deployment").get("model")
    if model and model != spec.get("model"):
        found.warn(f"{path}.deployment.model", f"{model} is replaced by spec.model {spec.get('model')}")
    low = part(config, "engine").get("minNumGpusPerEngine")
    high = part(config, "engine").get("maxNumGpusPerEngine")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        found.refuse(f"{path}.engine.minNumGpusPerEngine", f"{low} must be at most maxNumGpusPerEngine, {high}")
    if spec.get("enableGpuDiscovery") is not None:
        found.warn("spec.enableGpuDiscovery", "is deprecated and has no effect")


def _check_positive(path: str, value: object, found: Findings) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
        found.refuse(path, f"{value} must be greater than 0")


def check_request_update(new: KubeObject, old: KubeObject, found: Findings, *, is_alpha: bool) -> None:
    """Check a request against the one before it: the spec is fixed when profiling starts."""
    phase = str(part(old, "status").get("state" if is_alpha else "phase") or "")
    if phase not in EDITABLE_PHASES and spec_of(new) != spec_of(old):
        changed = sorted(
            name for name in {**spec_of(new), **spec_of(old)} if spec_of(new).get(name) != spec_of(old).get(name)
        )
        found.refuse(f"spec.{changed[0]}", f"is immutable: the request is {phase}; create another request")


def check_adapter(value: KubeObject, found: Findings, *, is_alpha: bool) -> None:
    """Check a DynamoGraphDeploymentScalingAdapter by itself."""
    spec = spec_of(value)
    reference = part(spec, "dgdRef")
    for name in ("name", "serviceName" if is_alpha else "componentName"):
        if not reference.get(name):
            found.refuse(f"spec.dgdRef.{name}", "is required")
    replicas = spec.get("replicas")
    if isinstance(replicas, int) and replicas < 0:
        found.refuse("spec.replicas", f"{replicas} must be at least 0")


def check_adapter_update(new: KubeObject, old: KubeObject, found: Findings) -> None:
    """Check an adapter against the one before it."""
    if part(new, "spec", "dgdRef") != part(old, "spec", "dgdRef"):
        found.refuse("spec.dgdRef", "is immutable")


def check_model(value: KubeObject, found: Findings) -> None:
    """Check a DynamoModel by itself."""
    spec = spec_of(value)
    for name in ("modelName", "baseModelName"):
        if not spec.get(name):
            found.refuse(f"spec.{name}", "is required")
    if spec.get("modelType") != "lora":
        return
    uri = part(spec, "source").get("uri")
    if not uri:
        found.refuse("spec.source.uri", "is required for modelType lora")
    elif not str(uri).startswith(MODEL_SCHEMES):
        found.refuse("spec.source.uri", f"{uri!r} must begin with {' or '.join(MODEL_SCHEMES)}")


def check_model_update(new: KubeObject, old: KubeObject, found: Findings) -> None:
    """Check a model against the one before it."""
    for name, default in (("modelType", "base"), ("baseModelName", None)):
        if (spec_of(new).get(name) or default) != (spec_of(old).get(name) or default):
            found.refuse(f"spec.{name}", "is immutable")


def check_checkpoint(value: KubeObject, found: Findings) -> None:
    """Check a DynamoCheckpoint by itself."""
    job = part(value, "spec", "job")
    target = job.get("targetContainerName")
    pods = part(job, "podTemplateSpec", "spec").get("containers") or []
    if not pods:
        found.refuse("spec.job.podTemplateSpec.spec.containers", "must have at least one container")
    elif target and target not in {one.get("name") for one in pods if isinstance(one, dict)}:
        found.refuse("spec.job.targetContainerName", f"{target!r} is not a container of podTemplateSpec")
    deadline = job.get("activeDeadlineSeconds")
    _check_positive("spec.job.activeDeadlineSeconds", deadline, found)


def check_checkpoint_update(new: KubeObject, old: KubeObject, found: Findings) -> None:
    """Check a checkpoint against the one before it."""
    if part(new, "spec", "identity") != part(old, "spec", "identity"):
        found.refuse("spec.identity", "is immutable")
