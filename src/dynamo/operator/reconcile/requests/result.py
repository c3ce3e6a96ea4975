"""Result of the profiler: the generated graph with the objects it needs, and the changes of `overrides.dgd`."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.overlay import overlaid
from dynamo.operator.reconcile.requests.job import alpha_profiling, tracking_labels
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1, KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment, DynamoGraphDeploymentRequest, RequestSpec

FINAL_CONFIG, PROFILER_STATUS = "final_config.yaml", "profiler_status.yaml"
REPORTED_STATUS, REPORTED_ERROR = "profiler_status", "profiler_error"
"""Entries of the output in which the sidecar repeats how the profiler ended."""
GRAPH = "DynamoGraphDeployment"
APPENDED = {V1ALPHA1: frozenset({"tolerations", "args"}), V1BETA1: frozenset({"tolerations"})}
"""Lists whose items an override adds; other lists it replaces, or merges if their items have names."""
TOPOLOGY = frozenset({"services", "components"})
"""Fields of which an override changes entries, and adds none."""


class NoGraph(ValueError):
    """The profiler's result has no usable graph; the message has the reason."""


@dataclass(frozen=True, slots=True)
class GeneratedObjects:
    """What the profiler generated."""

    graph: KubeObject
    others: tuple[KubeObject, ...] = ()
    """ConfigMaps that the graph's pods mount."""


def own_output(request: DynamoGraphDeploymentRequest, config_map: KubeObject | None) -> Mapping[str, str]:
    """Return the data of the output ConfigMap, or nothing if it is that of an earlier request of the same name."""
    if config_map is None:
        return {}
    owners = config_map["metadata"].get("ownerReferences") or []
    if owners and request.metadata.uid and all(one.get("uid") != request.metadata.uid for one in owners):
        return {}
    return config_map.get("data") or {}


def reported_error(data: Mapping[str, str]) -> str:
    """Return the error that the profiler or its sidecar reported in the output, or the last message."""
    try:
        status = yaml.safe_load(data.get(PROFILER_STATUS, ""))
    except yaml.YAMLError:
        status = None
    error = status.get("error") if isinstance(status, dict) else None
    return str(data.get(REPORTED_ERROR) or error or data.get("message") or "")


def generated_objects(text: str) -> GeneratedObjects:
    """Return the objects of a result in YAML. Raise `NoGraph` if it cannot be read or has no graph."""
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except yaml.YAMLError as error:
        raise NoGraph(f"{FINAL_CONFIG}: {' '.join(str(error).split())}") from None
    graphs = [one for one in documents if one.get("kind") == GRAPH]
    if not graphs or not isinstance(graphs[-1].get("spec"), dict):
        kinds = ", ".join(str(one.get("kind")) for one in documents) or "nothing"
        raise NoGraph(f"{FINAL_CONFIG}: has no {GRAPH} with a spec: it has {kinds}")
    others = [one for one in documents if one.get("kind") == "ConfigMap" and (one.get("metadata") or {}).get("name")]
    return GeneratedObjects(graphs[-1], tuple(others))


def final_objects(request: DynamoGraphDeploymentRequest, spec: RequestSpec, text: str) -> GeneratedObjects:
    """Return the objects to create: in the request's namespace, with its labels and the overrides of its specification.

    The graph is of version v1beta1. Raise `NoGraph` for a result or an override that cannot be used.
    """
    found = generated_objects(text)
    graph = found.graph if found.graph.get("apiVersion") in (V1ALPHA1, V1BETA1) else None
    if graph is None:
        raise NoGraph(f"{FINAL_CONFIG}: apiVersion {found.graph.get('apiVersion')!r} must be {V1BETA1} or {V1ALPHA1}")
    override = spec.overrides.dgd if spec.overrides is not None else None
    if override is not None:
        graph = overridden(graph, override)
    alpha = alpha_profiling(request, "deploymentOverrides")
    given = graph.get("metadata") or {}
    wanted = (override or {}).get("metadata") or {}
    # The profiler's own name would be that of every request with the same result.
    name = alpha.get("name") or wanted.get("name") or f"{request.metadata.name}-dgd"
    metadata: KubeObject = {"name": name, "namespace": request.metadata.namespace}
    metadata["labels"] = {**(given.get("labels") or {}), **(alpha.get("labels") or {}), **tracking_labels(request)}
    annotations = {**(given.get("annotations") or {}), **(alpha.get("annotations") or {})}
    if annotations:
        metadata["annotations"] = annotations
    graph = convert({**graph, "metadata": metadata}, V1BETA1)
    content: KubeObject = graph.get("spec") or {}
    if spec.runtime_version_override:
        for component in content.get("components") or ():
            component.setdefault("runtimeVersionOverride", spec.runtime_version_override)
    graph = {"apiVersion": V1BETA1, "kind": GRAPH, "metadata": graph["metadata"], "spec": content}
    try:
        decode(DynamoGraphDeployment, graph)
    except msgspec.ValidationError as error:
        raise NoGraph(f"generated {GRAPH}: {error}") from None
    return GeneratedObjects(graph, tuple(_tracked(request, one) for one in found.others))


def overridden(graph: KubeObject, override: KubeObject) -> KubeObject:
    """Return a graph with a partial graph merged into it, in the version of the latter.

    Of the metadata, only the name, labels and annotations are taken. Raise `NoGraph` for an override that is not of a
    graph or names components that the graph does not have.
    """
    version, path = override.get("apiVersion"), "spec.overrides.dgd"
    if override.get("kind") != GRAPH or version not in (V1ALPHA1, V1BETA1):
        what = f"{version} {override.get('kind')}"
        raise NoGraph(f"{path}: {what!r} must be a {GRAPH} of {V1BETA1} or {V1ALPHA1}")
    original = str(graph["apiVersion"])
    target = copy.deepcopy(convert(graph, version))
    spec: KubeObject = target.get("spec") or {}
    _check_topology(spec, override.get("spec") or {}, f"{path}.spec")
    target["spec"] = overlaid(spec, override.get("spec") or {}, APPENDED[version])
    given = override.get("metadata") or {}
    metadata = {name: given[name] for name in ("name", "labels", "annotations") if given.get(name)}
    target["metadata"] = overlaid(target.get("metadata") or {}, metadata)
    return convert(target, original)


def _check_topology(spec: KubeObject, override: KubeObject, path: str) -> None:
    for field in sorted(TOPOLOGY & override.keys()):
        known, wanted = (_names(value.get(field)) for value in (spec, override))
        unknown = sorted(wanted - known)
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            raise NoGraph(f"{path}.{field}: {', '.join(unknown)}: the generated graph has {names}")


def _names(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value)
    return {str(one.get("name")) for one in value or () if isinstance(one, dict)}


def _tracked(request: DynamoGraphDeploymentRequest, value: KubeObject) -> KubeObject:
    metadata = value["metadata"]
    labels = {**(metadata.get("labels") or {}), **tracking_labels(request)}
    kept: KubeObject = {"name": metadata["name"], "namespace": request.metadata.namespace, "labels": labels}
    if metadata.get("annotations"):
        kept["annotations"] = metadata["annotations"]
    return {"apiVersion": "v1", "kind": "ConfigMap", **value, "metadata": kept}
