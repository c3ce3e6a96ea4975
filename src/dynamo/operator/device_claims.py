"""Reads the claims of components that have GPUs of a device driver, to count them."""

from collections.abc import Sequence
from typing import Protocol

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import CLAIM_TEMPLATES, CLAIMS, DEVICE_CLASSES, ObjectKind
from dynamo.operator.reconcile.device_claims import (
    CLAIM,
    CLASS,
    TEMPLATE,
    ClaimUse,
    claims_of,
    class_names,
    device_requests,
    requested_gpus,
)
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import ClaimedGpus
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

KINDS: dict[str, ObjectKind] = {CLAIM: CLAIMS, TEMPLATE: CLAIM_TEMPLATES, CLASS: DEVICE_CLASSES}


class ClaimReader(Protocol):
    """Reads claims and device classes: `KubeClient`, or a fake in tests."""

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None: ...


async def claimed_gpus(reader: ClaimReader, namespace: str, components: Sequence[ComponentSpec]) -> ClaimedGpus:
    """Return the GPUs that each component claims, or why that is not known; nothing for components without claims.

    The objects are read at each pass and not viewed: few components have claims, and these do not change.
    """
    found: dict[str, int | str] = {}
    for one in components:
        try:
            uses = claims_of(one)
            if uses:
                found[one.name or ""] = await _count(reader, namespace, one, uses)
        except WorkloadError as error:
            found[one.name or ""] = str(error)
    return found


async def _count(reader: ClaimReader, namespace: str, component: ComponentSpec, uses: Sequence[ClaimUse]) -> int:
    total = 0
    for use in uses:
        requests = device_requests(use, await _read(reader, component, use.kind, use.name, namespace))
        classes = {name: await _read(reader, component, CLASS, name) for name in sorted(class_names(requests))}
        total += sum(requested_gpus(component, request, classes) for request in requests)
    return total


async def _read(
    reader: ClaimReader, component: ComponentSpec, kind: str, name: str, namespace: str | None = None
) -> KubeObject:
    """Return an object. Raise `WorkloadError` if it cannot be read."""
    path = f"spec.components[{component.name}].podTemplate.spec.resourceClaims"
    try:
        value = await reader.get(KINDS[kind], name, namespace)
    except KubeRefused as error:
        raise WorkloadError(f"{path}: cannot read {kind} {name}: {error}") from None
    if value is None:
        raise WorkloadError(f"{path}: {kind} {name} does not exist")
    return value
