"""Version of the Dynamo runtime that a component's image contains."""

import re
from typing import NamedTuple

from dynamo.operator.reconcile.names import main_container
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

VERSION = re.compile(r"[vV]?(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)([-+][0-9A-Za-z.+-]+)?")


class RuntimeVersion(NamedTuple):
    """Release of the runtime, without pre-release and build."""

    major: int
    minor: int
    patch: int


HEALTH_CHECKS = TOLERANT_LIVENESS = RuntimeVersion(1, 5, 0)
"""First releases whose workers check their engines by requests, and that restart only after several failed probes."""


def runtime_version(component: ComponentSpec) -> RuntimeVersion | None:
    """Return the version that a component states, or else that of its image's tag; None if neither is a version."""
    text = component.runtime_version_override or image_tag(str(main_container(component).get("image") or ""))
    found = VERSION.fullmatch(text.strip())
    return RuntimeVersion(*(int(one) for one in found.groups()[:3])) if found else None


def has_reached(component: ComponentSpec, least: RuntimeVersion) -> bool:
    """Return whether a component's runtime is known to be of at least a version."""
    found = runtime_version(component)
    return found is not None and found >= least


def image_tag(image: str) -> str:
    """Return the tag of an image; empty if it has none."""
    name = image.partition("@")[0].rpartition("/")[2]
    return name.partition(":")[2]
