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


FRONTEND_STARTS_SLOWLY = RuntimeVersion(1, 6, 0)
"""First release whose frontends have a startup probe."""
NATIVE_PICKER = RuntimeVersion(1, 5, 0)
"""First release whose endpoint picker has no configuration file."""


def runtime_version(component: ComponentSpec) -> RuntimeVersion | None:
    """Return the version that a component states, or else that of its image's tag; None if neither is a version."""
    return stated_version(str(main_container(component).get("image") or ""), component.runtime_version_override or "")


def stated_version(image: str, override: str) -> RuntimeVersion | None:
    """Return the version of an override, or else of an image's tag; None if it is not a version."""
    found = VERSION.fullmatch((override or image_tag(image)).strip())
    return RuntimeVersion(*(int(one) for one in found.groups()[:3])) if found else None


def has_reached(component: ComponentSpec, least: RuntimeVersion) -> bool:
    """Return whether a component's runtime is known to be of at least a version."""
    found = runtime_version(component)
    return found is not None and found >= least


def image_tag(image: str) -> str:
    """Return the tag of an image; empty if it has none."""
    name = image.partition("@")[0].rpartition("/")[2]
    return name.partition(":")[2]
