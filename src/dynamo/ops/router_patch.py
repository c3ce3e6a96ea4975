"""Router mode of a graph: sets it in the frontends' environment, and names what the mode needs of the workers. Pure."""

import copy
from collections.abc import Sequence

from dynamo.core.errors import ConfigError
from dynamo.operator.validation.views import MAIN
from dynamo.ops.recipes.parts import GRAPH_KIND, SourcedObject, components, flag_value, tokens_of
from dynamo.ops.recipes.patch import graph_components
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

MODE_VARIABLE, EVENTS_VARIABLE = "DYN_ROUTER_MODE", "DYN_ROUTER_USE_KV_EVENTS"
FLAG = "--router-mode"


def with_mode(
    objects: Sequence[SourcedObject], mode: str, *, uses_events: bool = True
) -> tuple[list[KubeObject], list[str]]:
    """Return copies of objects whose frontends use a mode, and notes. Raise `ConfigError` without a frontend.

    A flag in the frontend's arguments is replaced where it is one; otherwise the environment variable is set.
    """
    values, notes, count = [], [], 0
    for one in objects:
        value = copy.deepcopy(one.value)
        values.append(value)
        if one.kind != GRAPH_KIND:
            continue
        raw = dict(graph_components(value))
        for component in components(one):
            if component.type == "frontend":
                count += 1
                container = _container(raw[component.name], is_alpha=value.get("apiVersion") == V1ALPHA1)
                _set_mode(container, mode, uses_events=uses_events)
                if flag_value(tokens_of(component), FLAG) is not None and not _has_flag(container):
                    notes.append(
                        f"{component.name}: its script sets {FLAG}, which overrides {MODE_VARIABLE}; edit the script"
                    )
            elif component.is_worker and mode == "kv" and uses_events:
                words = tokens_of(component)
                if (
                    not {"dynamo.vllm", "dynamo.sglang"}.isdisjoint(words)
                    and flag_value(words, "--kv-events-config") is None
                ):
                    notes.append(f"{component.name}: publishes no KV events; add --kv-events-config")
                if "dynamo.trtllm" in words and not {"--publish-kv-events", "--publish-events-and-metrics"} & set(
                    words
                ):
                    notes.append(f"{component.name}: publishes no KV events; add --publish-kv-events")
    if not count:
        raise ConfigError("no component of type frontend in these manifests")
    return values, notes


def _container(raw: KubeObject, *, is_alpha: bool) -> KubeObject:
    """Return the main container of a component, made where it is absent."""
    if is_alpha:
        alpha: KubeObject = raw.setdefault("extraPodSpec", {}).setdefault("mainContainer", {})
        return alpha
    containers = raw.setdefault("podTemplate", {}).setdefault("spec", {}).setdefault("containers", [])
    found = next((one for one in containers if one.get("name") == MAIN), None)
    if found is None:
        found = {"name": MAIN}
        containers.append(found)
    main: KubeObject = found
    return main


def _set_mode(container: KubeObject, mode: str, *, uses_events: bool) -> None:
    for field in ("command", "args"):
        words = container.get(field)
        if isinstance(words, list):
            for at, word in enumerate(words):
                if word == FLAG and at + 1 < len(words):
                    words[at + 1] = mode
                elif str(word).startswith(f"{FLAG}="):
                    words[at] = f"{FLAG}={mode}"
    wanted = {MODE_VARIABLE: mode}
    if mode == "kv":
        wanted[EVENTS_VARIABLE] = "true" if uses_events else "false"
    kept = [one for one in container.get("env") or () if one.get("name") not in {MODE_VARIABLE, EVENTS_VARIABLE}]
    container["env"] = [*kept, *({"name": name, "value": value} for name, value in wanted.items())]


def _has_flag(container: KubeObject) -> bool:
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return any(word == FLAG or str(word).startswith(f"{FLAG}=") for word in words)
