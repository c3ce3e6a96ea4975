"""Resource definitions: whether those of the cluster fit this operator, and bringing them to its version."""

import logging

from packaging.version import InvalidVersion, Version

from dynamo import __version__
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import RESOURCE_DEFINITIONS
from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.crds import KINDS, ResourceKind, manifest

logger = logging.getLogger(__name__)

FORBIDDEN = 403
VERSION_LABEL = "app.kubernetes.io/version"
FIELD_MANAGER = "dynamo-operator-crds"
REMEDY = "upgrade the chart dynamo-crds, or set dynamo-operator.upgradeCRD=true (--upgrade-crds)"


async def prepare_definitions(client: KubeClient, namespace: str, service: str, *, upgrades: bool) -> None:
    """Check every resource definition; with `upgrades`, first install those that are missing or older.

    `namespace` and `service` name the conversion webhook. Raise `ConfigError` if definitions must be installed and may not
    be. If the API server cannot be reached, log it and return: the controllers wait for it.
    """
    try:
        for kind in KINDS:
            stored = await client.get(RESOURCE_DEFINITIONS, name_of(kind))
            if upgrades and is_older(stored):
                await client.apply(
                    RESOURCE_DEFINITIONS, wanted(kind, namespace, service, stored), manager=FIELD_MANAGER
                )
                logger.info("resource definition %s installed in version %s", name_of(kind), __version__)
            else:
                check(kind, stored)
    except KubeUnavailable as error:
        logger.warning("cannot check the resource definitions: %s", error)
    except KubeRefused as error:
        if error.code != FORBIDDEN:
            raise
        if upgrades:
            raise ConfigError(
                f"--upgrade-crds: resource definitions cannot be installed: {error}; install the chart's roles"
            ) from None
        logger.info("the resource definitions are not checked: %s", error)


def name_of(kind: ResourceKind) -> str:
    """Return the name of a definition."""
    return f"{kind.plural}.{GROUP}"


def version_of(stored: KubeObject) -> Version | None:
    """Return the release that a definition is from; None if it does not state one."""
    try:
        return Version((stored["metadata"].get("labels") or {}).get(VERSION_LABEL, ""))
    except InvalidVersion:
        return None


def is_older(stored: KubeObject | None) -> bool:
    """Return whether a definition is missing or from a release before this one."""
    if stored is None:
        return True
    version = version_of(stored)
    return version is None or version < Version(__version__)


def wanted(kind: ResourceKind, namespace: str, service: str, stored: KubeObject | None) -> KubeObject:
    """Return the definition of this release, with the certificate authority that the stored one has."""
    made = manifest(kind)
    made["metadata"].setdefault("labels", {})[VERSION_LABEL] = __version__
    conversion = made["spec"].get("conversion")
    if conversion is not None:
        client = conversion["webhook"]["clientConfig"]
        client["service"] |= {"namespace": namespace, "name": service}
        known = ((((stored or {}).get("spec") or {}).get("conversion") or {}).get("webhook") or {}).get(
            "clientConfig"
        ) or {}
        if known.get("caBundle"):
            client["caBundle"] = known["caBundle"]
    return made


def check(kind: ResourceKind, stored: KubeObject | None) -> None:
    """Warn of a definition that is missing, lacks a version, or is from a later release.

    The operator runs nevertheless: a kind that is missing is used once it is installed, and fields that a definition
    lacks are reported in conditions.
    """
    name = name_of(kind)
    if stored is None:
        logger.warning("resource definition %s is not installed: its objects are not reconciled; %s", name, REMEDY)
        return
    served = {one["name"] for one in stored["spec"].get("versions") or [] if one.get("served")}
    lacking = sorted(set(kind.versions) - served)
    if lacking:
        logger.warning(
            "resource definition %s does not serve %s: it is older than this operator; %s",
            name, ", ".join(lacking), REMEDY,
        )  # fmt: skip
    version = version_of(stored)
    if version is not None and version > Version(__version__):
        logger.warning(
            "resource definition %s is from release %s, this operator from %s: fields that it does not know have no effect",
            name, version, __version__,
        )  # fmt: skip
