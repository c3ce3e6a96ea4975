"""CustomResourceDefinitions: their validation, and the resources that they add."""

import re
from typing import Any

from tests.cluster.kubernetes.api import Api
from tests.cluster.kubernetes.errors import Object, cause, invalid_value, required
from tests.cluster.kubernetes.metadata import METADATA, now
from tests.cluster.kubernetes.resources import Resource
from tests.cluster.kubernetes.rules import check_rules, rules_of
from tests.cluster.kubernetes.schema import Schema

CRDS = ("apiextensions.k8s.io", "customresourcedefinitions")
PROTECTED, APPROVAL = (".k8s.io", ".kubernetes.io"), "api-approved.kubernetes.io"
TYPED = {"object", "array", "string", "integer", "number", "boolean"}


class CustomResources:
    """Keeps the registry as the stored definitions say."""

    def __init__(self, api: Api) -> None:
        self._api = api
        api.after_write[CRDS] = self._changed
        api.extra_checks[CRDS] = check_definition

    def _changed(self, stored: Object | None, before: Object | None) -> None:
        old = before or stored
        assert old is not None
        key = old["spec"]["group"], old["spec"]["names"]["plural"]
        if stored is None:
            for item in self._api.storage.items(key):
                self._api.storage.remove(key, (item["metadata"].get("namespace", ""), item["metadata"]["name"]))
            self._api.registry.remove(key)
            return
        if before is None or stored["spec"] != before["spec"]:
            self._api.registry.remove(key)
            for resource, served in resources_of(stored):
                self._api.registry.add(resource, served=served)
            self._establish(stored)

    def _establish(self, stored: Object) -> None:
        names = {**stored["spec"]["names"]}
        conditions = [
            {"type": kind, "status": "True", "reason": reason, "message": text, "lastTransitionTime": now()}
            for kind, reason, text in (
                ("NamesAccepted", "NoConflicts", "no conflicts found"),
                ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
            )
        ]  # fmt: skip
        versions = [one["name"] for one in stored["spec"]["versions"] if one["storage"]]
        old = (stored.get("status") or {}).get("storedVersions") or []
        status = {
            "acceptedNames": names,
            "conditions": conditions,
            "storedVersions": [*old, *(v for v in versions if v not in old)],
        }
        self._api.storage.put(CRDS, {**stored, "status": status})


def resources_of(definition: Object) -> list[tuple[Resource, bool]]:
    """Return one resource for each version, and whether it is served."""
    spec = definition["spec"]
    names = spec["names"]
    storage = next(one["name"] for one in spec["versions"] if one["storage"])
    found = []
    for version in spec["versions"]:
        raw = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        schema = Schema(raw, rules_of)
        declared = schema.properties.pop("metadata", None)
        for name in ("apiVersion", "kind"):
            schema.properties.setdefault(name, Schema({"type": "string"}))
        schema.properties["metadata"] = METADATA
        if declared and len(declared.raw) > 1:
            combined = Schema({**METADATA.raw})
            combined.junctors = {"allOf": [declared]}
            schema.properties["metadata"] = combined
        subresources = version.get("subresources") or {}
        resource = Resource(
            spec["group"], version["name"], names["plural"], names["kind"], spec["scope"] == "Namespaced",
            tuple(names.get("shortNames") or ()), "status" in subresources, subresources.get("scale"), storage, schema,
            custom=True, categories=tuple(names.get("categories") or ()),
            columns=tuple(version.get("additionalPrinterColumns") or ()), definition=definition["metadata"]["name"],
        )  # fmt: skip
        found.append((resource, version["served"]))
    return found


def check_definition(item: Object, live: Object | None) -> list[Object]:
    """Return the causes for which a definition is refused."""
    spec = item.get("spec") or {}
    names = spec.get("names") or {}
    causes = [required(f"spec.names.{name}") for name in ("plural", "kind") if not names.get(name)]
    if not spec.get("group"):
        causes.append(required("spec.group"))
    causes += _check_approval(item["metadata"], str(spec.get("group") or ""))
    if spec.get("scope") not in {"Namespaced", "Cluster"}:
        causes.append(required("spec.scope"))
    wanted = f"{names.get('plural')}.{spec.get('group')}"
    if item["metadata"]["name"] != wanted:
        causes.append(
            invalid_value("metadata.name", item["metadata"]["name"], 'must be spec.names.plural+"."+spec.group')
        )
    if names.get("plural", "").lower() != names.get("plural", ""):
        causes.append(invalid_value("spec.names.plural", names["plural"], "must be lower case"))
    versions = spec.get("versions") or []
    if sum(bool(one.get("storage")) for one in versions) != 1:
        causes.append(
            invalid_value("spec.versions", "object", "must have exactly one version marked as storage version")
        )
    if live and live["spec"]["names"].get("kind") != names.get("kind"):
        causes.append(invalid_value("spec.names.kind", names.get("kind"), "field is immutable"))
    if live and live["spec"]["scope"] != spec.get("scope"):
        causes.append(invalid_value("spec.scope", spec.get("scope"), "field is immutable"))
    if names.get("kind"):
        names.setdefault("singular", names["kind"].lower())
        names.setdefault("listKind", f"{names['kind']}List")
    conversion = spec.setdefault("conversion", {"strategy": "None"})
    if conversion.get("strategy") == "Webhook" and not (conversion.get("webhook") or {}).get(
        "conversionReviewVersions"
    ):
        causes.append(required("spec.conversion.webhook.conversionReviewVersions"))
    for index, version in enumerate(versions):
        at = f"spec.versions[{index}].schema.openAPIV3Schema"
        raw = (version.get("schema") or {}).get("openAPIV3Schema")
        if not raw:
            causes.append(required(at, "schemas are required"))
            continue
        causes += check_structural(raw, at if len(versions) > 1 else "spec.validation.openAPIV3Schema")
    return causes


