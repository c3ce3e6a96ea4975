"""Parts of a recipe: what its manifests contain that other manifests and the cluster must agree with. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.validation.facts import part
from dynamo.operator.validation.views import MAIN, ComponentView, components_of
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

GRAPH_KIND = "DynamoGraphDeployment"
PLACEHOLDER = re.compile(
    r"\byour-[\w-]+|<[A-Za-z][\w ./-]*>|\$\{[A-Z_]+\}|\bmy-(?:tag|registry)\b|\b(?:REPLACE|TO[D]O|CHANGEME)\w*"
)
MODEL_FLAGS = ("--served-model-name", "--model", "--model-path")


@dataclass(frozen=True, slots=True)
class SourcedObject:
    """A Kubernetes object and the file that contains it."""

    file: str
    value: KubeObject

    @property
    def kind(self) -> str:
        """Kind of the object."""
        return str(self.value.get("kind") or "")

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(part(self.value, "metadata").get("name") or "")


@dataclass(frozen=True, slots=True)
class RecipeFiles:
    """The objects of a recipe, by their role."""

    cache: tuple[SourcedObject, ...]
    deploy: tuple[SourcedObject, ...]
    perf: tuple[SourcedObject, ...]

    @property
    def all(self) -> tuple[SourcedObject, ...]:
        """Return all objects in the order in which they are applied."""
        return (*self.cache, *self.deploy, *self.perf)

    @property
    def graphs(self) -> tuple[SourcedObject, ...]:
        """Return the graphs."""
        return tuple(one for one in self.deploy if one.kind == GRAPH_KIND)


def components(graph: SourcedObject) -> list[ComponentView]:
    """Return the components of a graph in either version."""
    return components_of(part(graph.value, "spec"), is_alpha=graph.value.get("apiVersion") == V1ALPHA1)


def gpu_total(files: RecipeFiles) -> int:
    """Return the GPUs of all replicas of all graphs."""
    return sum(
        one.gpus * one.replicas_or_default * (one.node_count or 1)
        for graph in files.graphs
        for one in components(graph)
    )


def main_container(component: ComponentView) -> KubeObject:
    """Return the main container of a component in either version."""
    if component.is_alpha:
        return part(component.raw, "extraPodSpec", "mainContainer")
    containers = part(component.raw, "podTemplate", "spec").get("containers") or ()
    return next((one for one in containers if one.get("name") == MAIN), {})


def tokens_of(component: ComponentView) -> tuple[str, ...]:
    """Return the words of a component's command, those of a script as a shell would split them."""
    return CommandLine.of(main_container(component)).tokens


def flag_value(words: Sequence[str], *flags: str) -> str | None:
    """Return the last value of a flag."""
    found = None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = value if equals else words[at + 1] if at + 1 < len(words) else found
    return found


def engine_gpus(component: ComponentView) -> int | None:
    """Return the GPUs that the engine's parallel sizes need; None where a size is not a number."""
    words = tokens_of(component)
    sizes = [
        flag_value(words, "--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        flag_value(words, "--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    ]
    if "--enable-dp-attention" not in words:
        sizes.append(flag_value(words, "--data-parallel-size", "-dp", "--dp-size", "--dp"))
    total = 1
    for size in sizes:
        if size is not None and not size.isdigit():
            return None
        total *= int(size or 1)
    return total


def served_models(files: RecipeFiles) -> set[str]:
    """Return the names under which the graphs serve their models."""
    found = set()
    for graph in files.graphs:
        for one in components(graph):
            words = tokens_of(one)
            name = next((value for flag in MODEL_FLAGS if (value := flag_value(words, flag))), None)
            if name is not None:
                found.add(name)
    return found


def environment(value: Any) -> dict[str, str]:
    """Return the variables of the first container of a job."""
    containers = part(value, "spec", "template", "spec").get("containers") or [{}]
    return {str(one["name"]): str(one.get("value") or "") for one in containers[0].get("env") or () if "name" in one}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar of an object with its path."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from walk(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from walk(one, f"{path}[{index}]")
    else:
        yield path, value


def values_at(value: Any, suffix: str) -> list[str]:
    """Return the texts whose path ends with a key."""
    return [str(one) for path, one in walk(value) if path.endswith(suffix) and one is not None]


def images(value: KubeObject) -> list[str]:
    """Return the images of an object."""
    return [one for one in values_at(value, "image") if one]


def claims_used(value: KubeObject) -> set[str]:
    """Return the claims that an object mounts."""
    found = {*values_at(value, "persistentVolumeClaim.claimName"), *values_at(value, "compilationCache.pvcName")}
    for one in part(value, "spec").get("pvcs") or ():
        if not one.get("create"):
            found.add(str(one.get("name")))
    return found


def claims_made(files: RecipeFiles) -> set[str]:
    """Return the claims that the recipe creates."""
    found = {one.name for one in files.all if one.kind == "PersistentVolumeClaim"}
    for graph in files.graphs:
        found |= {str(one.get("name")) for one in part(graph.value, "spec").get("pvcs") or () if one.get("create")}
    return found


def secrets_used(value: KubeObject) -> set[str]:
    """Return the secrets that an object refers to."""
    suffixes = ("secretRef.name", "secretKeyRef.name", "envFromSecret", "secret.secretName")
    return {name for suffix in suffixes for name in values_at(value, suffix)}
