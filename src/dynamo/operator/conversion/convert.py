"""Conversion of whole objects: the counterparts of the fields, and the kept original where a version lacks some."""

import copy
from typing import Any

import msgspec

from dynamo.operator.conversion.components import ALPHA_ONLY, to_component
from dynamo.operator.conversion.kinds import CONVERSIONS, Mapper
from dynamo.operator.conversion.merge import merged
from dynamo.operator.validation.facts import ANNOTATION, part
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1, KubeObject
from dynamo.protocols.kubernetes.crds import version_schema
from dynamo.protocols.kubernetes.schema import PRESERVE, Schema

SECTIONS = ("spec", "status")


class ConversionFailed(ValueError):
    """An object cannot be converted: its kind has one version, or the version is unknown."""


def convert(value: KubeObject, api_version: str) -> KubeObject:
    """Return an object in another version of its kind. Raise `ConversionFailed` if there is none."""
    source, kind = value.get("apiVersion"), str(value.get("kind") or "")
    if source == api_version:
        return value
    found = CONVERSIONS.get(kind)
    if found is None or {source, api_version} != {V1ALPHA1, V1BETA1}:
        raise ConversionFailed(f"{source} {kind}: cannot be converted to {api_version}")
    is_to_beta = api_version == V1BETA1
    to_beta = [
        _pruning(kind, V1BETA1, section, mapper)
        for section, mapper in zip(SECTIONS, (found.spec_to_beta, found.status_to_beta), strict=True)
    ]
    to_alpha = [
        _pruning(kind, V1ALPHA1, section, mapper)
        for section, mapper in zip(SECTIONS, (found.spec_to_alpha, found.status_to_alpha), strict=True)
    ]
    forward, back = (to_beta, to_alpha) if is_to_beta else (to_alpha, to_beta)
    result: KubeObject = {**copy.deepcopy(value), "apiVersion": api_version}
    annotations = dict(part(value, "metadata").get("annotations") or {})
    for section, there, again in zip(SECTIONS, forward, back, strict=True):
        key = annotation_key(found.short_name, section)
        kept = _kept(annotations.pop(key, None))
        if not isinstance(value.get(section), dict):
            continue
        own = copy.deepcopy(value[section])
        result[section] = _restored(kept, own, there, again)
        if again(result[section]) != own:
            annotations[key] = msgspec.json.encode(own, order="deterministic").decode()
    metadata = dict(part(value, "metadata"))
    metadata.pop("annotations", None)
    result["metadata"] = {**metadata, **({"annotations": annotations} if annotations else {})}
    return result


def _pruning(kind: str, api_version: str, section: str, mapper: Mapper) -> Mapper:
    """Return a mapper without the fields that the target version does not have: the API server would drop them."""
    schema = version_schema(kind, api_version.partition("/")[2])["properties"][section]
    return lambda value: pruned(mapper(value), schema)


def pruned(value: Any, schema: Schema) -> Any:
    """Return JSON data without the fields that a structural schema does not have."""
    if isinstance(value, dict):
        properties: dict[str, Schema] = schema.get("properties", {})
        other = schema.get("additionalProperties")
        keeps = schema.get(PRESERVE) or not (properties or other is not None)
        kept = {}
        for name, item in value.items():
            part_schema = properties.get(name) or (other if isinstance(other, dict) else None)
            if part_schema is not None:
                kept[name] = pruned(item, part_schema)
            elif keeps:
                kept[name] = item
        return kept
    if isinstance(value, list) and "items" in schema:
        return [pruned(item, schema["items"]) for item in value]
    return value


def annotation_key(short_name: str, section: str) -> str:
    """Return the annotation that keeps a section of the other version, such as `nvidia.com/dgdr-spec`."""
    return f"{ANNOTATION}{short_name}-{section}"


def _kept(text: str | None) -> KubeObject | None:
    """Return a kept section; None if there is none, or if it is damaged: the annotation is the user's to edit."""
    try:
        value = msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _restored(kept: KubeObject | None, own: KubeObject, there: Mapper, again: Mapper) -> KubeObject:
    """Return a section in the other version: the kept original with the changes since, else the counterparts.

    The kept original is used unless the result would convert back to something
    else, for instance an environment variable that was removed here and is in two places there, is not used.
    """
    plain = there(own)
    if kept is None:
        return plain
    before = there(again(kept))
    result: KubeObject = merged(kept, before, plain)
    canonical = again(plain)
    if again(result) in (own, canonical):
        return result
    result = _with_fields_only(kept, plain)
    return result if again(result) in (own, canonical) else plain


def _with_fields_only(kept: KubeObject, plain: KubeObject) -> KubeObject:
    """Return the counterparts with the kept fields that have none: claims, and for each service its Ingress and names."""
    result = dict(plain)
    if "pvcs" in kept:
        result["pvcs"] = kept["pvcs"]
    services: dict[str, Any] = part(plain, "services")
    for name, service in services.items():
        before = part(kept, "services", name)
        extra = {field: before[field] for field in ALPHA_ONLY if field in before and field not in service}
        if to_component({**extra, **service}, name) == to_component(service, name):
            result["services"] = {**part(result, "services"), name: {**extra, **service}}
    return result
