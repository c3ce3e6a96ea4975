"""A cluster in memory with Grove: PodCliqueSets get their cliques and groups, which scale and update step by step."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.unit.operator.reconcile.pure_cluster import NAMESPACE, PureCluster

from dynamo.operator.reconcile.plan import ObjectRef
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject

VERSION = "grove.io/v1alpha1"
GROVE = ClusterFacts(has_grove=True)


class PureGrove(PureCluster):
    """Objects of one graph in a cluster with Grove."""

    def __init__(self, graph: dict[str, Any], facts: ClusterFacts = GROVE) -> None:
        super().__init__(graph, facts)

    def rounds(self) -> Iterator[None]:
        """Yield after each actor's step."""
        for step in (self.step_graph, self.step_grove):
            step()
            yield

    def step_grove(self) -> None:
        """Update the children of each set as Grove does; one pod of each child starts or is replaced."""
        wanted: dict[ObjectRef, KubeObject] = {}
        for value in self.of_kind("PodCliqueSet"):
            for kind, name, spec in children_of(value):
                wanted[ObjectRef(VERSION, kind, NAMESPACE, name)] = spec
            value.setdefault("status", {})["observedGeneration"] = value["metadata"]["generation"]
        kinds = ("PodClique", "PodCliqueScalingGroup")
        for ref in [one for one in self.objects if one.kind in kinds and one not in wanted]:
            del self.objects[ref]
        for ref, spec in wanted.items():
            self._update(ref, spec)

    def _update(self, ref: ObjectRef, spec: KubeObject) -> None:
        known = self.objects.get(ref)
        replicas = spec["replicas"] if known is None else known["spec"]["replicas"]
        made = {
            "apiVersion": VERSION,
            "kind": ref.kind,
            "metadata": {"name": ref.name, "namespace": NAMESPACE, "generation": 1, "creationTimestamp": ""},
            "owner": "chat",
            "status": (known or {}).get("status") or {},
            "revision": json.dumps(spec["template"], sort_keys=True),
            "spec": {"replicas": replicas},
        }
        status = made["status"]
        if known is not None and known["revision"] != made["revision"]:
            status["updatedReplicas"] = 0
        running = status.get("replicas", 0)
        running += max(-1, min(1, replicas - running))
        updated = min(running, status.get("updatedReplicas", 0) + 1)
        serving = "readyReplicas" if ref.kind == "PodClique" else "availableReplicas"
        status |= {"replicas": running, "updatedReplicas": updated, "scheduledReplicas": running}
        status |= {serving: running, "observedGeneration": 1}
        self.objects[ref] = made


def children_of(value: KubeObject) -> Iterator[tuple[str, str, KubeObject]]:
    """Yield kind, name and specification of each child of a PodCliqueSet."""
    template, name = value["spec"]["template"], value["metadata"]["name"]
    groups = template.get("podCliqueScalingGroups") or []
    grouped = {member for one in groups for member in one["cliqueNames"]}
    cliques = {one["name"]: one for one in template["cliques"]}
    for one in cliques.values():
        if one["name"] not in grouped:
            content = copy.deepcopy(one)
            replicas = content["spec"].pop("replicas")
            yield "PodClique", f"{name}-0-{one['name']}", {"replicas": replicas, "template": content}
    for group in groups:
        content = {member: cliques[member] for member in group["cliqueNames"]}
        yield "PodCliqueScalingGroup", f"{name}-0-{group['name']}", {"replicas": group["replicas"], "template": content}
