"""Stand-ins for the controllers of Deployment, ReplicaSet, StatefulSet, Job and LeaderWorkerSet."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.metadata import generated_name, now
from tests.cluster.kubernetes.resources import GroupPlural

if TYPE_CHECKING:
    from tests.cluster.kubernetes.controllers import Controllers

DEPLOYMENTS, REPLICA_SETS = ("apps", "deployments"), ("apps", "replicasets")
LEADER_WORKER_SETS = ("leaderworkerset.x-k8s.io", "leaderworkersets")
HASH = "pod-template-hash"


def condition(kind: str, is_true: bool, reason: str = "", message: str = "") -> Object:
    found = {"type": kind, "status": str(is_true), "lastTransitionTime": now()}
    return {**found, "reason": reason, "message": message} if reason else found


def conditions(item: Object, *wanted: Object) -> list[Object]:
    """Return conditions; one whose status did not change keeps its time."""
    before = {one["type"]: one for one in (item.get("status") or {}).get("conditions") or []}
    return [
        {**one, "lastTransitionTime": before[one["type"]]["lastTransitionTime"]}
        if before.get(one["type"], {}).get("status") == one["status"]
        else one for one in wanted
    ]  # fmt: skip


def child_metadata(owner: Object, name: str, template: Object) -> Object:
    """Return the metadata of a controlled object with the labels and annotations of a template."""
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    found = template.get("metadata") or {}
    return {
        "name": name, "labels": found.get("labels") or {}, "annotations": found.get("annotations") or {},
        "ownerReferences": [reference],
    }  # fmt: skip


def with_labels(template: Object, labels: dict[str, str]) -> Object:
    found = template.get("metadata") or {}
    return {**template, "metadata": {**found, "labels": {**(found.get("labels") or {}), **labels}}}


def template_hash(template: Any) -> str:
    """Return the label value that identifies a revision of a template."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def is_ready(pod: Object) -> bool:
    found = (pod.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in found)


