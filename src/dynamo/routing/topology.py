"""Topology: the topology domains of a worker, and the constraints on transfers of its KV blocks.

    worker    read_topology()               files of DYN_TOPOLOGY_MOUNT_PATH, one domain each  ──▶  its card
    router    taints_of(card)               taints that requests may name: dynamo.topology/<domain>=<value>
              transfer_constraints(card)    decode workers that may receive blocks: those with the same domain value

The name of a file is a domain (zone, rack, host) and its content is the worker's value in that domain. Files may appear
while the worker starts, so it waits for the file of the transfer domain.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError, InvalidArgument, NotReady
from dynamo.model_card.runtime_config import TOPOLOGY_TAINTS
from dynamo.protocols.model_card import RuntimeConfig

logger = logging.getLogger(__name__)

MOUNT_PATH = "/etc/dynamo/topology"
POLL_S = 1.0
WAIT_S = 30.0

Enforcement = Literal["required", "preferred"]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Topology domains of a worker and its transfer constraint."""

    domains: Mapping[str, str]
    """Value by domain."""
    transfer_domain: str
    """Domain that block transfers must not, or should not, leave."""
    enforcement: Enforcement = "required"
    preferred_weight: float | None = None
    """Preference for a worker with the same domain value, 0 to 1."""

    def put_on(self, config: RuntimeConfig) -> None:
        """Store the topology on a card."""
        config.topology_domains = dict(self.domains)
        config.kv_transfer_domain = self.transfer_domain
        config.kv_transfer_enforcement = self.enforcement
        config.kv_transfer_preferred_weight = UNSET if self.preferred_weight is None else self.preferred_weight


async def read_topology(variables: Mapping[str, str] | None = None, clock: Clock | None = None) -> Topology | None:
    """Return the topology of this worker; None if DYN_TOPOLOGY_ENABLED is not set.

    Raises `ConfigError` for conflicting variables, and if the transfer domain's file is missing after half a minute.
    """
    given = environ() if variables is None else variables
    if not _is_enabled(given.get("DYN_TOPOLOGY_ENABLED", "")):
        return None
    domain = given.get("DYN_KV_TRANSFER_DOMAIN", "").strip()
    if not domain:
        raise ConfigError("DYN_TOPOLOGY_ENABLED requires DYN_KV_TRANSFER_DOMAIN, the domain of KV block transfers")
    enforcement = setting("DYN_KV_TRANSFER_ENFORCEMENT", "required", str, given).strip()
    if enforcement not in ("required", "preferred"):
        raise ConfigError(f"DYN_KV_TRANSFER_ENFORCEMENT={enforcement!r}: must be required or preferred")
    weight = _weight(given)
    if enforcement == "preferred" and weight is None:
        raise ConfigError("DYN_KV_TRANSFER_ENFORCEMENT=preferred requires DYN_KV_TRANSFER_PREFERRED_WEIGHT, 0 to 1")
    mount = Path(setting("DYN_TOPOLOGY_MOUNT_PATH", MOUNT_PATH, str, given))
    clock = clock or SystemClock()
    deadline = clock.now() + WAIT_S
    domains = read_domains(mount)
    while domain not in domains:
        left = deadline - clock.now()
        if left <= 0:
            raise ConfigError(f"topology: {mount / domain} was missing or empty for {WAIT_S:g} s")
        logger.info("waiting for topology file %s, %.0f s left", mount / domain, left)
        await clock.sleep(min(POLL_S, left))
        domains = read_domains(mount)
    found = Topology(
        domains=domains,
        transfer_domain=domain,
        enforcement="preferred" if enforcement == "preferred" else "required",
        preferred_weight=weight,
    )
    logger.info("topology: %s, transfer domain %s (%s)", domains, domain, enforcement)
    return found


def read_domains(mount: Path) -> dict[str, str]:
    """Return the domains of a directory: the files that are neither hidden nor empty."""
    try:
        paths = sorted(mount.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("failed to read topology directory %s: %s", mount, error.strerror)
        return {}
    domains = {}
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            value = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("failed to read topology file %s: %s", path, error)
            continue
        if value:
            domains[path.name] = value
    return domains


def taints_of(config: RuntimeConfig) -> frozenset[str]:
    """Return the taints of a card that requests may name: configured ones and those of its topology domains."""
    taints = set(config.taints) if isinstance(config.taints, list) else set()
    if isinstance(config.topology_domains, dict):
        taints.update(topology_taint(domain, value) for domain, value in config.topology_domains.items())
    return frozenset(taints)


def topology_taint(domain: str, value: str) -> str:
    """Return the taint of a domain value."""
    return f"{TOPOLOGY_TAINTS}{domain}={value}"


def near_taint_of(preferred: Iterable[str]) -> str | None:
    """Return the taint of the workers within the prefill worker's transfer domain, given those that the request prefers."""
    return next((taint for taint in preferred if taint.startswith(TOPOLOGY_TAINTS)), None)


def transfer_constraints(prefill: RuntimeConfig) -> tuple[frozenset[str], dict[str, float]]:
    """Return required and preferred taints of the decode worker, given the card of the chosen prefill worker.

    Both are empty if the prefill worker has no constraint. Raises `NotReady` for an inconsistent card, because blocks
    must not be transferred without the constraint.
    """
    domain = prefill.kv_transfer_domain
    if not isinstance(domain, str) or not domain:
        return frozenset(), {}
    domains = prefill.topology_domains if isinstance(prefill.topology_domains, dict) else {}
    if domain not in domains:
        raise NotReady(f"the prefill worker has transfer domain {domain}, but no topology value for it")
    taint = topology_taint(domain, domains[domain])
    if prefill.kv_transfer_enforcement == "required":
        return frozenset({taint}), {}
    if prefill.kv_transfer_enforcement == "preferred":
        weight = prefill.kv_transfer_preferred_weight
        if not isinstance(weight, int | float):
            raise NotReady(f"the prefill worker prefers transfers within its {domain}, but its weight is missing")
        return frozenset(), {taint: float(weight)}
    raise NotReady(
        f"the prefill worker has transfer domain {domain}, but its enforcement is neither required nor preferred"
    )


def _is_enabled(text: str) -> bool:
    try:
        return read_bool(text)
    except ValueError:
        logger.warning("DYN_TOPOLOGY_ENABLED=%r: must be true or false; using false", text)
        return False


def _weight(given: Mapping[str, str]) -> float | None:
    text = given.get("DYN_KV_TRANSFER_PREFERRED_WEIGHT")
    if not text:
        return None
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0.0 <= weight <= 1.0:
        raise ConfigError(f"DYN_KV_TRANSFER_PREFERRED_WEIGHT={text!r}: must be a number from 0 to 1")
    return weight


def constraints_of(given: dict[str, Any] | None) -> tuple[frozenset[str], dict[str, float]]:
    """Return required and preferred taints of `routing_constraints`. Raises `InvalidArgument`."""
    if not given:
        return frozenset(), {}
    required, preferred = given.get("required_taints") or [], given.get("preferred_taints") or {}
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidArgument(
            f"routing_constraints.required_taints is {required!r}: expected a list of names", param="nvext"
        )
    if not isinstance(preferred, dict) or not all(isinstance(one, int | float) for one in preferred.values()):
        raise InvalidArgument(
            f"routing_constraints.preferred_taints is {preferred!r}: expected a weight for each name", param="nvext"
        )
    return frozenset(required), preferred
