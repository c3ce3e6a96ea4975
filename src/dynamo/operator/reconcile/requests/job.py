"""Profiling job of a request, the account under which it runs, and the changes of `overrides.profilingJob`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.operator.conversion.convert import annotation_key
from dynamo.operator.reconcile.names import MANAGED_BY, OPERATOR, OperatorSettings
from dynamo.operator.reconcile.requests.copier import OUTPUT_PATH, OUTPUT_VOLUME, copier_container, give_account
from dynamo.operator.validation.requests import JOB_FIELDS, MAX_REQUEST_NAME, POD_FIELDS
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest, RequestSpec

REQUEST_NAME, REQUEST_NAMESPACE = "dgdr.nvidia.com/name", "dgdr.nvidia.com/namespace"
APP, PROFILER_APP, REQUEST_LABEL = "app", "dynamo-profiler", "dgdr"
PROTECTED_LABELS = frozenset({APP, REQUEST_LABEL, REQUEST_NAME, REQUEST_NAMESPACE, MANAGED_BY})
REQUEST_SPEC, REQUEST_GENERATION = "dgdr.nvidia.com/spec", "dgdr.nvidia.com/generation"
"""Annotations of the job and its output: the specification that is profiled, whatever the request is changed to."""
ACCOUNT = "dgdr-profiling-job"
PROFILER = "profiler"
CACHE_VOLUME, CACHE_PATH = "model-cache", "/opt/model-cache"
CONFIG_VOLUME, CONFIG_PATH, CONFIG_KEY = "profiling-config", "/config", "disagg.yaml"
USER_ID = 1000
RBAC = "rbac.authorization.k8s.io"
RULES = [
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamographdeployments", "dynamographdeployments/status"],
        "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
    },
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamocomponentdeployments", "dynamographdeploymentrequests"],
        "verbs": ["get", "list", "watch"],
    },
    {"apiGroups": [""], "resources": ["pods", "pods/log", "services", "events"], "verbs": ["get", "list", "watch"]},
    {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "verbs": ["get", "list", "create", "update", "patch", "delete"],
    },
]


class CannotProfile(ValueError):
    """A profiling job cannot be made; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Images and services that profiling jobs use."""

    profiler_image: str = ""
    """Image of requests that have none."""
    copier_image: str = ""
    """Image with Python and PyYAML that publishes the profiler's output; default: that of the profiler."""
    pull_secrets: Sequence[str] = ("nvcr-imagepullsecret",)
    operator: OperatorSettings = field(default_factory=OperatorSettings)


def profiling_job_name(request: str) -> str:
    """Return the name of a request's profiling job."""
    return f"profile-{request}"


def output_name(request: str) -> str:
    """Return the name of the ConfigMap with the profiler's progress and result."""
    return f"dgdr-output-{request}"


def tracking_labels(request: DynamoGraphDeploymentRequest) -> dict[str, str]:
    """Return the labels of what a request makes and does not own."""
    metadata = request.metadata
    return {REQUEST_NAME: metadata.name, REQUEST_NAMESPACE: metadata.namespace, MANAGED_BY: OPERATOR}


def is_tracked(request: DynamoGraphDeploymentRequest, value: KubeObject) -> bool:
    """Return whether an object was made for a request, or for an earlier one of its name."""
    return tracking_labels(request).items() <= (value["metadata"].get("labels") or {}).items()


def profiling_access(namespace: str) -> list[KubeObject]:
    """Return the account of the profiling jobs of a namespace with its role: all requests share it and none owns it."""
    metadata = {"name": ACCOUNT, "namespace": namespace, "labels": {MANAGED_BY: OPERATOR}}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": RULES},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": ACCOUNT},
        },
    ]


