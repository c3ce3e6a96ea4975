"""KV transfer policy of a graph: variables and files from which its workers read their topology domain.

The operator copies the node's label to the pod when the pod is scheduled, and a volume shows it to the worker.
"""

from collections.abc import Mapping
from typing import Any

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import MAIN, PREFIX, is_worker
from dynamo.protocols.kubernetes.common import KubeObject, KvTransferPolicy
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

LABEL_KEY = f"{PREFIX}topology-label-key"
"""Annotation of pods: the node label that is copied to the pod."""
FROM_NODE = f"{PREFIX}topology-from-node"
"""Label of the pods whose node label the operator copies."""
VOLUME, MOUNT_PATH = "topology-labels", "/etc/dynamo/topology"
DEFAULT_ENFORCEMENT = "required"


def policy_of(graph: DynamoGraphDeployment, component: ComponentSpec) -> KvTransferPolicy | None:
    """Return the transfer policy that applies to a component: only workers have one."""
    experimental = graph.spec.experimental
    policy = experimental.kv_transfer_policy if experimental is not None else None
    return policy if policy is not None and is_worker(component) else None


def add_policy(template: KubeObject, policy: KvTransferPolicy) -> None:
    """Give a pod template the variables, the volume and the annotation of a policy.

    They precede those of the template. Raise `WorkloadError` for a policy that names a topology of Grove.
    """
    if policy.label_key is None:
        path = "spec.experimental.kvTransferPolicy.clusterTopologyName"
        raise WorkloadError(f"{path}: is not supported; set labelKey to the node label of the domain")
    spec = template.setdefault("spec", {})
    containers: list[KubeObject] = spec.setdefault("containers", [])
    main = next((one for one in containers if one.get("name") == MAIN), None)
    if main is None:
        main = {"name": MAIN}
        containers.insert(0, main)
    values = _variables(policy)
    kept = [one for one in main.get("env") or () if one["name"] not in values]
    main["env"] = [*kept, *({"name": name, "value": value} for name, value in values.items())]
    mounts = [one for one in main.get("volumeMounts") or () if one.get("mountPath") != MOUNT_PATH]
    main["volumeMounts"] = [*mounts, {"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": True}]
    field = {"fieldPath": f"metadata.labels['{policy.label_key}']"}
    volume = {"name": VOLUME, "downwardAPI": {"items": [{"path": policy.domain, "fieldRef": field}]}}
    spec["volumes"] = [*(one for one in spec.get("volumes") or () if one.get("name") != VOLUME), volume]
    metadata = template.setdefault("metadata", {})
    metadata["annotations"] = {**(metadata.get("annotations") or {}), LABEL_KEY: policy.label_key}
    metadata["labels"] = {**(metadata.get("labels") or {}), FROM_NODE: "true"}


def _variables(policy: KvTransferPolicy) -> dict[str, str]:
    values = {
        "DYN_KV_TRANSFER_DOMAIN": policy.domain or "",
        "DYN_KV_TRANSFER_ENFORCEMENT": policy.enforcement or DEFAULT_ENFORCEMENT,
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": MOUNT_PATH,
    }
    if policy.preferred_weight is not None:
        values["DYN_KV_TRANSFER_PREFERRED_WEIGHT"] = f"{policy.preferred_weight:g}"
    return values


def wanted_label(pod: KubeObject) -> str | None:
    """Return the node label that a scheduled pod lacks; None if it lacks none."""
    metadata: Mapping[str, Any] = pod["metadata"]
    key = (metadata.get("annotations") or {}).get(LABEL_KEY)
    if not key or metadata.get("deletionTimestamp") or not (pod.get("spec") or {}).get("nodeName"):
        return None
    return None if key in (metadata.get("labels") or {}) else str(key)