async def deployment(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep one ReplicaSet for each template; the old ones end when the new one is ready, or before it with Recreate."""
    spec, name = item["spec"], item["metadata"]["name"]
    wanted, revision = spec["replicas"], template_hash(spec["template"])
    sets = run.children(REPLICA_SETS, item)
    current = next((one for one in sets if one["metadata"]["labels"].get(HASH) == revision), None)
    old = [one for one in sets if one is not current]
    waits = spec["strategy"]["type"] == "Recreate" and any((one.get("status") or {}).get("replicas") for one in old)
    if current is None:
        template = with_labels(spec["template"], {HASH: revision})
        selector = {**spec["selector"], "matchLabels": {**(spec["selector"].get("matchLabels") or {}), HASH: revision}}
        body = {"replicas": 0 if waits else wanted, "selector": selector, "template": template}
        await run.create(
            REPLICA_SETS, item["metadata"]["namespace"],
            {"metadata": child_metadata(item, f"{name}-{revision}", {"metadata": template["metadata"]}), "spec": body},
        )  # fmt: skip
    elif not waits:
        set_replicas(run, REPLICA_SETS, current, wanted)
    status = (current or {}).get("status") or {}
    ready, updated = status.get("readyReplicas", 0), status.get("replicas", 0)
    if ready >= wanted or spec["strategy"]["type"] == "Recreate":
        for one in old:
            set_replicas(run, REPLICA_SETS, one, 0)
    total = [(one.get("status") or {}) for one in sets]
    available = sum(one.get("readyReplicas", 0) for one in total)
    counts = {
        "replicas": sum(one.get("replicas", 0) for one in total), "updatedReplicas": updated,
        "readyReplicas": available, "availableReplicas": available, "unavailableReplicas": max(0, wanted - available),
    }  # fmt: skip
    done = ready >= wanted
    run.put_status(key, item, observedGeneration=item["metadata"]["generation"], **counts, conditions=conditions(
        item, condition("Available", available >= wanted, "MinimumReplicasAvailable"),
        condition("Progressing", is_true=True, reason="NewReplicaSetAvailable" if done else "ReplicaSetUpdated"),
    ))  # fmt: skip


def set_replicas(run: "Controllers", key: GroupPlural, item: Object, replicas: int) -> None:
    if item["spec"].get("replicas") != replicas:
        metadata = {**item["metadata"], "generation": item["metadata"].get("generation", 0) + 1}
        run.put(key, {**item, "spec": {**item["spec"], "replicas": replicas}, "metadata": metadata})


async def replica_set(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep as many pods as replicas."""
    names = [one["metadata"]["name"] for one in run.children(("", "pods"), item)][: item["spec"]["replicas"]]
    while len(names) < item["spec"]["replicas"]:
        names.append(generated_name(item["metadata"]["name"] + "-"))
    pods = await run.match_pods(item, dict.fromkeys(names, item["spec"]["template"]))
    ready = sum(map(is_ready, pods))
    run.put_status(
        key, item, replicas=len(pods), readyReplicas=ready, availableReplicas=ready, fullyLabeledReplicas=len(pods),
        observedGeneration=item["metadata"].get("generation", 1),
    )  # fmt: skip


async def stateful_set(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep pods with ordinals."""
    replicas, name = item["spec"]["replicas"], item["metadata"]["name"]
    pods = await run.match_pods(item, {f"{name}-{index}": item["spec"]["template"] for index in range(replicas)})
    ready = sum(map(is_ready, pods))
    run.put_status(
        key, item, replicas=len(pods), readyReplicas=ready, availableReplicas=ready, updatedReplicas=len(pods),
        currentReplicas=len(pods), observedGeneration=item["metadata"]["generation"],
    )  # fmt: skip


async def job(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Run the pods of a job until enough of them succeeded, or more failed than backoffLimit allows."""
    spec = item["spec"]
    status = item.get("status") or {}
    if spec.get("suspend") or any(one["status"] == "True" for one in status.get("conditions") or []):
        return
    pods = run.children(("", "pods"), item)
    phases = [(one.get("status") or {}).get("phase") for one in pods]
    succeeded, failed = phases.count("Succeeded"), phases.count("Failed")
    wanted = spec.get("completions") or 1
    ended: list[Object] = []
    if succeeded >= wanted:
        ended = [
            condition("SuccessCriteriaMet", True, "CompletionsReached"),
            condition("Complete", True, "CompletionsReached"),
        ]
    elif failed > spec["backoffLimit"]:
        text = "Job has reached the specified backoff limit"
        ended = [
            condition("FailureTarget", True, "BackoffLimitExceeded", text),
            condition("Failed", True, "BackoffLimitExceeded", text),
        ]
    elif len(pods) - failed < wanted:
        await run.create(
            ("", "pods"), item["metadata"]["namespace"],
            {"metadata": child_metadata(item, generated_name(item["metadata"]["name"] + "-"), spec["template"]),
             "spec": spec["template"]["spec"]},
        )  # fmt: skip
    times = {"completionTime": now()} if ended and succeeded >= wanted else {}
    run.put_status(
        key, item, startTime=status.get("startTime") or now(), active=len(pods) - succeeded - failed,
        ready=sum(map(is_ready, pods)), succeeded=succeeded, failed=failed, conditions=ended, **times,
    )  # fmt: skip


async def leader_worker_set(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep groups of a leader and its workers; a group is ready when all its pods are."""
    spec, name = item["spec"], item["metadata"]["name"]
    parts = spec.get("leaderWorkerTemplate") or {}
    size, replicas = parts.get("size", 1), spec.get("replicas", 1)
    wanted, groups = (
        {},
        [[f"{name}-{group}", *(f"{name}-{group}-{index}" for index in range(1, size))] for group in range(replicas)],
    )
    for group, members in enumerate(groups):
        for index, member in enumerate(members):
            template = (
                (parts.get("leaderTemplate") or parts["workerTemplate"]) if index == 0 else parts["workerTemplate"]
            )
            prefix = "leaderworkerset.sigs.k8s.io/"
            labels = {f"{prefix}name": name, f"{prefix}group-index": str(group), f"{prefix}worker-index": str(index)}
            wanted[member] = with_labels(template, labels)
    pods = {one["metadata"]["name"]: one for one in await run.match_pods(item, wanted)}
    ready = sum(all(is_ready(pods[member]) for member in members) for members in groups)
    done = ready >= replicas
    run.put_status(
        key, item, replicas=replicas, readyReplicas=ready, updatedReplicas=replicas,
        observedGeneration=item["metadata"]["generation"], hpaPodSelector=f"leaderworkerset.sigs.k8s.io/name={name}",
        conditions=conditions(
            item, condition("Available", done, "AllGroupsReady" if done else "GroupsProgressing"),
            condition("Progressing", not done, "GroupsProgressing"),
        ),
    )  # fmt: skip


WORKLOADS: dict[GroupPlural, Callable[["Controllers", GroupPlural, Object], Awaitable[None]]] = {
    DEPLOYMENTS: deployment, REPLICA_SETS: replica_set, ("apps", "statefulsets"): stateful_set,
    ("batch", "jobs"): job, LEADER_WORKER_SETS: leader_worker_set,
}  # fmt: skip


COUNT = {"type": "integer", "minimum": 1}
CLIQUE_SET: Object = {
    "type": "object", "x-kubernetes-preserve-unknown-fields": True,
    "properties": {"template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {
        "cliques": {"type": "array", "minItems": 1, "items": {
            "type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"spec": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": True,
                "required": ["roleName", "podSpec", "replicas"],
                "properties": {"replicas": COUNT, "minAvailable": COUNT},
            }},
        }},
        "podCliqueScalingGroups": {"type": "array", "items": {
            "type": "object", "x-kubernetes-preserve-unknown-fields": True, "required": ["name", "cliqueNames"],
            "properties": {"replicas": COUNT, "minAvailable": COUNT},
        }},
    }}},
}  # fmt: skip
"""What Grove's webhook checks of a PodCliqueSet."""


def workload_definitions() -> list[Object]:
    """Return definitions of the kinds of LeaderWorkerSet and Grove, without their schemas."""
    kinds = [
        ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet", "lws"),
        ("grove.io", "v1alpha1", "podcliquesets", "PodCliqueSet", "pcs"),
        ("grove.io", "v1alpha1", "podcliques", "PodClique", "pclq"),
        ("grove.io", "v1alpha1", "podcliquescalinggroups", "PodCliqueScalingGroup", "pcsg"),
    ]
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": free, "status": free}}
    with_template = {"type": "object", "properties": {"spec": CLIQUE_SET, "status": free}}
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {
                "group": group, "scope": "Namespaced", "names": {"plural": plural, "kind": kind, "shortNames": [short]},
                "versions": [{
                    "name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": with_template if plural == "podcliquesets" else schema},
                    "subresources": {"status": {}, "scale": scale},
                }],
            },
        }
        for group, version, plural, kind, short in kinds
    ]  # fmt: skip
