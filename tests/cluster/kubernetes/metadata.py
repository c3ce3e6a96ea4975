"""Metadata of objects: names, system fields, and their changes on create, update and delete. Pure."""

import re
import secrets
import uuid
from datetime import UTC, datetime
from typing import Any

from tests.cluster.kubernetes.errors import Object, cause, forbidden_field, invalid_value, required
from tests.cluster.kubernetes.resources import Resource
from tests.cluster.kubernetes.schema import Schema

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
ORPHAN, FOREGROUND = "orphan", "foregroundDeletion"
FINALIZERS = {"Background": "", "Orphan": ORPHAN, "Foreground": FOREGROUND}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OWNER = {
    "type": "object", "required": ["apiVersion", "kind", "name", "uid"], "x-kubernetes-map-type": "atomic",
    "properties": {
        **{name: {"type": "string"} for name in ("apiVersion", "kind", "name", "uid")},
        "controller": {"type": "boolean"}, "blockOwnerDeletion": {"type": "boolean"},
    },
}  # fmt: skip
METADATA = Schema({
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in (
            "name", "namespace", "generateName", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "selfLink")},
        "labels": STRINGS, "annotations": STRINGS,
        "generation": {"type": "integer"}, "deletionGracePeriodSeconds": {"type": "integer"},
        "finalizers": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
        "ownerReferences": {
            "type": "array", "items": OWNER, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["uid"]},
        "managedFields": {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    },
})  # fmt: skip


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def generated_name(prefix: str) -> str:
    """Return a name as generateName makes it: the prefix, cut to 58 characters, and five letters."""
    return prefix[:58] + "".join(secrets.choice(SUFFIX) for _ in range(5))


def start(item: Object, resource: Resource) -> None:
    """Set the system fields of a new object in place."""
    metadata = item["metadata"]
    for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion", "selfLink", "generation"):
        metadata.pop(name, None)
    metadata["uid"] = str(uuid.uuid4())
    metadata["creationTimestamp"] = now()
    if resource.has_generation:
        metadata["generation"] = 1


def carry_over(item: Object, live: Object, resource: Resource, subresource: str) -> None:
    """Restore, in place, the fields that an update must not change."""
    metadata, before = item["metadata"], live["metadata"]
    for name in (
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "selfLink",
    ):
        if name in before:
            metadata[name] = before[name]
        else:
            metadata.pop(name, None)
    if subresource == "status":
        for name in [one for one in item if one not in {"status", "metadata", "apiVersion", "kind"}]:
            del item[name]
        item.update({name: one for name, one in live.items() if name not in {"status", "metadata"}})
        item["metadata"] = {**before, "managedFields": metadata.get("managedFields", before.get("managedFields"))}
    elif resource.status:
        item.pop("status", None)
        if "status" in live:
            item["status"] = live["status"]
    if resource.has_generation and _specified(item, resource) != _specified(live, resource):
        metadata = item["metadata"]
        metadata["generation"] = before.get("generation", 0) + 1


def _specified(item: Object, resource: Resource) -> Object:
    """Return the part whose change is a new generation."""
    outside = {"metadata", "status"} if resource.status else {"metadata"}
    if not resource.custom and "spec" in item:
        return {"spec": item["spec"]}
    return {name: one for name, one in item.items() if name not in outside}


