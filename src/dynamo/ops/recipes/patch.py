"""Patches of a recipe: namespace, storage class, images and replicas, in copies of its objects. Pure."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.operator.validation.facts import part
from dynamo.ops.recipes.parts import GRAPH_KIND, RecipeFiles, SourcedObject
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

CLUSTER_KINDS = frozenset({"Namespace", "StorageClass", "PersistentVolume", "ClusterRole", "ClusterRoleBinding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePatch:
    """Changes that adapt a recipe to a cluster."""

    namespace: str | None = None
    storage_class: str | None = None
    images: Mapping[str, str] = field(default_factory=dict)
    """Image by component; the empty name replaces the images of all graphs."""
    tag: str | None = None
    """Tag of the images of graphs that keep their repository."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Replicas by component."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changes."""
        return not (self.namespace or self.storage_class or self.images or self.tag or self.replicas)


def pairs(flag: str, texts: list[str]) -> dict[str, str]:
    """Return `COMPONENT=VALUE` texts as a mapping; a text without `=` applies to every component. Raise `ConfigError`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not text or (equals and not (name and value)):
            raise ConfigError(f"{flag} {text!r}: expected COMPONENT=VALUE, or VALUE for all components")
        found[name if equals else ""] = value if equals else text
    return found


def counts(flag: str, texts: list[str]) -> dict[str, int]:
    """Return `COMPONENT=NUMBER` texts as a mapping. Raise `ConfigError`."""
    found = {}
    for name, value in pairs(flag, texts).items():
        if not name or not value.isdigit():
            raise ConfigError(f"{flag} {value}: expected COMPONENT=NUMBER")
        found[name] = int(value)
    return found


def patched(files: RecipeFiles, patch: RecipePatch) -> RecipeFiles:
    """Return a recipe with the changes. Raise `ConfigError` for a component that no graph has."""
    known = {name for one in files.graphs for name, _ in graph_components(one.value)}
    for name in {*patch.images, *patch.replicas} - {""}:
        if name not in known:
            raise ConfigError(f"{name}: no such component; the graph has {', '.join(sorted(known))}")

    def changed(one: SourcedObject) -> SourcedObject:
        value = copy.deepcopy(one.value)
        if patch.namespace and one.kind not in CLUSTER_KINDS:
            value.setdefault("metadata", {})["namespace"] = patch.namespace
        if patch.storage_class and one.kind == "PersistentVolumeClaim":
            value.setdefault("spec", {})["storageClassName"] = patch.storage_class
        if one.kind == GRAPH_KIND:
            for name, raw in graph_components(value):
                _patch_component(name, raw, patch)
            for claim in part(value, "spec").get("pvcs") or ():
                if patch.storage_class and claim.get("create"):
                    claim["storageClass"] = patch.storage_class
        return SourcedObject(one.file, value)

    return RecipeFiles(*(tuple(map(changed, role)) for role in (files.cache, files.deploy, files.perf)))


def graph_components(value: KubeObject) -> list[tuple[str, KubeObject]]:
    """Return the components of a graph, as they are stored, by name."""
    spec = part(value, "spec")
    if value.get("apiVersion") == V1ALPHA1:
        return list(part(spec, "services").items())
    return [(str(one.get("name")), one) for one in spec.get("components") or ()]


def _patch_component(name: str, raw: KubeObject, patch: RecipePatch) -> None:
    if name in patch.replicas:
        raw["replicas"] = patch.replicas[name]
    for container in _containers(raw):
        image = patch.images.get(name) or patch.images.get("")
        if image:
            container["image"] = image
        elif patch.tag and container.get("image"):
            container["image"] = with_tag(str(container["image"]), patch.tag)


def _containers(raw: KubeObject) -> list[dict[str, Any]]:
    alpha = part(raw, "extraPodSpec").get("mainContainer")
    beta = [one for one in part(raw, "podTemplate", "spec").get("containers") or () if one.get("name") == "main"]
    return ([alpha] if isinstance(alpha, dict) else []) + beta


def with_tag(image: str, tag: str) -> str:
    """Return an image with another tag, without its digest."""
    repository = image.partition("@")[0]
    folder, slash, last = repository.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}:{tag}"
