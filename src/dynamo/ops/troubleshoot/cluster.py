"""Collector of a namespace: pods, events, jobs, claims, graphs, endpoint slices and logs. Only reads."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dynamo.core.errors import StartupError
from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import ENDPOINT_SLICES, GRAPHS, PODS, SCALING_ADAPTERS, ObjectKind
from dynamo.operator.reconcile.names import GRAPH
from dynamo.operator.validation.facts import part
from dynamo.ops.redaction import redacted_json, redacted_text
from dynamo.ops.troubleshoot.case import items_of
from dynamo.ops.troubleshoot.pod_signatures import conditions, containers
from dynamo.protocols.kubernetes.common import KubeObject

EVENTS = ObjectKind("v1", "Event", "events")
JOBS = ObjectKind("batch/v1", "Job", "jobs")
CLAIMS = ObjectKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
REQUESTS = ObjectKind("nvidia.com/v1beta1", "DynamoGraphDeploymentRequest", "dynamographdeploymentrequests")
COMPONENTS = ObjectKind("nvidia.com/v1beta1", "DynamoComponentDeployment", "dynamocomponentdeployments")
FILES = {
    "pods.json": PODS,
    "events.json": EVENTS,
    "jobs.json": JOBS,
    "claims.json": CLAIMS,
    "graphs.json": GRAPHS,
    "requests.json": REQUESTS,
    "slices.json": ENDPOINT_SLICES,
    "adapters.json": SCALING_ADAPTERS,
    "components.json": COMPONENTS,
}
NOT_FOUND = 404
OPERATOR_LABEL = "app.kubernetes.io/name=dynamo-operator"
LOG_LINES = 2000  # Of each container, as upstream's collector.
PODS_MAX = 200  # Pods whose logs are read; those that are not ready come first.
LOGS_AT_ONCE = 8


async def cluster_files(namespace: str | None, graph: str | None) -> tuple[dict[str, str], list[str]]:
    """Return the files of a graph, or of a whole namespace, and what could not be read.

    Raise `KubeUnavailable` without a response, and `StartupError` for a graph that does not exist and has no pods.
    """
    files, where, problems = await namespace_files(namespace, graph)
    absent = absence(files, graph, where)
    if absent and "pods.json" not in files:
        raise StartupError(absent)
    return files, [*problems, *([absent] if absent else [])]


async def namespace_files(namespace: str | None, resource: str | None) -> tuple[dict[str, str], str, list[str]]:
    """Return the files of what concerns a resource, the namespace, and what could not be read."""
    client = KubeClient()
    try:
        where = namespace or client.namespace or "default"
        found: dict[str, list[KubeObject]] = {}
        problems: list[str] = []
        for name, kind in FILES.items():
            try:
                found[name] = of_graph(name, (await client.list(kind, where)).items, resource)
            except KubeRefused as error:
                if error.code != NOT_FOUND or kind is PODS:  # A kind that is not installed has no objects.
                    problems.append(f"{kind.plural}: {error}")
        files = {name: objects_file(items, FILES[name].kind) for name, items in found.items() if items}
        pods = [*found.get("pods.json", []), *await _operator_pods(client)]
        files |= await _logs(client, pods, where, problems)
    finally:
        await client.close()
    return files, where, problems


def absence(files: Mapping[str, str], graph: str | None, namespace: str) -> str:
    """Return why a graph cannot be examined; empty if it exists, or if none is named."""
    graphs = items_of(files.get("graphs.json", ""))
    if graph is None or any(part(one, "metadata").get("name") == graph for one in graphs):
        return ""
    return f"{graph}: no DynamoGraphDeployment of this name in namespace {namespace}"


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


class LogRequest(NamedTuple):
    """A log to read."""

    namespace: str
    pod: str
    container: str
    is_previous: bool

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return f"pods/{self.pod}/{self.container}{'-previous' if self.is_previous else ''}.log"


def log_requests(pods: Iterable[KubeObject]) -> list[LogRequest]:
    """Return the logs to read: of all containers, and of the previous runs of those that were restarted."""
    found = []
    for pod in sorted(pods, key=_is_ready)[:PODS_MAX]:
        metadata, spec = part(pod, "metadata"), part(pod, "spec")
        where, name = str(metadata.get("namespace") or ""), str(metadata.get("name"))
        restarted = {str(one.get("name")) for one in containers(pod) if one.get("restartCount")}
        for one in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
            own = str(one.get("name"))
            found += [LogRequest(where, name, own, is_previous=False)]
            found += [LogRequest(where, name, own, is_previous=True)] if own in restarted else []
    return found


async def _operator_pods(client: KubeClient) -> list[KubeObject]:
    """Return the pods of the operator in any namespace; none if they cannot be listed."""
    try:
        return (await client.list(PODS, None, OPERATOR_LABEL)).items
    except KubeRefused:  # Users of one namespace may not see others.
        return []


async def _logs(client: KubeClient, pods: list[KubeObject], namespace: str, problems: list[str]) -> dict[str, str]:
    """Return the logs of the pods' containers; those that cannot be read for lack of a response are added to `problems`."""
    limit = asyncio.Semaphore(LOGS_AT_ONCE)
    files: dict[str, str] = {}

    async def read(one: LogRequest) -> None:
        async with limit:
            try:
                text = await client.pod_log(
                    one.pod,
                    one.namespace or namespace,
                    container=one.container,
                    lines=LOG_LINES,
                    is_previous=one.is_previous,
                )
            except KubeRefused:  # A container that has not started has no log.
                return
            except KubeUnavailable as error:
                problems.append(f"log of {one.pod}/{one.container}: {error}")
                return
        if text:
            files[one.file] = redacted_text(text)

    async with asyncio.TaskGroup() as group:
        for request in log_requests(pods):
            group.create_task(read(request))
    return files


def _is_ready(pod: KubeObject) -> bool:
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions(pod))
