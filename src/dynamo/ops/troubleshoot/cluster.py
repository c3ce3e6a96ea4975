"""Collector of a namespace: pods, events, jobs, claims, graphs, endpoint slices and logs. Only reads."""

import asyncio
import json
from collections.abc import Iterable

from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.kinds import ENDPOINT_SLICES, GRAPHS, PODS, ObjectKind
from dynamo.operator.reconcile.names import GRAPH
from dynamo.operator.validation.facts import part
from dynamo.ops.redaction import redacted_json, redacted_text
from dynamo.protocols.kubernetes.common import KubeObject

EVENTS = ObjectKind("v1", "Event", "events")
JOBS = ObjectKind("batch/v1", "Job", "jobs")
CLAIMS = ObjectKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
REQUESTS = ObjectKind("nvidia.com/v1beta1", "DynamoGraphDeploymentRequest", "dynamographdeploymentrequests")
FILES = {
    "pods.json": PODS,
    "events.json": EVENTS,
    "jobs.json": JOBS,
    "claims.json": CLAIMS,
    "graphs.json": GRAPHS,
    "requests.json": REQUESTS,
    "slices.json": ENDPOINT_SLICES,
}
LOG_LINES = 2000  # Of each container, as upstream's collector.
PODS_MAX = 200  # Pods whose logs are read; those that are not ready come first.
LOGS_AT_ONCE = 8


async def cluster_files(namespace: str | None, graph: str | None) -> tuple[dict[str, str], str, list[str]]:
    """Return files, namespace and the kinds that could not be listed. Raise `KubeUnavailable` without a response."""
    client = KubeClient()
    try:
        where = namespace or client.namespace or "default"
        found: dict[str, list[KubeObject]] = {}
        problems = []
        for name, kind in FILES.items():
            try:
                found[name] = (await client.list(kind, where)).items
            except KubeRefused as error:
                if error.code != 404 or kind is PODS:  # A kind that is not installed has no objects.
                    problems.append(f"{kind.plural}: {error}")
        objects = {name: of_graph(name, items, graph) for name, items in found.items()}
        files = {name: objects_file(items, FILES[name].kind) for name, items in objects.items() if items}
        files |= await _logs(client, where, objects.get("pods.json", []))
    finally:
        await client.close()
    return files, where, problems


def of_graph(file: str, items: list[KubeObject], graph: str | None) -> list[KubeObject]:
    """Return the objects that concern a graph; all for None. Claims and slices are of the whole namespace."""
    if graph is None or file in {"claims.json"}:
        return items
    found = []
    for one in items:
        metadata = part(one, "metadata")
        name = str(metadata.get("name") or "")
        subject = str(part(one, "involvedObject").get("name") or "")
        names = {name, str(part(metadata, "labels").get(GRAPH) or "")}
        if (
            graph in names
            or subject == graph
            or subject.startswith(f"{graph}-")
            or name.startswith(f"{graph}-")
            or file in {"jobs.json", "requests.json"}
            or (file == "pods.json" and part(metadata, "labels").get("job-name"))
        ):
            found.append(one)
    return found


def objects_file(items: Iterable[KubeObject], kind: str) -> str:
    """Return objects as JSON, without managed fields and without values of secret variables."""
    return json.dumps([_plain({"kind": kind, **one}) for one in items], indent=1)


def _plain(value: KubeObject) -> object:
    metadata = {name: one for name, one in part(value, "metadata").items() if name != "managedFields"}
    annotations = part(metadata, "annotations")
    if annotations:
        last = "kubectl.kubernetes.io/last-applied-configuration"
        metadata["annotations"] = {name: one for name, one in annotations.items() if name != last}
    return _without_secrets(redacted_json({**value, "metadata": metadata}))


def _without_secrets(value: object) -> object:
    """Return a value in which environment variables with secret names have no value."""
    if isinstance(value, list):
        return [_without_secrets(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
        hidden = redacted_json({value["name"]: value["value"]})
        assert isinstance(hidden, dict), "an object stays one"
        return {**value, "value": hidden[value["name"]]}
    return {name: _without_secrets(one) for name, one in value.items()}


async def _logs(client: KubeClient, namespace: str, pods: list[KubeObject]) -> dict[str, str]:
    """Return the logs of the pods' containers."""
    limit = asyncio.Semaphore(LOGS_AT_ONCE)
    files: dict[str, str] = {}

    async def read(pod: str, container: str) -> None:
        async with limit:
            try:
                text = await client.pod_log(pod, namespace, container=container, lines=LOG_LINES)
            except KubeRefused:  # A container that has not started has no log.
                return
        if text:
            files[f"pods/{pod}/{container}.log"] = redacted_text(text)

    chosen = sorted(pods, key=_is_ready)[:PODS_MAX]
    async with asyncio.TaskGroup() as group:
        for pod in chosen:
            spec = part(pod, "spec")
            for one in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
                group.create_task(read(str(part(pod, "metadata").get("name")), str(one.get("name"))))
    return files


def _is_ready(pod: KubeObject) -> bool:
    found = part(pod, "status").get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in found)
