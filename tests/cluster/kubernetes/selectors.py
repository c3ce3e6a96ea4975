"""Label and field selectors of list, watch and delete requests."""

import re
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes.errors import ApiError, Object

Predicate = Callable[[Object], bool]

NAME = r"(?:[A-Za-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
SET = re.compile(rf"({NAME})\s+(in|notin)\s*\(([^()]*)\)")
EQUAL = re.compile(rf"({NAME})\s*(==|=|!=)\s*([A-Za-z0-9_.-]*)")
COMPARED = re.compile(rf"({NAME})\s*([<>])\s*(-?\d+)")
EXISTS = re.compile(rf"(!?)\s*({NAME})")
FIELDS = {
    "Pod": {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase",
            "status.podIP", "spec.hostNetwork", "status.nominatedNodeName"},
    "Event": {"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
              "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
              "reportingComponent", "source", "type"},
    "Secret": {"type"}, "Namespace": {"status.phase"}, "Node": {"spec.unschedulable"},
    "ReplicaSet": {"status.replicas"}, "Job": {"status.successful"}, "Service": {"spec.clusterIP", "spec.type"},
}  # fmt: skip


def label_selector(text: str) -> Predicate:
    """Return the predicate of a selector such as `app=web,tier in (a, b),!canary`."""
    checks = [_requirement(part, text) for part in _split(text)]

    def matches(item: Object) -> bool:
        labels = item["metadata"].get("labels") or {}
        return all(check(labels) for check in checks)

    return matches


def _split(text: str) -> list[str]:
    parts = re.split(r",(?![^(]*\))", text)
    return [part.strip() for part in parts if part.strip()]


def _requirement(part: str, text: str) -> Callable[[dict[str, str]], bool]:
    if found := SET.fullmatch(part):
        key, operator, values = found[1], found[2], {one.strip() for one in found[3].split(",")}
        if operator == "in":
            return lambda labels: labels.get(key, ...) in values
        return lambda labels: labels.get(key, ...) not in values
    if found := EQUAL.fullmatch(part):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := COMPARED.fullmatch(part):
        key, operator, bound = found[1], found[2], int(found[3])
        return lambda labels: _integer(labels.get(key), bound, operator)
    if found := EXISTS.fullmatch(part):
        absent, key = bool(found[1]), found[2]
        return lambda labels: (key in labels) != absent
    raise ApiError(400, f'unable to parse requirement: found "{part}" in selector "{text}"')


def _integer(value: str | None, bound: int, operator: str) -> bool:
    if value is None or not re.fullmatch(r"-?\d+", value):
        return False
    return int(value) > bound if operator == ">" else int(value) < bound


def object_selector(selector: Object | None) -> Callable[[dict[str, str]], bool]:
    """Return the predicate over labels of a LabelSelector object; None selects nothing, an empty one everything."""
    if selector is None:
        return lambda _: False
    wanted = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or []

    def matches(labels: dict[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in wanted.items()) and all(
            _expression(one, labels) for one in expressions
        )

    return matches


def _expression(one: Object, labels: dict[str, str]) -> bool:
    key, values = one["key"], one.get("values") or []
    match one["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def field_selector(text: str, kind: str, selectable: tuple[str, ...] = ()) -> Predicate:
    """Return the predicate of a field selector. Raises 400 for fields that the kind does not support."""
    allowed = {"metadata.name", "metadata.namespace", *FIELDS.get(kind, ()), *selectable}
    checks: list[tuple[list[str], bool, str]] = []
    for part in _split(text):
        found = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", part)
        if not found:
            raise ApiError(400, f"invalid selector: '{text}'; can't understand '{part}'")
        if found[1] not in allowed:
            raise ApiError(400, f'field label not supported: "{found[1]}"')
        checks.append((found[1].split("."), found[2] != "!=", found[3]))
    return lambda item: all((_text(_at(item, path)) == value) == equal for path, equal, value in checks)


def _at(item: Any, path: list[str]) -> Any:
    for name in path:
        item = item.get(name) if isinstance(item, dict) else None
    return item


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