def mark_deleted(item: Object, resource: Resource, policy: str, grace: int) -> Object:
    """Return the object as it is while its finalizers run."""
    metadata = {**item["metadata"], "deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
    if resource.has_generation:
        metadata["generation"] = metadata.get("generation", 0) + 1
    metadata["finalizers"] = with_policy(metadata.get("finalizers") or [], policy)
    if not metadata["finalizers"]:
        del metadata["finalizers"]
    return {**item, "metadata": metadata}


def with_policy(finalizers: list[str], policy: str) -> list[str]:
    """Return the finalizers of an object that is deleted with a propagation policy."""
    kept = [one for one in finalizers if one not in {ORPHAN, FOREGROUND}] if policy else list(finalizers)
    return [*kept, FINALIZERS[policy]] if FINALIZERS.get(policy) else kept


def check(item: Object, resource: Resource, live: Object | None) -> list[Object]:
    """Return what is wrong with the metadata of an object."""
    metadata = item["metadata"]
    causes: list[Object] = []
    if live is None:
        causes += _check_name(metadata.get("name", ""), resource)
    for key, value in (metadata.get("labels") or {}).items():
        causes += check_key(key, "metadata.labels") + check_label(value, "metadata.labels")
    size = 0
    for key, value in (metadata.get("annotations") or {}).items():
        causes += check_key(key.lower(), "metadata.annotations")
        size += len(key) + len(value)
    if size > 256 * 1024:
        causes.append(cause("FieldValueTooLong", "Too long: may not be more than 262144 bytes", "metadata.annotations"))
    causes += _check_owners(metadata.get("ownerReferences") or [])
    causes += _check_finalizers(metadata, live)
    return causes


def _check_name(name: str, resource: Resource) -> list[Object]:
    if resource.group == "rbac.authorization.k8s.io":
        bad = name in {".", ".."} or any(one in name for one in "/%")
        return [invalid_value("metadata.name", name, "may not contain '/' or '%'")] if bad else []
    if resource.kind == "Service" and not resource.custom:
        pattern, most, text = (
            LABEL_1035,
            63,
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character",
        )
    elif resource.kind == "Namespace":
        pattern, most, text = (
            LABEL,
            63,
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character",
        )
    else:
        pattern, most, text = (
            SUBDOMAIN,
            253,
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character",
        )
    causes = []
    if len(name) > most:
        causes.append(invalid_value("metadata.name", name, f"must be no more than {most} characters"))
    if not pattern.fullmatch(name):
        causes.append(invalid_value("metadata.name", name, text))
    return causes


def check_key(key: str, field: str) -> list[Object]:
    """Return what is wrong with the key of a label or an annotation."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > 253 or not SUBDOMAIN.fullmatch(prefix)):
        return [invalid_value(field, key, "prefix part must be a lowercase RFC 1123 subdomain")]
    if len(name) > 63:
        return [invalid_value(field, key, "name part must be no more than 63 bytes")]
    if not QUALIFIED.fullmatch(name):
        return [
            invalid_value(
                field,
                key,
                "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character",
            )
        ]
    return []


def check_label(value: str, field: str) -> list[Object]:
    """Return what is wrong with the value of a label."""
    if len(value) > 63:
        return [invalid_value(field, value, "must be no more than 63 bytes")]
    if value and not QUALIFIED.fullmatch(value):
        return [
            invalid_value(
                field,
                value,
                "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character",
            )
        ]
    return []


def _check_owners(owners: list[Object]) -> list[Object]:
    causes = []
    for index, owner in enumerate(owners):
        at = f"metadata.ownerReferences[{index}]"
        causes += [
            required(f"{at}.{name}", f"{name} must not be empty")
            for name in ("apiVersion", "kind", "name", "uid")
            if not owner.get(name)
        ]
    controllers = [one for one in owners if one.get("controller")]
    if len(controllers) > 1:
        shown = f'Only one reference can have Controller set to true. Found "true" in references for {controllers[0]["kind"]}/{controllers[0]["name"]} and {controllers[1]["kind"]}/{controllers[1]["name"]}'
        causes.append(cause("FieldValueInvalid", f"Invalid value: {shown}", "metadata.ownerReferences"))
    return causes


def _check_finalizers(metadata: Object, live: Object | None) -> list[Object]:
    finalizers = metadata.get("finalizers") or []
    causes = [one for name in finalizers for one in check_key(name, "metadata.finalizers")]
    before = (live or {"metadata": {}})["metadata"]
    added = [one for one in finalizers if one not in (before.get("finalizers") or [])]
    if before.get("deletionTimestamp") and added:
        shown = "[]string{" + ", ".join(f'"{one}"' for one in added) + "}"
        text = f"no new finalizers can be added if the object is being deleted, found new finalizers {shown}"
        causes.append(forbidden_field("metadata.finalizers", text))
    return causes


def path_value(item: Any, path: str) -> Any:
    """Return the value at a simple JSON path such as `.spec.replicas`, or None."""
    for name in path.strip(".").split("."):
        item = item.get(name) if isinstance(item, dict) else None
    return item


def with_path(item: Object, path: str, value: Any) -> Object:
    """Return a copy with the value at a simple JSON path."""
    name, _, rest = path.strip(".").partition(".")
    return {**item, name: with_path(item.get(name) or {}, rest, value) if rest else value}
