"""Defaults that the API server sets on built-in kinds. Pure, apart from the allocation of service addresses."""

import base64
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes.errors import Object

NO_LIMIT: Object = {"maxSurge": "25%", "maxUnavailable": "25%"}


def fill(item: Object, **values: Any) -> None:
    """Set absent fields, in place."""
    for name, value in values.items():
        if item.get(name) is None:
            item[name] = value


def default_pod_spec(spec: Object) -> None:
    """Set the defaults of a pod specification, in place."""
    fill(spec, restartPolicy="Always", dnsPolicy="ClusterFirst", schedulerName="default-scheduler")
    fill(spec, terminationGracePeriodSeconds=30, securityContext={})
    if spec.get("serviceAccountName"):
        fill(spec, serviceAccount=spec["serviceAccountName"])
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        _default_container(container)
    for volume in spec.get("volumes") or []:
        sources = [name for name in volume if name != "name"]
        if not sources:
            volume["emptyDir"] = {}
        for source in ("configMap", "secret", "projected", "downwardAPI"):
            if isinstance(volume.get(source), dict):
                fill(volume[source], defaultMode=420)
        if isinstance(volume.get("hostPath"), dict):
            fill(volume["hostPath"], type="")


def _default_container(container: Object) -> None:
    image = container.get("image") or ""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    policy = "Always" if (not tag or tag == "latest") and "@" not in image else "IfNotPresent"
    fill(container, imagePullPolicy=policy, terminationMessagePath="/dev/termination-log")
    fill(container, terminationMessagePolicy="File", resources={})
    for port in container.get("ports") or []:
        fill(port, protocol="TCP")
    for variable in container.get("env") or []:
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference:
            fill(reference, apiVersion="v1")
        if variable.get("value") == "":
            del variable["value"]
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if probe:
            fill(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            _default_handler(probe)
    for hook in (container.get("lifecycle") or {}).values():
        _default_handler(hook)
    resources = container["resources"]
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def _default_handler(handler: Object) -> None:
    if handler.get("httpGet"):
        fill(handler["httpGet"], path="/", scheme="HTTP")
    if handler.get("grpc"):
        fill(handler["grpc"], service="")


def _template(spec: Object) -> None:
    template = spec.get("template")
    if isinstance(template, dict):
        fill(template, metadata={})
        if isinstance(template.get("spec"), dict):
            default_pod_spec(template["spec"])


def _pod(item: Object) -> None:
    default_pod_spec(item.setdefault("spec", {}))
    fill(item["spec"], enableServiceLinks=True, preemptionPolicy="PreemptLowerPriority", priority=0)
    fill(item, status={"phase": "Pending", "qosClass": "BestEffort"})


def _deployment(item: Object) -> None:
    spec = item.setdefault("spec", {})
    fill(spec, replicas=1, strategy={}, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    fill(spec["strategy"], type="RollingUpdate")
    if spec["strategy"]["type"] == "RollingUpdate":
        fill(spec["strategy"], rollingUpdate={})
        fill(spec["strategy"]["rollingUpdate"], **NO_LIMIT)
    _template(spec)


def _replica_set(item: Object) -> None:
    spec = item.setdefault("spec", {})
    fill(spec, replicas=1)
    template_labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels")
    if template_labels and not spec.get("selector"):
        fill(spec, selector={"matchLabels": template_labels})
    _template(spec)


def _stateful_set(item: Object) -> None:
    spec = item.setdefault("spec", {})
    fill(spec, replicas=1, podManagementPolicy="OrderedReady", revisionHistoryLimit=10, updateStrategy={})
    fill(spec["updateStrategy"], type="RollingUpdate")
    if spec["updateStrategy"]["type"] == "RollingUpdate":
        fill(spec["updateStrategy"], rollingUpdate={"partition": 0})
    fill(spec, persistentVolumeClaimRetentionPolicy={"whenDeleted": "Retain", "whenScaled": "Retain"})
    _template(spec)


def _daemon_set(item: Object) -> None:
    spec = item.setdefault("spec", {})
    fill(spec, revisionHistoryLimit=10, updateStrategy={})
    fill(spec["updateStrategy"], type="RollingUpdate")
    if spec["updateStrategy"]["type"] == "RollingUpdate":
        fill(spec["updateStrategy"], rollingUpdate={"maxSurge": 0, "maxUnavailable": 1})
    _template(spec)


def _job(item: Object) -> None:
    spec = item.setdefault("spec", {})
    if spec.get("completions") is None and spec.get("parallelism") is None:
        fill(spec, completions=1)
    fill(spec, parallelism=1, backoffLimit=6, completionMode="NonIndexed", suspend=False, manualSelector=False)
    fill(spec, podReplacementPolicy="TerminatingOrFailed")
    if spec["manualSelector"] is False:
        del spec["manualSelector"]
    uid, name = item["metadata"].get("uid"), item["metadata"].get("name")
    template = spec.get("template")
    if uid and not spec.get("selector") and isinstance(template, dict):
        fill(spec, selector={"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        for prefix in ("", "batch.kubernetes.io/"):
            labels.update({f"{prefix}controller-uid": uid, f"{prefix}job-name": name})
    _template(spec)


def _service(item: Object) -> None:
    spec = item.setdefault("spec", {})
    fill(spec, type="ClusterIP", sessionAffinity="None")
    for port in spec.get("ports") or []:
        fill(port, protocol="TCP", targetPort=port.get("port"))
    if spec["type"] != "ExternalName":
        fill(spec, internalTrafficPolicy="Cluster", ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    if spec["type"] in {"NodePort", "LoadBalancer"}:
        fill(spec, externalTrafficPolicy="Cluster")
    if spec["type"] == "LoadBalancer":
        fill(spec, allocateLoadBalancerNodePorts=True)
    fill(item, status={"loadBalancer": {}})


def _secret(item: Object) -> None:
    fill(item, type="Opaque")
    written = item.pop("stringData", None) or {}
    if written:
        encoded = {name: base64.b64encode(value.encode()).decode() for name, value in written.items()}
        item["data"] = {**(item.get("data") or {}), **encoded}


def _claim(item: Object) -> None:
    fill(item.setdefault("spec", {}), volumeMode="Filesystem")
    fill(item, status={"phase": "Pending"})


def _namespace(item: Object) -> None:
    fill(item.setdefault("spec", {}), finalizers=["kubernetes"])
    labels = item["metadata"].setdefault("labels", {})
    labels.setdefault("kubernetes.io/metadata.name", item["metadata"].get("name", ""))
    fill(item, status={"phase": "Active"})


def _binding(item: Object) -> None:
    group = "rbac.authorization.k8s.io"
    fill(item.get("roleRef") or {}, apiGroup=group)
    for subject in item.get("subjects") or []:
        fill(subject, apiGroup="" if subject.get("kind") == "ServiceAccount" else group)
        if not subject["apiGroup"]:
            del subject["apiGroup"]


def _webhooks(item: Object) -> None:
    for hook in item.get("webhooks") or []:
        fill(
            hook,
            failurePolicy="Fail",
            matchPolicy="Equivalent",
            namespaceSelector={},
            objectSelector={},
            timeoutSeconds=10,
        )
        if item.get("kind") == "MutatingWebhookConfiguration":
            fill(hook, reinvocationPolicy="Never")
        service = (hook.get("clientConfig") or {}).get("service")
        if service:
            fill(service, port=443)
        for rule in hook.get("rules") or []:
            fill(rule, scope="*")


def _slice(item: Object) -> None:
    for port in item.get("ports") or []:
        fill(port, name="", protocol="TCP")


def _autoscaler(item: Object) -> None:
    fill(item.setdefault("spec", {}), minReplicas=1)


DEFAULTS: dict[str, Callable[[Object], None]] = {
    "Pod": _pod, "Deployment": _deployment, "ReplicaSet": _replica_set, "StatefulSet": _stateful_set,
    "DaemonSet": _daemon_set, "Job": _job,
    "Service": _service, "Secret": _secret, "PersistentVolumeClaim": _claim, "Namespace": _namespace,
    "RoleBinding": _binding, "ClusterRoleBinding": _binding, "MutatingWebhookConfiguration": _webhooks,
    "ValidatingWebhookConfiguration": _webhooks, "EndpointSlice": _slice, "HorizontalPodAutoscaler": _autoscaler,
}  # fmt: skip


def apply_defaults(item: Object) -> None:
    """Set the defaults of a built-in kind, in place."""
    found = DEFAULTS.get(item["kind"])
    if found:
        found(item)
