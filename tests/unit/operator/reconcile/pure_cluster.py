"""A cluster in memory for pure reconcile: it applies plans, and Deployments get their pods step by step."""

import copy
from collections.abc import Iterator
from typing import Any

from dynamo.operator.reconcile.component import component_plan
from dynamo.operator.reconcile.component_graph import DEPLOYED
from dynamo.operator.reconcile.graph import graph_plan
from dynamo.operator.reconcile.graph_pass import ObservedGraph
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.plan import ObjectRef, Plan, ref_of
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoComponentDeployment, DynamoGraphDeployment

NAMESPACE = "space"
SETTINGS = OperatorSettings()
JOINT: KubeObject = {"metadata": {"name": "several"}}
"""Owner of shared objects."""
NO_GROVE = ClusterFacts(has_lws=True, has_virtual_services=True, has_inference_pools=True, has_resource_claims=True)
REMOVABLE = ("Service", "Ingress", "VirtualService", "ConfigMap", "InferencePool", "ResourceClaimTemplate")
"""Kinds of further objects that the operator deletes."""


def now_of(step: int) -> str:
    """Return a timestamp that grows with the steps."""
    return f"2026-01-01T{step // 3600:02d}:{step // 60 % 60:02d}:{step % 60:02d}Z"


class PureCluster:
    """Objects by identity. Each `step_*` method does the next step of one controller of a real cluster."""

    def __init__(self, graph: dict[str, Any], facts: ClusterFacts = NO_GROVE) -> None:
        self.facts = facts
        self.objects: dict[ObjectRef, KubeObject] = {}
        self.graph: KubeObject = {
            "apiVersion": V1BETA1,
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": "chat", "namespace": NAMESPACE, "generation": 1},
            **graph,
        }
        self.time = 0
        self.writes = 0
        self.events: list[str] = []

    def edit(self, spec: dict[str, Any]) -> None:
        """Change the spec of the graph."""
        self.graph["spec"] = spec
        self.graph["metadata"]["generation"] += 1

    def of_kind(self, kind: str) -> list[KubeObject]:
        """Return the objects of a kind by name."""
        return [self.objects[ref] for ref in sorted(self.objects) if ref.kind == kind]

    def plan_graph(self) -> Plan:
        """Return the plan of the graph in the present state."""
        deployed = tuple(decode(DynamoComponentDeployment, one) for one in self.of_kind(DEPLOYED))
        adapters = [one["metadata"]["name"] for one in self.of_kind("DynamoGraphDeploymentScalingAdapter")]
        owner = self.graph["metadata"]["name"]
        owned = [ref for ref in self.objects if ref.kind in REMOVABLE and self.objects[ref]["owner"] == owner]
        sets = self.of_kind("PodCliqueSet")
        observed = ObservedGraph(
            components=deployed,
            adapters=adapters,
            owned=owned,
            clique_set=sets[0] if sets else None,
            cliques=[*self.of_kind("PodClique"), *self.of_kind("PodCliqueScalingGroup")],
        )
        return graph_plan(decode(DynamoGraphDeployment, self.graph), observed, SETTINGS, self.facts, now_of(self.time))

    def plan_component(self, value: KubeObject) -> Plan:
        """Return the plan of one component in the present state."""
        name = value["metadata"]["name"]
        workload = self.objects.get(ObjectRef("apps/v1", "Deployment", NAMESPACE, name))
        deployed = decode(DynamoComponentDeployment, value)
        return component_plan(deployed, workload, SETTINGS, self.facts, now_of(self.time))

    def step_graph(self) -> None:
        """Reconcile the graph."""
        self.apply(self.plan_graph(), self.graph)

    def step_components(self) -> None:
        """Reconcile every component."""
        for value in self.of_kind(DEPLOYED):
            self.apply(self.plan_component(value), value)

    def step_deployments(self, *, pods: int = 1) -> None:
        """Start or end at most that many pods of each Deployment; existing ones become ready."""
        for value in self.of_kind("Deployment"):
            status = value.setdefault("status", {})
            desired, running = value["spec"]["replicas"], status.get("replicas", 0)
            running += max(-pods, min(pods, desired - running))
            same = status.get("observedGeneration") == value["metadata"]["generation"]
            updated = running if same or not status.get("replicas") else min(running, pods)
            status.update(
                observedGeneration=value["metadata"]["generation"],
                replicas=running,
                updatedReplicas=updated,
                readyReplicas=running,
                availableReplicas=running,
                conditions=[{"type": "Available", "status": "True" if running >= desired else "False"}],
            )
        self._collect()

    def settle(self, passes: int = 60) -> None:
        """Step all controllers in turn until the state is stable."""
        for _ in range(passes):
            before = copy.deepcopy((self.graph, self.objects))
            for _ in self.rounds():
                pass
            if before == (self.graph, self.objects):
                return
            self.time += 1
        raise AssertionError(f"no fixed point after {passes} passes: {self.graph.get('status')}")

    def rounds(self) -> Iterator[None]:
        """Yield after each actor's step."""
        for step in (self.step_graph, self.step_components, self.step_deployments):
            step()
            yield

    def apply(self, plan: Plan, owner: KubeObject) -> None:
        """Carry out a plan; count the writes that change something."""
        for value in plan.create:
            if ref_of(value) not in self.objects:
                self._write(ref_of(value), copy.deepcopy(value), owner)
        for value in plan.joint:
            self._write(ref_of(value), {**self.objects.get(ref_of(value), {}), **copy.deepcopy(value)}, JOINT)
        for value in plan.apply:
            self._write(ref_of(value), {**self.objects.get(ref_of(value), {}), **copy.deepcopy(value)}, owner)
        for patch in plan.patch:
            changed = copy.deepcopy(self.objects[patch.ref])
            assert isinstance(patch.value, dict)
            changed["spec"].update(patch.value["spec"])
            self._write(patch.ref, changed, None)
        for ref in plan.delete:
            assert self.objects[ref]["owner"] == owner["metadata"]["name"]
            del self.objects[ref]
            self.writes += 1
        if plan.annotations:
            owner["metadata"].setdefault("annotations", {}).update(plan.annotations)
            self.writes += 1
        if plan.status is not None and plan.status != owner.get("status"):
            owner["status"] = plan.status
            self.writes += 1
        self.events += [event.reason for event in plan.events]
        self._collect()

    def _write(self, ref: ObjectRef, value: KubeObject, owner: KubeObject | None) -> None:
        known = self.objects.get(ref)
        kept = {} if known is None else {name: known["metadata"][name] for name in ("generation", "creationTimestamp")}
        value["metadata"] = {**value["metadata"], **(kept or {"generation": 1, "creationTimestamp": now_of(self.time)})}
        value["owner"] = known["owner"] if known else owner and owner["metadata"]["name"]
        if known is not None and known.get("spec") != value.get("spec"):
            value["metadata"]["generation"] = known["metadata"]["generation"] + 1
        if known != value:
            self.objects[ref] = value
            self.writes += 1

    def _collect(self) -> None:
        """Delete objects whose owner is gone."""
        names = {
            JOINT["metadata"]["name"],
            self.graph["metadata"]["name"],
            *(one["metadata"]["name"] for one in self.of_kind(DEPLOYED)),
        }
        for ref in [ref for ref, value in self.objects.items() if value["owner"] not in names]:
            del self.objects[ref]
