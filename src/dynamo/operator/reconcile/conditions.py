"""Conditions of an object's status."""

from collections.abc import Iterable

from dynamo.protocols.kubernetes.common import Condition

RECONCILED, FAILED = "Reconciled", "ReconcileFailed"
"""Condition of an object whose reconcile fails, and its reason; absent otherwise."""


def with_condition(conditions: Iterable[Condition] | None, changed: Condition, now: str) -> list[Condition]:
    """Return conditions with one set; its transition time changes only when its status does."""
    found = list(conditions or [])
    for index, one in enumerate(found):
        if one.type == changed.type:
            changed.last_transition_time = one.last_transition_time if one.status == changed.status else now
            found[index] = changed
            return found
    changed.last_transition_time = now
    return [*found, changed]


def is_true(conditions: Iterable[Condition] | None, kind: str) -> bool:
    """Return whether a condition is set and true."""
    return any(one.type == kind and one.status == "True" for one in conditions or [])
