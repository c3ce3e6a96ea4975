"""Kubernetes manifests from files: reading, and the order in which they are applied. Reads files, decides the rest."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dynamo import __version__
from dynamo.core.errors import ConfigError
from dynamo.operator.conversion.convert import convert
from dynamo.operator.defaulting import with_defaults
from dynamo.operator.reconcile.component import component_objects
from dynamo.operator.reconcile.graph import graph_plan
from dynamo.operator.reconcile.graph_pass import ObservedGraph
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.validation.admission import review
from dynamo.operator.validation.facts import AdmissionFacts
from dynamo.ops.recipes.parts import SourcedObject
from dynamo.protocols.kubernetes.common import GROUP, V1BETA1, KubeObject, decode
from dynamo.protocols.kubernetes.crds import find_kind, version_schema
from dynamo.protocols.kubernetes.schema import without_nulls
from dynamo.protocols.kubernetes.v1beta1 import DynamoComponentDeployment, DynamoGraphDeployment

NEVER = "1970-01-01T00:00:00Z"
"""Time of a status that is not written."""
SUFFIXES = (".yaml", ".yml", ".json")
TEMPLATE_MARK = "{{"
"""Begins an expression of Helm and other templates."""
FIRST = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "Secret", "ConfigMap", "PersistentVolumeClaim")
"""Kinds that other objects refer to, in the order of their creation."""


class Manifest(SourcedObject):
    """An object of a file that can be checked and applied."""

    __slots__ = ()

    @property
    def api_version(self) -> str:
        """Group and version of the object."""
        return str(self.value.get("apiVersion") or "")

    @property
    def label(self) -> str:
        """Kind and name, as messages show them."""
        return f"{self.kind or 'object'}/{self.name or '?'}"

    @property
    def applied(self) -> KubeObject:
        """The object as it is sent: a server-side apply accepts no nulls."""
        found = find_kind(self.api_version, self.kind)
        if found is None:
            return self.value
        applied: KubeObject = without_nulls(self.value, version_schema(found[0].kind, found[1]))
        return applied

    @property
    def is_ours(self) -> bool:
        """Whether the object is of the group whose rules are known here."""
        return self.api_version.partition("/")[0] == GROUP


@dataclass(slots=True)
class ManifestFiles:
    """What files contain."""

    manifests: list[Manifest] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Files that cannot be read, one line each."""
    skipped: list[str] = field(default_factory=list)
    """Files of a directory that are no manifests, with the reason."""


def read_manifests(names: Sequence[str]) -> list[Manifest]:
    """Return the objects of files, of directories (their YAML and JSON files) and, for `-`, of the standard input.

    Files of a directory without an object are named on standard error. Raise `ConfigError` for a missing file, for one that
    is not YAML, and where there is no object at all.
    """
    found = read_files(names)
    if found.problems:
        more = f" (and {len(found.problems) - 1} more files)" if len(found.problems) > 1 else ""
        raise ConfigError(f"{found.problems[0]}{more}")
    print_skipped(found)
    if not found.manifests:
        raise ConfigError(f"{' '.join(names)}: no Kubernetes object")
    return found.manifests


def print_skipped(found: ManifestFiles) -> None:
    """Name the files that are no manifests on standard error."""
    for text in found.skipped:
        sys.stderr.write(f"skipped: {text}\n")


def read_files(names: Sequence[str]) -> ManifestFiles:
    """Return what files, directories and the standard input contain. Raise `ConfigError` without a name."""
    if not names:
        raise ConfigError("FILE: expected at least one manifest, directory or - for the standard input")
    found = ManifestFiles()
    for name in names:
        if name == "-":
            _add(found, "standard input", sys.stdin.read, is_named=True)
        elif Path(name).is_dir():
            files = sorted(one for one in Path(name).rglob("*") if one.suffix in SUFFIXES)
            for file in files:
                _add(found, str(file), partial(file.read_text, encoding="utf-8"), is_named=False)
        else:
            _add(found, name, partial(Path(name).read_text, encoding="utf-8"), is_named=True)
    return found


