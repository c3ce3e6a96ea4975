"""Check of one object by its schema and by the admission rules of its kind."""

from dynamo.operator.validation import requests
from dynamo.operator.validation.component import check_component, check_component_update
from dynamo.operator.validation.facts import AdmissionFacts, Findings, part, spec_of
from dynamo.operator.validation.graph import check_graph, check_graph_creation, check_graph_update
from dynamo.operator.validation.views import ComponentView, alpha_component, beta_component
from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.crds import BY_KIND, find_kind, version_schema
from dynamo.protocols.kubernetes.schema import Schema, problems

ALPHA = "v1alpha1"
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA: Schema = {
    "type": "object",
    "properties": {"name": TEXT, "generateName": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS},
    "x-kubernetes-preserve-unknown-fields": True,
}
"""Of metadata, the fields that the rules read; schemas of custom resources do not describe it."""


def review(value: KubeObject, old: KubeObject | None = None, facts: AdmissionFacts | None = None) -> Findings:
    """Return the problems and warnings of an object, and of the change from `old`, which has the same version.

    An object that is being deleted is not checked: a rule must not prevent that its finalizers are removed.
    """
    found = Findings()
    named = find_kind(str(value.get("apiVersion") or ""), str(value.get("kind") or ""))
    if named is None:
        found.refuse("apiVersion" if str(value.get("kind")) in BY_KIND else "kind", _unknown(value))
        return found
    if part(value, "metadata").get("deletionTimestamp"):
        return found
    kind, version = named[0].kind, named[1]
    if not isinstance(value.get("metadata"), dict) or not (
        value["metadata"].get("name") or value["metadata"].get("generateName")
    ):
        found.refuse("metadata.name", "is required")
    metadata = {name: one for name, one in part(value, "metadata").items() if one is not None}
    of_metadata = problems({"metadata": metadata}, {"type": "object", "properties": {"metadata": METADATA}})
    for one in (*of_metadata, *problems(value, version_schema(kind, version))):
        found.refuse(one.path, one.reason)
    if found.problems:
        return found  # The rules assume the types of the schema.
    known = facts or AdmissionFacts()
    _check(kind, value, known, found, is_alpha=version == ALPHA)
    if old is None:
        if kind == "DynamoGraphDeployment":
            check_graph_creation(value, known, found)
    else:
        # What the stored object already has does not prevent a change: a newer operator may have more rules.
        before = Findings()
        _check(kind, old, known, before, is_alpha=version == ALPHA)
        found.problems = [one for one in found.problems if one not in before.problems]
        _check_update(kind, value, old, known, found, is_alpha=version == ALPHA)
    found.problems = list(dict.fromkeys(found.problems))
    return found


def _unknown(value: KubeObject) -> str:
    kind = BY_KIND.get(str(value.get("kind")))
    if kind is None:
        return f"{value.get('kind')!r} is not a kind of {GROUP}; these are {', '.join(BY_KIND)}"
    versions = " and ".join(f"{GROUP}/{version}" for version in kind.versions)
    return f"{value.get('apiVersion')!r} is not a version of {kind.kind}, which has {versions}"


def _check(kind: str, value: KubeObject, facts: AdmissionFacts, found: Findings, *, is_alpha: bool) -> None:
    if kind == "DynamoGraphDeployment":
        check_graph(value, facts, found, is_alpha=is_alpha)
    elif kind == "DynamoComponentDeployment":
        check_component(_component(value, is_alpha=is_alpha), found, uses_grove=False)
    elif kind == "DynamoGraphDeploymentRequest":
        requests.check_request(value, found, is_alpha=is_alpha)
    elif kind == "DynamoGraphDeploymentScalingAdapter":
        requests.check_adapter(value, found, is_alpha=is_alpha)
    elif kind == "DynamoModel":
        requests.check_model(value, found)
    elif kind == "DynamoCheckpoint":
        requests.check_checkpoint(value, found)


def _check_update(
    kind: str, value: KubeObject, old: KubeObject, facts: AdmissionFacts, found: Findings, *, is_alpha: bool
) -> None:
    if kind == "DynamoGraphDeployment":
        check_graph_update(value, old, facts, found, is_alpha=is_alpha)
    elif kind == "DynamoComponentDeployment":
        new_view, old_view = _component(value, is_alpha=is_alpha), _component(old, is_alpha=is_alpha)
        check_component_update(new_view, old_view, found, may_scale=True)
        before = spec_of(old).get("backendFramework")
        if before and spec_of(value).get("backendFramework") != before:
            found.refuse("spec.backendFramework", "is immutable")
    elif kind == "DynamoGraphDeploymentRequest":
        requests.check_request_update(value, old, found, is_alpha=is_alpha)
    elif kind == "DynamoGraphDeploymentScalingAdapter":
        requests.check_adapter_update(value, old, found)
    elif kind == "DynamoModel":
        requests.check_model_update(value, old, found)
    elif kind == "DynamoCheckpoint":
        requests.check_checkpoint_update(value, old, found)


def _component(value: KubeObject, *, is_alpha: bool) -> ComponentView:
    name = str(part(value, "metadata").get("name") or "")
    make = alpha_component if is_alpha else beta_component
    return make(spec_of(value), "spec", name)
