"""Topology: where a worker stands, and how far its KV blocks may travel (serving-plane.md §4.11).

    worker    read_topology()               files of DYN_TOPOLOGY_MOUNT_PATH, one domain each  ──▶  its card
    router    taints_of(card)               what requests may ask for: dynamo.topology/<domain>=<value>
              transfer_constraints(card)    whom a prefill worker's blocks may go to: who stands where it does

A file's name is a domain, zone or rack or host, and what it holds is the worker's place in it. The files may come to be
while the worker starts, so it waits for the one that blocks are bound to.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError, NotReady
from dynamo.model_card.runtime_config import TOPOLOGY_TAINTS
from dynamo.protocols.model_card import RuntimeConfig

logger = logging.getLogger(__name__)

MOUNT_PATH = "/etc/dynamo/topology"
POLL_S = 1.0
WAIT_S = 30.0

Enforcement = Literal["required", "preferred"]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands."""

    domains: Mapping[str, str]
    """Its place in each domain."""
    transfer_domain: str
    """The domain that its blocks are bound to."""
    enforcement: Enforcement = "required"
    preferred_weight: float | None = None
    """How much a worker of the same place is preferred, 0 to 1."""

    def put_on(self, config: RuntimeConfig) -> None:
        """Says it on a card."""
        config.topology_domains = dict(self.domains)
        config.kv_transfer_domain = self.transfer_domain
        config.kv_transfer_enforcement = self.enforcement
        config.kv_transfer_preferred_weight = UNSET if self.preferred_weight is None else self.preferred_weight


async def read_topology(variables: Mapping[str, str] | None = None, clock: Clock | None = None) -> Topology | None:
    """Where this worker stands; None where nobody said that it should tell.

    Raises `ConfigError` for variables that do not go together, and where the files do not come within half a minute.
    """
    given = environ() if variables is None else variables
    if not _is_enabled(given.get("DYN_TOPOLOGY_ENABLED", "")):
        return None
    domain = given.get("DYN_KV_TRANSFER_DOMAIN", "").strip()
    if not domain:
        raise ConfigError("DYN_TOPOLOGY_ENABLED needs DYN_KV_TRANSFER_DOMAIN: the domain that KV blocks are bound to")
    enforcement = setting("DYN_KV_TRANSFER_ENFORCEMENT", "required", str, given).strip()
    if enforcement not in ("required", "preferred"):
        raise ConfigError(f"DYN_KV_TRANSFER_ENFORCEMENT={enforcement!r}: expected required or preferred")
    weight = _weight(given)
    if enforcement == "preferred" and weight is None:
        raise ConfigError("DYN_KV_TRANSFER_ENFORCEMENT=preferred needs DYN_KV_TRANSFER_PREFERRED_WEIGHT, 0 to 1")
    mount = Path(setting("DYN_TOPOLOGY_MOUNT_PATH", MOUNT_PATH, str, given))
    clock = clock or SystemClock()
    deadline = clock.now() + WAIT_S
    domains = read_domains(mount)
    while domain not in domains:
        left = deadline - clock.now()
        if left <= 0:
            raise ConfigError(f"topology: {mount / domain} was not there, or empty, for {WAIT_S:g} s")
        logger.info("waiting for %s, %.0f s more", mount / domain, left)
        await clock.sleep(min(POLL_S, left))
        domains = read_domains(mount)
    found = Topology(
        domains=domains,
        transfer_domain=domain,
        enforcement="preferred" if enforcement == "preferred" else "required",
        preferred_weight=weight,
    )
    logger.info("topology: %s, blocks are bound to %s (%s)", domains, domain, enforcement)
    return found


def read_domains(mount: Path) -> dict[str, str]:
    """The domains of a directory: files that are neither hidden nor empty."""
    try:
        paths = sorted(mount.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s cannot be read: %s", mount, error.strerror)
        return {}
    domains = {}
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            value = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read: %s", path, error)
            continue
        if value:
            domains[path.name] = value
    return domains


def taints_of(config: RuntimeConfig) -> frozenset[str]:
    """What a card lets requests ask for: the taints that were set, and those of its places."""
    taints = set(config.taints) if isinstance(config.taints, list) else set()
    if isinstance(config.topology_domains, dict):
        taints.update(topology_taint(domain, value) for domain, value in config.topology_domains.items())
    return frozenset(taints)


def topology_taint(domain: str, value: str) -> str:
    """The taint of a place."""
    return f"{TOPOLOGY_TAINTS}{domain}={value}"


def transfer_constraints(prefill: RuntimeConfig) -> tuple[frozenset[str], dict[str, float]]:
    """Required and preferred taints of the decode worker, given the card of the prefill worker that was chosen.

    Both are empty where the prefill worker does not mind. Raises `NotReady` for a card that contradicts itself: its
    blocks must not go just anywhere.
    """
    domain = prefill.kv_transfer_domain
    if not isinstance(domain, str) or not domain:
        return frozenset(), {}
    domains = prefill.topology_domains if isinstance(prefill.topology_domains, dict) else {}
    if domain not in domains:
        raise NotReady(f"the prefill worker's blocks are bound to {domain}, but it does not say where in it it stands")
    taint = topology_taint(domain, domains[domain])
    if prefill.kv_transfer_enforcement == "required":
        return frozenset({taint}), {}
    if prefill.kv_transfer_enforcement == "preferred":
        weight = prefill.kv_transfer_preferred_weight
        if not isinstance(weight, int | float):
            raise NotReady(f"the prefill worker prefers its own {domain}, but does not say how much")
        return frozenset(), {taint: float(weight)}
    raise NotReady(f"the prefill worker's blocks are bound to {domain}, but it does not say how strictly")


def _is_enabled(text: str) -> bool:
    try:
        return read_bool(text)
    except ValueError:
        logger.warning("DYN_TOPOLOGY_ENABLED=%r is neither true nor false: taken for false", text)
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
        raise ConfigError(f"DYN_KV_TRANSFER_PREFERRED_WEIGHT={text!r}: expected a number from 0 to 1")
    return weight