def profiling_job(request: DynamoGraphDeploymentRequest, hardware: KubeObject, settings: RequestSettings) -> KubeObject:
    """Return the profiling job of a request with known hardware. Raise `CannotProfile` if none can be made."""
    metadata = request.metadata
    name = profiling_job_name(metadata.name)
    if len(metadata.name) > MAX_REQUEST_NAME:
        raise CannotProfile(f"metadata.name: {metadata.name!r} must have at most {MAX_REQUEST_NAME} characters")
    image = request.spec.image or settings.profiler_image
    if not image:
        raise CannotProfile("spec.image: is required: no default profiler image is configured")
    annotations = {
        REQUEST_SPEC: msgspec.json.encode(request.spec, order="deterministic").decode(),
        REQUEST_GENERATION: str(metadata.generation),
    }
    pod: KubeObject = {
        "serviceAccountName": ACCOUNT,
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID},
        "containers": [_profiler(request, hardware, image, settings), _copier(request, annotations)],
        "volumes": [{"name": OUTPUT_VOLUME, "emptyDir": {}}],
        "imagePullSecrets": [{"name": one} for one in settings.pull_secrets],
    }
    _add_claims(request, pod)
    labels = {APP: PROFILER_APP, REQUEST_LABEL: metadata.name, MANAGED_BY: OPERATOR}
    # A failed profiling is not repeated: its causes rarely pass, and it uses GPUs for hours.
    job: KubeObject = {"backoffLimit": 0, "template": {"metadata": {"labels": dict(labels)}, "spec": pod}}
    override = (request.spec.overrides and request.spec.overrides.profiling_job) or {}
    apply_job_overrides(job, override)
    profiler, copier = pod["containers"]
    copier["image"] = settings.copier_image or profiler["image"]
    give_account(pod)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": metadata.namespace, "labels": labels, "annotations": annotations},
        "spec": job,
    }


def profiled_spec(*values: KubeObject | None) -> tuple[RequestSpec, int] | None:
    """Return the specification that is profiled and its generation, from a job or its output that has them, or None."""
    found = (_profiled(one["metadata"].get("annotations") or {}) for one in values if one is not None)
    return next((one for one in found if one is not None), None)


def _profiled(annotations: Mapping[str, str]) -> tuple[RequestSpec, int] | None:
    try:
        spec = msgspec.json.decode(annotations.get(REQUEST_SPEC, ""), type=RequestSpec)
        return spec, int(annotations.get(REQUEST_GENERATION, ""))
    except ValueError:  # The errors of msgspec are such.
        return None


def alpha_profiling(request: DynamoGraphDeploymentRequest, section: str) -> KubeObject:
    """Return a section of a v1alpha1 specification which v1beta1 lacks; it is kept in an annotation."""
    text = request.metadata.annotations.get(annotation_key("dgdr", "spec"), "null")
    try:
        kept = msgspec.json.decode(text)
    except msgspec.DecodeError:  # The annotation is the user's to edit.
        return {}
    found = kept.get(section) if isinstance(kept, dict) else None
    return found if isinstance(found, dict) else {}


def apply_job_overrides(job: KubeObject, override: Mapping[str, Any]) -> None:
    """Merge `overrides.profilingJob` into the specification of a job: the fields that upstream allows, no others."""
    _replace(job, override, JOB_FIELDS)
    template, given = job["template"], override.get("template") or {}
    metadata = given.get("metadata") or {}
    labels = {name: value for name, value in (metadata.get("labels") or {}).items() if name not in PROTECTED_LABELS}
    template["metadata"]["labels"] = {**labels, **template["metadata"]["labels"]}
    if metadata.get("annotations"):
        template["metadata"]["annotations"] = dict(metadata["annotations"])
    pod, spec = template["spec"], given.get("spec") or {}
    _replace(pod, spec, POD_FIELDS)
    pod["securityContext"] |= spec.get("securityContext") or {}
    for name in ("volumes", "initContainers"):
        if spec.get(name):
            pod[name] = named_items(pod.get(name) or [], spec[name])
    known = {one["name"] for one in pod["imagePullSecrets"]}
    pod["imagePullSecrets"] += [one for one in spec.get("imagePullSecrets") or () if one.get("name") not in known]
    if spec.get("containers"):
        _override_container(pod["containers"][0], spec["containers"][0])


