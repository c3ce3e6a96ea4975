"""Requests of `dynamo deploy` to a cluster: diff, apply, status, logs and delete."""

import asyncio
import difflib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import yaml

from dynamo.cli.graph_status import COMPONENT_LABEL, GRAPH_LABEL, HEAD, rows_of
from dynamo.cli.manifests import Manifest, in_order
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.kinds import EVENTS, GRAPHS, PODS, ObjectKind
from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

MANAGER = "dynamo-deploy"
STATUS_S = 2.0
"""Interval of `status --watch`."""
SERVER_FIELDS = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")
CONFLICT = 409


@asynccontextmanager
async def connected(namespace: str | None) -> AsyncIterator[tuple[KubeClient, str]]:
    """Yield a client and the namespace to use."""
    client = KubeClient()
    try:
        yield client, namespace or client.namespace or "default"
    finally:
        await client.close()


async def kind_of(client: KubeClient, one: Manifest) -> ObjectKind:
    """Return the kind of a manifest. Raise `ConfigError` if the server does not have it."""
    found = await client.discover(one.api_version, one.kind)
    if found is None:
        raise ConfigError(f"{one.file}: {one.label}: {one.api_version} is not installed in the cluster")
    return found


def namespace_of(one: Manifest, kind: ObjectKind, default: str) -> str | None:
    """Return the namespace of an object: its own, else the default; None for a kind without namespaces."""
    if not kind.is_namespaced:
        return None
    return str(part(one.value, "metadata").get("namespace") or default)


async def apply(manifests: Sequence[Manifest], namespace: str | None, *, is_forced: bool) -> int:
    """Create or update objects. Return 1 if the server refuses one; the others are applied."""
    failed = 0
    async with connected(namespace) as (client, default):
        for one in in_order(manifests):
            kind = await kind_of(client, one)
            where = namespace_of(one, kind, default)
            before = await client.get(kind, one.name, where)
            try:
                after = await client.apply(kind, one.value, where, manager=MANAGER, is_forced=is_forced)
            except KubeRefused as error:
                failed = 1
                hint = "; use --force to take over the fields" if error.code == CONFLICT else ""
                sys.stderr.write(f"error: {one.file}: {one.label}: {error}{hint}\n")
                continue
            print(f"{one.label} {_outcome(before, after)}")
    return failed


def _outcome(before: KubeObject | None, after: KubeObject) -> str:
    if before is None:
        return "created"
    same = before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    return "unchanged" if same else "configured"


async def diff(manifests: Sequence[Manifest], namespace: str | None) -> int:
    """Print the differences between the stored objects and those that apply would make. Return 1 if there is one."""
    changed = 0
    async with connected(namespace) as (client, default):
        for one in in_order(manifests):
            kind = await kind_of(client, one)
            where = namespace_of(one, kind, default)
            before = await client.get(kind, one.name, where)
            after = await client.apply(kind, one.value, where, manager=MANAGER, is_dry_run=True)
            lines = difference(before, after, one.label)
            changed |= bool(lines)
            sys.stdout.writelines(lines)
    return int(changed)


def difference(before: KubeObject | None, after: KubeObject, label: str) -> list[str]:
    """Return the unified difference of two objects as YAML, without the fields that the server writes."""
    old = _lines(before) if before is not None else []
    return list(difflib.unified_diff(old, _lines(after), f"{label} (cluster)", f"{label} (file)"))


def _lines(value: KubeObject) -> list[str]:
    shown = {name: one for name, one in value.items() if name != "status"}
    shown["metadata"] = {name: one for name, one in shown["metadata"].items() if name not in SERVER_FIELDS}
    return yaml.safe_dump(shown, sort_keys=True).splitlines(keepends=True)


async def status(name: str, namespace: str | None, *, is_repeated: bool) -> int:
    """Print the components of a graph. Return 0 if all are ready, otherwise 1."""
    async with connected(namespace) as (client, where):
        while True:
            graph = await client.get(GRAPHS, name, where)
            if graph is None:
                raise ConfigError(f"{name}: no DynamoGraphDeployment of this name in namespace {where}")
            pods = (await client.list(PODS, where, f"{GRAPH_LABEL}={name}")).items
            rows = rows_of(graph, pods, (await client.list(EVENTS, where)).items)
            state = part(graph, "status").get("state") or "unknown: the operator has not reported"
            print(f"{name}: {state}\n{text_table([HEAD, *(row.cells for row in rows)])}")
            is_ready = all(row.ready >= row.desired for row in rows)
            if is_ready or not is_repeated:
                return 0 if is_ready else 1
            print(flush=True)
            await asyncio.sleep(STATUS_S)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns; the last one is not padded."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


async def logs(name: str, namespace: str | None, *, component: str | None, lines: int) -> int:
    """Print the last lines of every container of a graph. Return 1 if the graph has no pod."""
    async with connected(namespace) as (client, where):
        pods = (await client.list(PODS, where, f"{GRAPH_LABEL}={name}")).items
        own = [
            pod
            for pod in pods
            if component is None
            or part(pod, "metadata", "labels").get(COMPONENT_LABEL, "").lower() == component.lower()
        ]
        for pod in own:
            for container in part(pod, "spec").get("containers") or []:
                await _print_log(client, pod["metadata"]["name"], where, container["name"], lines)
        if not own:
            of = f" of component {component}" if component else ""
            sys.stderr.write(f"error: {name}: no pod{of} in namespace {where}\n")
        return 0 if own else 1


async def _print_log(client: KubeClient, pod: str, namespace: str, container: str, lines: int) -> None:
    try:
        text = await client.pod_log(pod, namespace, container=container, lines=lines)
    except KubeRefused as error:
        sys.stderr.write(f"{pod}/{container}: {error}\n")  # A container that has not started has no log.
        return
    for line in text.splitlines():
        print(f"{pod}/{container}: {line}")


async def delete(manifests: Sequence[Manifest], namespace: str | None) -> int:
    """Delete the objects of manifests in reverse order; objects that do not exist are skipped."""
    async with connected(namespace) as (client, default):
        for one in reversed(in_order(manifests)):
            kind = await kind_of(client, one)
            await client.delete(kind, one.name, namespace_of(one, kind, default))
            print(f"{one.label} deleted")
    return 0


async def delete_graph(name: str, namespace: str | None) -> int:
    """Delete a graph. Return 1 if it does not exist."""
    async with connected(namespace) as (client, where):
        if await client.get(GRAPHS, name, where) is None:
            sys.stderr.write(f"error: {name}: no DynamoGraphDeployment of this name in namespace {where}\n")
            return 1
        await client.delete(GRAPHS, name, where)
        print(f"DynamoGraphDeployment/{name} deleted")
    return 0
