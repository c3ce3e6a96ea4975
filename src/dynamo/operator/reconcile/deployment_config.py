"""Configuration of components in the variable DYN_DEPLOYMENT_CONFIG, with which graphs of the first releases were made. Pure.

It is a JSON object with an entry for each component: `ServiceArgs` with `workers`, the replicas of a component that states
none, and `resources`, which replace the requests and limits of its container. A frontend gets its port in its entry.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import HTTP_PORT, MAIN
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

VARIABLE = "DYN_DEPLOYMENT_CONFIG"
RESOURCE_NAMES = {"cpu": "cpu", "memory": "memory", "gpu": "nvidia.com/gpu"}


class ConfigResources(msgspec.Struct):
    """Resources of a container, as quantities."""

    cpu: str | None = None
    memory: str | None = None
    gpu: str | None = None
    custom: dict[str, str] | None = None


class ServiceArguments(msgspec.Struct):
    """Settings that the operator reads."""

    workers: int | None = None
    resources: ConfigResources | None = None


class ServiceEntry(msgspec.Struct):
    """Settings of one component; those of the component's own program are not read."""

    arguments: ServiceArguments | None = msgspec.field(name="ServiceArgs", default=None)


def with_deployment_config(graph: DynamoGraphDeployment) -> DynamoGraphDeployment:
    """Return a graph with the replicas, resources and ports that the variable gives its components.

    Raise `WorkloadError` for a value that is not such an object.
    """
    components = [_configured(one, graph.spec.env or ()) for one in graph.spec.components or ()]
    if all(one is known for one, known in zip(components, graph.spec.components or (), strict=True)):
        return graph
    return msgspec.structs.replace(graph, spec=msgspec.structs.replace(graph.spec, components=components))


def _configured(component: ComponentSpec, graph_env: Sequence[KubeObject]) -> ComponentSpec:
    template = copy.deepcopy(component.pod_template or {})
    containers: list[KubeObject] = template.setdefault("spec", {}).setdefault("containers", [])
    main: KubeObject = next((one for one in containers if one.get("name") == MAIN), {"name": MAIN})
    known = {one["name"]: one for one in (*graph_env, *(main.get("env") or ()))}
    text = known.get(VARIABLE, {}).get("value")
    if not text:
        return component
    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, Any] | None])
        name = _entry_name(component, entries)
        entry = msgspec.convert(entries.get(name) or {}, ServiceEntry)
    except msgspec.DecodeError as error:
        path = f"spec.components[{component.name}].podTemplate.spec.containers[{MAIN}].env[{VARIABLE}]"
        raise WorkloadError(f"{path}: {error}") from None
    if main not in containers:
        containers.insert(0, main)
    if component.type == "frontend" and entries.get(name) is not None:
        value = msgspec.json.encode({**entries, name: {**(entries[name] or {}), "port": HTTP_PORT}}, order="sorted")
        own = [one for one in main.get("env") or () if one["name"] != VARIABLE]
        main["env"] = [*own, {"name": VARIABLE, "value": value.decode()}]
    arguments = entry.arguments or ServiceArguments()
    _set_resources(main, arguments.resources or ConfigResources())
    replicas = arguments.workers if component.replicas is None else component.replicas
    return msgspec.structs.replace(component, replicas=replicas, pod_template=template)


def _entry_name(component: ComponentSpec, entries: Mapping[str, object]) -> str:
    """Return the name of a component's entry: its own, or for a frontend one that is named so."""
    if entries.get(component.name) is not None or component.type != "frontend":
        return component.name
    return next((one for one in entries if one.lower() == "frontend"), component.name)


def _set_resources(main: KubeObject, given: ConfigResources) -> None:
    amounts = {RESOURCE_NAMES[name]: getattr(given, name) for name in RESOURCE_NAMES}
    found = {name: amount for name, amount in {**amounts, **(given.custom or {})}.items() if amount}
    if found:
        resources = main.get("resources") or {}
        main["resources"] = {
            **resources,
            **{side: {**(resources.get(side) or {}), **found} for side in ("limits", "requests")},
        }
