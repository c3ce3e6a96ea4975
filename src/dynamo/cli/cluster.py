"""Requests of `dynamo deploy` to a cluster: diff, apply, status, logs and delete."""

import asyncio
import difflib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import yaml

from dynamo.cli.graph_status import COMPONENT_LABEL, GRAPH_LABEL, HEAD, rows_of
from dynamo.cli.log_follower import LogFollower
from dynamo.cli.manifests import Manifest, in_order
from dynamo.cli.object_status import SHORT_NAMES, ObjectReport, report_of, target_of
from dynamo.core.errors import ConfigError
from dynamo.core.progress import activity
from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import CHECKPOINTS, EVENTS, GRAPH_REQUESTS, GRAPHS, PODS, SEGMENT, ObjectKind
from dynamo.operator.reconcile.checkpoints import CHECKPOINT_ID
from dynamo.operator.reconcile.requests.job import APP, PROFILER_APP, REQUEST_LABEL
from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

MANAGER = "dynamo-deploy"
STATUS_S = 2.0
"""Interval of `status --watch`."""
SERVER_FIELDS = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")
UNAUTHORIZED, CONFLICT = 401, 409


@asynccontextmanager
async def connected(namespace: str | None) -> AsyncIterator[tuple[KubeClient, str]]:
    """Yield a client and the namespace to use. Raise `ConfigError` for a wrong namespace and for refused credentials."""
    if namespace is not None and not SEGMENT.fullmatch(namespace):
        raise ConfigError(f"--namespace {namespace!r}: must have lower-case letters, digits and dashes only")
    client = KubeClient()
    try:
        yield client, namespace or client.namespace or "default"
    except KubeRefused as error:
        if error.code != UNAUTHORIZED:
            raise
        raise ConfigError(f"KUBECONFIG: {client.address} refuses its credentials ({error})") from None
    finally:
        await client.close()


async def kind_of(client: KubeClient, one: Manifest) -> ObjectKind:
    """Return the kind of a manifest. Raise `ConfigError` if the server does not have it."""
    found = await client.discover(one.api_version, one.kind)
    if found is None:
        hint = "; the chart dynamo-crds installs it" if one.is_ours else ""
        raise ConfigError(f"{one.file}: {one.label}: {one.api_version} is not installed in the cluster{hint}")
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
            with activity(f"reading {one.label}"):
                kind = await kind_of(client, one)
                where = namespace_of(one, kind, default)
                before = await client.get(kind, one.name, where)
            try:
                with activity(f"applying {one.label}"):
                    after = await client.apply(kind, one.applied, where, manager=MANAGER, is_forced=is_forced)
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
            try:
                after = await client.apply(kind, one.applied, where, manager=MANAGER, is_dry_run=True)
            except KubeRefused as error:
                changed = 1
                sys.stderr.write(f"error: {one.file}: {one.label}: {error}\n")
                continue
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


async def status(target: str, namespace: str | None, *, is_repeated: bool) -> int:
    """Print the state of an object, repeatedly until it is ready or final. Return 0 if it is ready, otherwise 1."""
    async with connected(namespace) as (client, where):
        with activity(f"reading {target} in namespace {where}"):
            kind, name = await found(client, target, where)
        is_first = True
        while True:
            try:
                with activity(f"reading {target} in namespace {where}"):
                    report = await _report(client, kind, name, where)
            except KubeUnavailable as error:
                if not is_repeated or is_first:
                    raise
                sys.stderr.write(f"{error}\n")
            else:
                _show(report, is_first=is_first)
                if report.is_ready or report.is_final or not is_repeated:
                    return 0 if report.is_ready else 1
                is_first = False
            await asyncio.sleep(STATUS_S)


async def found(client: KubeClient, target: str, namespace: str) -> tuple[ObjectKind, str]:
    """Return kind and name of `NAME` or `KIND/NAME`. Raise `ConfigError` if there is no such object."""
    kind, name = target_of(target)
    for one in [kind] if kind else SHORT_NAMES.values():
        if await client.get(one, name, namespace) is not None:
            return one, name
    kinds = kind.kind if kind else " or ".join(one.kind for one in SHORT_NAMES.values())
    raise ConfigError(f"{name}: no {kinds} of this name in namespace {namespace}")


