"""KV transfer policy of a graph: variables and files from which its workers read their topology domain.

The operator copies the node's label to the pod when the pod is scheduled, and a volume shows it to the worker.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import MAIN, PREFIX, is_worker
from dynamo.protocols.kubernetes.common import KubeObject, KvTransferPolicy
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

LABEL_KEY = f"{PREFIX}topology-label-key"
"""Annotation of pods: the node label that is copied to the pod."""
TOPOLOGY_NAME = f"{PREFIX}topology-cluster-topology-name"
"""Annotation of pods: the topology of Grove whose node labels are copied to the pod, each as DOMAIN_LABEL."""
DOMAIN_LABEL = f"{PREFIX}dynamo-topology."
Topologies: TypeAlias = Mapping[str, Mapping[str, str]] | None
"""Node label of each domain, by the name of a topology; None: not known."""
FROM_NODE = f"{PREFIX}topology-from-node"
"""Label of the pods whose node label the operator copies."""
VOLUME, MOUNT_PATH = "topology-labels", "/etc/dynamo/topology"
DEFAULT_ENFORCEMENT = "required"


def policy_of(graph: DynamoGraphDeployment, component: ComponentSpec) -> KvTransferPolicy | None:
    """Return the transfer policy that applies to a component: only workers have one."""
    experimental = graph.spec.experimental
    policy = experimental.kv_transfer_policy if experimental is not None else None
    return policy if policy is not None and is_worker(component) else None


def add_policy(template: KubeObject, policy: KvTransferPolicy, topologies: Topologies) -> None:
    """Give a pod template the variables, the volume and the annotation of a policy.

    They precede those of the template. Raise `WorkloadError` for a topology that the cluster does not have.
    """
    files = _files(policy, topologies)
    source = {LABEL_KEY: policy.label_key, TOPOLOGY_NAME: policy.cluster_topology_name}
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
    items = [{"path": path, "fieldRef": {"fieldPath": f"metadata.labels['{one}']"}} for path, one in files.items()]
    volume = {"name": VOLUME, "downwardAPI": {"items": items}}
    spec["volumes"] = [*(one for one in spec.get("volumes") or () if one.get("name") != VOLUME), volume]
    metadata = template.setdefault("metadata", {})
    named = {name: value for name, value in source.items() if value}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **named}
    metadata["labels"] = {**(metadata.get("labels") or {}), FROM_NODE: "true"}


def _files(policy: KvTransferPolicy, topologies: Topologies) -> dict[str, str]:
    """Return the pod label that each file of the volume shows, by the name of its domain."""
    domain, name = policy.domain or "", policy.cluster_topology_name
    if policy.label_key is not None or name is None:
        return {domain: policy.label_key or ""}
    if topologies is None:
        return {domain: DOMAIN_LABEL + domain}
    path = "spec.experimental.kvTransferPolicy"
    levels = topologies.get(name)
    if levels is None:
        raise WorkloadError(f"{path}.clusterTopologyName: the cluster has no topology {name!r}")
    if domain not in levels:
        raise WorkloadError(f"{path}.domain: {domain!r} is not in topology {name!r}, which has {', '.join(levels)}")
    return {one: DOMAIN_LABEL + one for one in levels}


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


def missing_labels(pod: KubeObject, topologies: Topologies) -> dict[str, str]:
    """Return the node label that each missing label of a scheduled pod is copied from; empty if it lacks none."""
    metadata: Mapping[str, Any] = pod["metadata"]
    annotations, present = metadata.get("annotations") or {}, metadata.get("labels") or {}
    if metadata.get("deletionTimestamp") or not (pod.get("spec") or {}).get("nodeName"):
        return {}
    levels = (topologies or {}).get(annotations.get(TOPOLOGY_NAME, ""), {})
    wanted = {DOMAIN_LABEL + domain: key for domain, key in levels.items()}
    if annotations.get(LABEL_KEY):
        wanted[annotations[LABEL_KEY]] = annotations[LABEL_KEY]
    return {label: key for label, key in wanted.items() if label not in present}