def _check_approval(metadata: Object, group: str) -> list[Object]:
    """Return the causes for which a definition in a group of the Kubernetes project is refused: it names its approval."""
    if not f".{group}".endswith(PROTECTED):
        return []
    path, value = f"metadata.annotations[{APPROVAL}]", (metadata.get("annotations") or {}).get(APPROVAL)
    if not value:
        return [required(path, f'protected groups must have approval annotation "{APPROVAL}"')]
    if not value.startswith(("unapproved", "https://", "http://")):
        return [invalid_value(path, value, 'must be a URL or begin with "unapproved"')]
    return []


def check_structural(raw: Any, path: str, *, is_nested_logic: bool = False) -> list[Object]:
    """Return where a schema is not structural, or has rules that do not compile."""
    causes: list[Object] = []
    typed = raw.get("type")
    if (
        not typed
        and not raw.get("x-kubernetes-int-or-string")
        and not raw.get("x-kubernetes-preserve-unknown-fields")
        and not is_nested_logic
    ):
        causes.append(
            required(
                f"{path}.type",
                "must not be empty for specified " + ("array items" if path.endswith("items") else "object fields"),
            )
        )
    if typed and typed not in TYPED:
        causes.append(cause("FieldValueNotSupported", f'Unsupported value: "{typed}"', f"{path}.type"))
    if raw.get("properties") and raw.get("additionalProperties"):
        causes.append(
            cause(
                "FieldValueForbidden",
                "Forbidden: additionalProperties and properties are mutual exclusive",
                f"{path}.additionalProperties",
            )
        )
    if typed == "array" and not raw.get("items") and not is_nested_logic:
        causes.append(required(f"{path}.items", "must be specified"))
    if raw.get("additionalProperties") is False:
        causes.append(cause("FieldValueForbidden", "Forbidden: must not be false", f"{path}.additionalProperties"))
    if raw.get("pattern"):
        try:
            re.compile(raw["pattern"])
        except re.error as error:
            causes.append(
                invalid_value(f"{path}.pattern", raw["pattern"], f"must be a valid regular expression: {error}")
            )
    causes += _check_list_type(raw, path)
    if "default" in raw and not is_nested_logic:
        schema = Schema(raw)
        problems = schema.validate(raw["default"], f"{path}.default")
        causes += problems
    if raw.get("x-kubernetes-validations") and not causes:
        causes += check_rules(raw, path)
    for name, one in (raw.get("properties") or {}).items():
        if path.endswith("openAPIV3Schema") and name == "metadata":
            continue
        causes += check_structural(one, f"{path}.properties[{name}]", is_nested_logic=is_nested_logic)
    for name in ("items", "additionalProperties"):
        if isinstance(raw.get(name), dict):
            causes += check_structural(raw[name], f"{path}.{name}", is_nested_logic=is_nested_logic)
    for name in ("allOf", "anyOf", "oneOf"):
        for index, one in enumerate(raw.get(name) or []):
            causes += check_structural(one, f"{path}.{name}[{index}]", is_nested_logic=True)
    return causes


def _check_list_type(raw: Object, path: str) -> list[Object]:
    keys = raw.get("x-kubernetes-list-map-keys") or []
    if raw.get("x-kubernetes-list-type") != "map":
        return (
            [
                cause(
                    "FieldValueForbidden",
                    "Forbidden: must be empty if x-kubernetes-list-type is not map",
                    f"{path}.x-kubernetes-list-map-keys",
                )
            ]
            if keys
            else []
        )
    items = raw.get("items") or {}
    causes = (
        []
        if keys
        else [required(f"{path}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map")]
    )
    for key in keys:
        known = (items.get("properties") or {}).get(key)
        if known is None:
            causes.append(
                invalid_value(
                    f"{path}.x-kubernetes-list-map-keys", keys, "entries must all be names of item properties"
                )
            )
        elif key not in (items.get("required") or []) and "default" not in known:
            causes.append(
                required(
                    f"{path}.items.properties[{key}].default",
                    "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
                )
            )
    return causes
