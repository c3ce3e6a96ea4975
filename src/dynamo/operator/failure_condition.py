"""Condition `Reconciled`: false with the cause while an object cannot be reconciled, absent otherwise. Pure.

It is added to the conditions of the kind, for causes that plans do not know: the API server refuses an object,
or a resource definition is older than the operator and lacks a field.
"""

import copy
from collections.abc import Iterable
from typing import Any

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import SCALING_ADAPTERS, ObjectKind
from dynamo.operator.reconcile.conditions import RECONCILED
from dynamo.protocols.kubernetes.common import KubeObject

OUTDATED = "ResourceDefinitionOutdated"
UNDECLARED = ": field not declared in schema"
WITHOUT_CONDITIONS = frozenset({SCALING_ADAPTERS.kind})
REMEDY = "install the resource definitions of the operator's version (deploy/crds)"
MAX_MESSAGE = 1024


def has_conditions(kind: ObjectKind) -> bool:
    """Return whether the status of a kind has conditions."""
    return kind.kind not in WITHOUT_CONDITIONS


def with_failure(value: KubeObject, reason: str, message: str, now: str) -> KubeObject:
    """Return the status of an object with the condition false."""
    status = value.get("status") or {}
    conditions = status.get("conditions") or []
    known = next((one for one in conditions if one.get("type") == RECONCILED), None)
    changed = {
        "type": RECONCILED,
        "status": "False",
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "observedGeneration": value["metadata"].get("generation") or 0,
        "lastTransitionTime": known["lastTransitionTime"] if known else now,
    }
    return {**status, "conditions": [*(one for one in conditions if one.get("type") != RECONCILED), changed]}


def without_failure(status: KubeObject) -> KubeObject:
    """Return a status without the condition."""
    conditions = status.get("conditions")
    if not conditions or all(one.get("type") != RECONCILED for one in conditions):
        return status
    return {**status, "conditions": [one for one in conditions if one.get("type") != RECONCILED]}


def undeclared_field(error: KubeRefused) -> str | None:
    """Return the path, such as `.status.placement`, of a field that the installed resource definition does not have."""
    text, has_marker, _ = error.args[0].partition(UNDECLARED)
    return text.rpartition(": ")[2] if has_marker else None


def without_field(status: KubeObject, path: str) -> KubeObject | None:
    """Return a status without a field, or without the list that has it; None if the path does not lead to one."""
    names = path.removeprefix(".").split(".")[1:]
    result = copy.deepcopy(status)
    target: Any = result
    for at, name in enumerate(names):
        field = name.partition("[")[0]
        if not isinstance(target, dict) or field not in target:
            return None
        if field != name or at == len(names) - 1:
            del target[field]
            return result
        target = target[field]
    return None


def outdated_message(kind: ObjectKind, fields: Iterable[str]) -> str:
    """Return the cause and the remedy for fields that a resource definition does not have."""
    return f"the resource definition of {kind.kind} does not have {', '.join(fields)}: {REMEDY}"