async def _report(client: KubeClient, kind: ObjectKind, name: str, namespace: str) -> ObjectReport:
    value = await client.get(kind, name, namespace)
    if value is None:
        raise ConfigError(f"{name}: no {kind.kind} of this name in namespace {namespace}")
    events = (await client.list(EVENTS, namespace)).items
    if kind != GRAPHS:
        return report_of(kind, value, events)
    pods = (await client.list(PODS, namespace, f"{GRAPH_LABEL}={name}")).items
    rows = rows_of(value, pods, events)
    state = part(value, "status").get("state") or "unknown: the operator has not reported"
    is_ready = all(row.ready >= row.desired for row in rows)
    return ObjectReport(f"{name}: {state}", [HEAD, *(row.cells for row in rows)], [], is_ready, False)


def _show(report: ObjectReport, *, is_first: bool) -> None:
    """Print a report; on a terminal it replaces the one before."""
    if not is_first:
        print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n")
    lines = [report.title, *([text_table(report.rows)] if report.rows else ()), *report.notes]
    print("\n".join(lines), flush=True)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns; the last one is not padded."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


@dataclass(frozen=True, slots=True)
class SelectedPods:
    """Pods of one object."""

    labels: str
    component: str | None = None
    is_job: bool = False
    """Whether the pods end by themselves."""

    def accepts(self, pod: KubeObject) -> bool:
        """Return whether a pod that has the labels is of the component."""
        wanted = self.component
        return wanted is None or part(pod, "metadata", "labels").get(COMPONENT_LABEL, "").lower() == wanted.lower()


async def selected_pods(client: KubeClient, target: str, namespace: str, component: str | None) -> SelectedPods:
    """Return the pods of a graph, or of the job of a request or checkpoint. Raise `ConfigError` without any."""
    kind, name = await found(client, target, namespace)
    if kind == GRAPHS:
        return SelectedPods(f"{GRAPH_LABEL}={name}", component)
    if component is not None:
        raise ConfigError(f"--component {component}: only a graph has components, not a {kind.kind}")
    if kind == GRAPH_REQUESTS:
        return SelectedPods(f"{APP}={PROFILER_APP},{REQUEST_LABEL}={name}", is_job=True)
    if kind == CHECKPOINTS:
        identity = part(await client.get(kind, name, namespace) or {}, "status").get("identityHash") or ""
        return SelectedPods(f"{CHECKPOINT_ID}={identity}", is_job=True)
    raise ConfigError(f"{kind.kind}/{name}: a model has no pods of its own: use the graphs of its base model")


async def logs(target: str, namespace: str | None, *, component: str | None, lines: int, is_followed: bool) -> int:
    """Print the last lines of every container of an object, with `is_followed` also those that are written later.

    Return 1 if the object has no pod.
    """
    async with connected(namespace) as (client, where):
        selected = await selected_pods(client, target, where, component)
        pods = (await client.list(PODS, where, selected.labels)).items
        own = [pod for pod in pods if selected.accepts(pod)]
        if not own:
            of = f" of component {component}" if component else ""
            sys.stderr.write(f"{'waiting' if is_followed else 'error'}: {target}: no pod{of} in namespace {where}\n")
        if is_followed:
            follower = LogFollower(client, where, selected.labels, lines=lines, accepts=selected.accepts, write=_write)
            await follower.run(until_ended=selected.is_job)
            return 0
        for pod in own:
            for container in part(pod, "spec").get("containers") or []:
                await _print_log(client, pod["metadata"]["name"], where, container["name"], lines)
        return 0 if own else 1


def _write(line: str) -> None:
    print(line, flush=True)


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
            was_there = await client.delete(kind, one.name, namespace_of(one, kind, default))
            print(f"{one.label} {'deleted' if was_there else 'does not exist'}")
    return 0


async def delete_object(target: str, namespace: str | None) -> int:
    """Delete a graph by its name, or an object of `KIND/NAME`. Return 1 if it does not exist."""
    kind, name = target_of(target)
    wanted = kind or GRAPHS
    async with connected(namespace) as (client, where):
        if not await client.delete(wanted, name, where):
            sys.stderr.write(f"error: {name}: no {wanted.kind} of this name in namespace {where}\n")
            return 1
        print(f"{wanted.kind}/{name} deleted")
    return 0