def named_items(base: Sequence[KubeObject], given: Sequence[KubeObject]) -> list[KubeObject]:
    """Return a list of named objects with those given: they replace others of their name, or follow."""
    found = {one["name"]: one for one in base}
    for one in given:
        found[one.get("name", "")] = copy.deepcopy(one)
    return list(found.values())


def _override_container(container: KubeObject, given: KubeObject) -> None:
    _replace(container, given, ("image", "resources", "securityContext"))
    for name in ("env", "volumeMounts"):
        if given.get(name):
            container[name] = named_items(container[name], given[name])
    if given.get("envFrom"):
        container["envFrom"] = list(given["envFrom"])


def _replace(target: KubeObject, given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if given.get(name) not in (None, "", [], {}):
            target[name] = copy.deepcopy(given[name])


def _profiler(
    request: DynamoGraphDeploymentRequest, hardware: KubeObject, image: str, settings: RequestSettings
) -> KubeObject:
    spec = {**encode(request.spec), "hardware": hardware, "image": image}
    if "overrides" in spec:  # The operator applies these itself: released profilers need a tool of theirs for it.
        spec["overrides"] = {name: value for name, value in spec["overrides"].items() if name != "dgd"}
    text = msgspec.json.encode(spec, order="deterministic").decode()
    operator = settings.operator
    values = {
        "DGDR_NAME": request.metadata.name,
        "DGDR_NAMESPACE": request.metadata.namespace,
        "DGDR_UID": request.metadata.uid,
        "NATS_SERVER": operator.nats_address,
        "ETCD_ENDPOINTS": operator.etcd_endpoints,
        "MODEL_EXPRESS_URL": operator.model_express_url,
        "PROMETHEUS_ENDPOINT": operator.prometheus_endpoint,
    }
    token = {"secretKeyRef": {"name": "hf-token-secret", "key": "HF_TOKEN", "optional": True}}
    env: list[KubeObject] = [{"name": "HUGGING_FACE_HUB_TOKEN", "valueFrom": token}]
    env += [{"name": name, "value": value} for name, value in values.items() if value]
    return {
        "name": PROFILER,
        "image": image,
        "command": ["python3", "-m", "dynamo.profiler"],
        "args": ["--config", text, "--output-dir", OUTPUT_PATH],
        "env": env,
        "workingDir": "/workspace",
        "volumeMounts": [{"name": OUTPUT_VOLUME, "mountPath": OUTPUT_PATH}],
    }


def _copier(request: DynamoGraphDeploymentRequest, annotations: Mapping[str, str]) -> KubeObject:
    metadata = request.metadata
    owner = {
        "apiVersion": V1BETA1,
        "kind": "DynamoGraphDeploymentRequest",
        "name": metadata.name,
        "uid": metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    output = {"labels": tracking_labels(request), "annotations": annotations, "ownerReferences": [owner]}
    return copier_container(output_name(metadata.name), metadata.namespace, output)


def _add_claims(request: DynamoGraphDeploymentRequest, pod: KubeObject) -> None:
    profiler, cache = pod["containers"][0], request.spec.model_cache
    if cache is not None and cache.pvc_name:
        claim = {"claimName": cache.pvc_name, "readOnly": True}
        pod["volumes"].append({"name": CACHE_VOLUME, "persistentVolumeClaim": claim})
        path = cache.pvc_mount_path or CACHE_PATH
        profiler["volumeMounts"].append({"name": CACHE_VOLUME, "mountPath": path, "readOnly": True})
    alpha = alpha_profiling(request, "profilingConfig")
    if alpha.get("outputPVC"):
        pod["volumes"][0] = {"name": OUTPUT_VOLUME, "persistentVolumeClaim": {"claimName": alpha["outputPVC"]}}
    base = alpha.get("configMapRef") or {}
    if base.get("name"):
        items = [{"key": base.get("key") or CONFIG_KEY, "path": CONFIG_KEY}]
        pod["volumes"].append({"name": CONFIG_VOLUME, "configMap": {"name": base["name"], "items": items}})
        profiler["volumeMounts"].append({"name": CONFIG_VOLUME, "mountPath": CONFIG_PATH, "readOnly": True})
