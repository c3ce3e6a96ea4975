"""In-memory request and its objects: plans are applied, and the job and the graph advance step by step."""

import copy
from typing import Any

import msgspec
import yaml

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.plan import Plan
from dynamo.operator.reconcile.requests.job import RequestSettings, output_name, profiling_job_name
from dynamo.operator.reconcile.requests.phases import ObservedRequest, request_plan
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest

UID = "uid-1"
HARDWARE = {"gpuSku": "h100_sxm", "vramMb": 81920.0, "numGpusPerNode": 8, "totalGpus": 8}
SPEC: dict[str, Any] = {"model": "org/m", "image": "planner:1", "hardware": HARDWARE}
SETTINGS = RequestSettings()
GRAPH: dict[str, Any] = {
    "apiVersion": V1BETA1,
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "chat-dgd"},
    "spec": {
        "components": [
            {"name": "Frontend", "type": "frontend", "replicas": 1},
            {"name": "decode", "type": "decode", "replicas": 2},
        ]
    },
}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "planner-config-1a2b"}, "data": {"a": "b"}}
RESULT = yaml.safe_dump_all([CONFIG, GRAPH])


def request_object(spec: dict[str, Any] | None = None, **metadata: Any) -> KubeObject:
    """Return a request in version v1beta1."""
    return {
        "apiVersion": V1BETA1,
        "kind": "DynamoGraphDeploymentRequest",
        "metadata": {"name": "chat", "namespace": "space", "uid": UID, "generation": 1, **metadata},
        "spec": SPEC | (spec or {}),
    }


class RequestCluster:
    """Objects by kind and name."""

    def __init__(self, value: KubeObject | None = None) -> None:
        self.request = convert(value or request_object(), V1BETA1)
        self.objects: dict[tuple[str, str], KubeObject] = {}
        self.pods: list[KubeObject] = []
        self.nodes: list[KubeObject] | None = None
        self.events: list[str] = []
        self.has_model_cache = True
        self.time = 0

    @property
    def status(self) -> KubeObject:
        """Status of the request."""
        found: KubeObject = self.request.get("status") or {}
        return found

    @property
    def phase(self) -> str | None:
        """Phase of the request."""
        return self.status.get("phase")

    def condition(self, kind: str) -> tuple[str, str]:
        """Return the status and the reason of a condition."""
        return next((one["status"], one["reason"]) for one in self.status["conditions"] if one["type"] == kind)

    def plan(self) -> Plan:
        """Return the plan in the present state."""
        name = self.request["metadata"]["name"]
        observed = ObservedRequest(
            job=self.objects.get(("Job", profiling_job_name(name))),
            pods=self.pods,
            output=self.objects.get(("ConfigMap", output_name(name))),
            graph=self.objects.get(("DynamoGraphDeployment", self.status.get("dgdName", ""))),
            nodes=self.nodes,
            has_model_cache=self.has_model_cache,
        )
        now = f"2026-01-01T00:{self.time // 60:02d}:{self.time % 60:02d}Z"
        return request_plan(decode(DynamoGraphDeploymentRequest, self.request), observed, SETTINGS, now)

    def reconcile(self, writes: int | None = None) -> int:
        """Carry out a plan, or only its first writes. Return the number of changes."""
        plan = self.plan()
        self.time += 1
        steps: list[Any] = [*(("create", one) for one in plan.create_unowned), *(("apply", one) for one in plan.apply)]
        steps.append(("status", plan.status))
        changes = 0
        for kind, value in steps[:writes]:
            changes += self._write(kind, copy.deepcopy(value))
        if writes is None or writes >= len(steps):
            self.events += [one.reason for one in plan.events]
            annotations = self.request["metadata"].setdefault("annotations", {})
            annotations |= {name: value for name, value in plan.annotations.items() if value is not None}
        return changes

    def _write(self, kind: str, value: KubeObject) -> int:
        if kind == "status":
            if self.request.get("status") == value:
                return 0
            self.request["status"] = value
            return 1
        key = (value["kind"], value["metadata"]["name"])
        if kind == "create":
            assert "ownerReferences" not in value["metadata"]
            if key in self.objects:
                return 0
        else:
            value["metadata"]["ownerReferences"] = [{"uid": self.request["metadata"]["uid"], "controller": True}]
            if key in self.objects and value["kind"] == "Job":
                assert self.objects[key]["spec"] == value["spec"], "the pods of a job cannot be changed"
        self.objects[key] = {**self.objects.get(key, {}), **value}
        return 1

    def publish(self, phase: str, message: str = "", **files: str) -> None:
        """Write the output as the job's sidecar does."""
        name = output_name(self.request["metadata"]["name"])
        data = {"phase": phase, "message": message, **{f"{key}.yaml": text for key, text in files.items()}}
        metadata = {"name": name, "ownerReferences": [{"uid": self.request["metadata"]["uid"]}]}
        self.objects["ConfigMap", name] = {"metadata": metadata, "data": data}

    def end_job(self, kind: str = "Complete", message: str = "") -> None:
        """End the job."""
        job = self.objects["Job", profiling_job_name(self.request["metadata"]["name"])]
        time = f"2026-01-01T00:{self.time // 60:02d}:{self.time % 60:02d}Z"
        one = {"type": kind, "status": "True", "message": message, "lastTransitionTime": time}
        job["status"] = {"conditions": [one]}

    def advance(self) -> None:
        """Advance the job and the graph by one step."""
        job = self.objects.get(("Job", profiling_job_name(self.request["metadata"]["name"])))
        graph = self.objects.get(("DynamoGraphDeployment", self.status.get("dgdName", "")))
        if graph is not None:
            components = {
                "decode": {"replicas": 2, "availableReplicas": 2},
                "Frontend": {"replicas": 1, "availableReplicas": 1},
            }
            graph["status"] = {"state": "successful", "components": components}
        elif job is not None and "status" not in job:
            self.publish("Done", "done", final_config=RESULT)
            self.end_job()

    def settle(self) -> None:
        """Reconcile and advance until the state is stable."""
        for _ in range(20):
            before = msgspec.json.encode([self.request, list(self.objects.values())])
            self.reconcile()
            self.advance()
            if before == msgspec.json.encode([self.request, list(self.objects.values())]):
                return
        raise AssertionError("the request does not settle")
