"""Topology of a worker, mounted as files, and the policy of KV transfers between topology domains."""

import argparse
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.common.configuration.utils import parse_bool
from dynamo.core.config import environ

logger = logging.getLogger(__name__)

MOUNT_PATH = "/etc/dynamo/topology"
POLL_S = 1.0
TIMEOUT_S = 30.0  # The mount is filled by another container of the pod.


@dataclass
class TopologyConfig:
    """Domains of a worker, and the domain within which KV blocks are transferred."""

    topology_domains: dict[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether the worker has domains."""
        return bool(self.topology_domains)


def _read_domains(directory: Path) -> dict[str, str]:
    """Return the content of each file by its name; files may disappear while they are read."""
    domains = {}
    try:
        files = sorted(directory.iterdir())
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("cannot list %s: %s", directory, error)
        return {}
    for file in files:
        try:
            value = file.read_text(encoding="utf-8").strip() if not file.name.startswith(".") and file.is_file() else ""
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("cannot read %s: %s", file, error)
            continue
        if value:
            domains[file.name] = value
    return domains


def _is_enabled() -> bool:
    text = environ().get("DYN_TOPOLOGY_ENABLED", "").strip()
    try:
        return parse_bool(text)
    except argparse.ArgumentTypeError as error:
        logger.warning("ignored DYN_TOPOLOGY_ENABLED=%s", error)
        return False


def read_topology_config(poll_interval: float = POLL_S, poll_timeout: float = TIMEOUT_S) -> TopologyConfig:
    """Return the topology in the mounted files, empty if disabled. Exit the process if a required part is missing."""
    if not _is_enabled():
        return TopologyConfig()
    domain = environ().get("DYN_KV_TRANSFER_DOMAIN", "").strip()
    if not domain:
        logger.error("DYN_TOPOLOGY_ENABLED requires DYN_KV_TRANSFER_DOMAIN")
        sys.exit(1)
    weight = environ().get("DYN_KV_TRANSFER_PREFERRED_WEIGHT")
    directory = Path(environ().get("DYN_TOPOLOGY_MOUNT_PATH", MOUNT_PATH))
    deadline = time.monotonic() + poll_timeout
    while domain not in (domains := _read_domains(directory)):
        left = deadline - time.monotonic()
        if left <= 0:
            logger.error("topology file %s is missing or empty after %.0f s", directory / domain, poll_timeout)
            sys.exit(1)
        time.sleep(min(poll_interval, left))
    return TopologyConfig(
        topology_domains=domains,
        kv_transfer_domain=domain,
        kv_transfer_enforcement=environ().get("DYN_KV_TRANSFER_ENFORCEMENT", "required"),
        kv_transfer_preferred_weight=float(weight) if weight else None,
    )


def apply_topology_config(runtime_config: Any) -> TopologyConfig:
    """Set the topology on a `ModelRuntimeConfig` and return it."""
    config = read_topology_config()
    if config.enabled:
        for name in (
            "topology_domains",
            "kv_transfer_domain",
            "kv_transfer_enforcement",
            "kv_transfer_preferred_weight",
        ):
            setattr(runtime_config, name, getattr(config, name))
    return config
