"""Plan: what one pass of reconciliation requires of the cluster. Pure data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo.protocols.kubernetes.common import KubeObject


class ObjectRef(NamedTuple):
    """Identity of an object."""

    api_version: str
    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class EventNote:
    """An event about the reconciled object."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class ObjectPatch(NamedTuple):
    """Change of an object that exists."""

    ref: ObjectRef
    value: KubeObject | list[KubeObject]
    """A merge patch, or the operations of a JSON patch."""
    subresource: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Outcome of one pass over one object. Applying it a second time changes nothing."""

    apply: Sequence[KubeObject] = ()
    """Complete objects for server-side apply, in order. The caller adds the owner reference."""
    create_unowned: Sequence[KubeObject] = ()
    """Objects that outlive the reconciled object: created first, without an owner, if none of their name exists."""
    create: Sequence[KubeObject] = ()
    """Objects that are created if none of their name exists, and are not changed afterwards."""
    keys: Sequence[ObjectRef] = ()
    """Secrets that get a generated SSH key pair if they do not exist; several owners share them."""
    joint: Sequence[KubeObject] = ()
    """Objects that several owners share: each applies them for itself, and they are collected with the last owner."""
    patch: Sequence[ObjectPatch] = ()
    """Changes of single fields, of objects that are not complete in this plan."""
    delete: Sequence[ObjectRef] = ()
    """Objects of the operator that are no longer required."""
    describes_observed: bool = False
    """Whether status and events describe the objects as observed: after a write they are planned again from what the
    API server returned, because the observed objects are those before it."""
    status: KubeObject | None = None
    """New status of the reconciled object; None leaves it."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    """Annotations of the reconciled object to set, or to remove (None)."""
    events: Sequence[EventNote] = ()
    if_rejected: "Callable[[str], Plan] | None" = None
    """Plan that applies instead when the API server rejects an object for good, with its message; None: retried."""
    requeue_s: float | None = None
    """Seconds after which the object is reconciled again even without a change."""


def ref_of(value: KubeObject) -> ObjectRef:
    """Return the identity of an object."""
    metadata = value["metadata"]
    return ObjectRef(value["apiVersion"], value["kind"], metadata.get("namespace", ""), metadata["name"])