def _add(found: ManifestFiles, file: str, read: Callable[[], str], *, is_named: bool) -> None:
    """Add the objects of one file, or why there are none; one that was not named may be something else."""
    try:
        text = read()
    except (OSError, UnicodeDecodeError) as error:
        found.problems.append(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return
    if not is_named and TEMPLATE_MARK in text:
        found.skipped.append(f"{file}: a template ({TEMPLATE_MARK})")
        return
    try:
        objects = list(_objects(file, text))
    except ConfigError as error:
        found.problems.append(str(error))
        return
    if objects and not is_named and not any(map(_is_manifest, objects)):
        found.skipped.append(f"{file}: no apiVersion and kind")
        return
    found.manifests += [Manifest(file, one) for one in objects]


def _is_manifest(value: KubeObject) -> bool:
    """Return whether a document is a Kubernetes object, perhaps one whose kind is missing."""
    return "kind" in value or ("apiVersion" in value and ("metadata" in value or "spec" in value))


def _objects(file: str, text: str) -> Iterable[KubeObject]:
    try:
        documents: list[Any] = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        at = f" line {where.line + 1}" if where else ""
        raise ConfigError(f"{file}:{at} not YAML: {getattr(error, 'problem', None) or error}") from None
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            raise ConfigError(f"{file}: a document is a {type(document).__name__}; expected an object")
        if str(document.get("kind") or "").endswith("List") and isinstance(document.get("items"), list):
            yield from (one for one in document["items"] if isinstance(one, dict))
        else:
            yield document


def check_manifests(manifests: Iterable[Manifest], facts: AdmissionFacts) -> tuple[list[str], list[str], int]:
    """Return the problems, the warnings, and the number of objects that were checked."""
    problems: list[str] = []
    warnings: list[str] = []
    checked = 0
    for one in manifests:
        if not all(one.value.get(name) and isinstance(one.value[name], str) for name in ("apiVersion", "kind")):
            problems.append(f"{one.file}: {one.label}: apiVersion and kind are required, each a string")
        elif one.is_ours:
            checked += 1
            found = review(one.value, facts=facts)
            problems += [f"{one.file}: {one.label}: {problem}" for problem in found.problems]
            warnings += [f"{one.file}: {one.label}: {text}" for text in found.warnings]
    return problems, warnings, checked


class RenderedManifest(NamedTuple):
    """Objects that one object requires."""

    objects: list[KubeObject]
    warnings: Sequence[str] = ()
    """Fields that have no effect."""


def rendered(manifest: Manifest, settings: OperatorSettings, namespace: str, facts: ClusterFacts) -> RenderedManifest:
    """Return the objects that a graph or a component requires; any other object as it is.

    Raise `WorkloadError` with the file.
    """
    if not manifest.is_ours or manifest.kind not in ("DynamoGraphDeployment", "DynamoComponentDeployment"):
        return RenderedManifest([manifest.value])
    warnings: list[str] = []
    value = with_defaults(convert(manifest.applied, V1BETA1), None, operator_version=__version__)
    value["metadata"].setdefault("namespace", namespace)
    if manifest.kind == "DynamoComponentDeployment":
        found = [value]
    else:
        graph = decode(DynamoGraphDeployment, value)
        plan = graph_plan(graph, ObservedGraph(), settings, facts, NEVER)
        found = [*plan.create, *plan.joint, *plan.apply]
        if not found:  # The cluster cannot run it; the plan's event says why.
            raise WorkloadError(f"{manifest.file}: {manifest.label}: {plan.events[0].message}")
        events = [one.message for one in plan.events if one.type == "Warning"]
        warnings = [f"{manifest.file}: {manifest.label}: {text}" for text in events]
    deployed = [decode(DynamoComponentDeployment, one) for one in found if one["kind"] == "DynamoComponentDeployment"]
    try:
        made = [made for one in deployed for made in component_objects(one, settings, facts)]
    except WorkloadError as error:
        raise WorkloadError(f"{manifest.file}: {manifest.label}: {error}") from None
    return RenderedManifest(found + made, warnings)


def in_order(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return manifests in the order of their creation: what others refer to first, otherwise as the files have them."""
    return sorted(manifests, key=lambda one: FIRST.index(one.kind) if one.kind in FIRST else len(FIRST))
