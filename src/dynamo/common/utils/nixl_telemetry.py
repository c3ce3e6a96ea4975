"""Ports of NIXL's Prometheus exporters: one per rank of a pod, from a base port."""

import re
from collections.abc import Mapping
from contextlib import suppress

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError

MAX_PORT = 65535
NIXL_TELEMETRY_ENABLE_ENV = "NIXL_TELEMETRY_ENABLE"
NIXL_TELEMETRY_EXPORTER_ENV = "NIXL_TELEMETRY_EXPORTER"
NIXL_TELEMETRY_PROMETHEUS_PORT_ENV = "NIXL_TELEMETRY_PROMETHEUS_PORT"
DEFAULT_NIXL_PROMETHEUS_PORT = 9090
MAX_COLOCATED_NIXL_EXPORTERS = 8
"""Ports that a pod declares."""
PORTS = range(1, MAX_PORT + 1)
SWITCH = {
    **dict.fromkeys(("y", "1", "yes", "on", "true", "enable"), True),
    **dict.fromkeys(("n", "0", "no", "off", "false", "disable"), False),
}
"""Texts that NIXL reads as a boolean."""
OTHER_PORTS = ("DYN_SYSTEM_PORT", "DYN_FORWARDPASS_METRIC_PORT")


def configured_fixed_port(
    env_name: str, *, default: int | None = None, env: Mapping[str, str] | None = None
) -> int | None:
    """Return the port in a variable; the default if it is unset, None if it is no fixed port."""
    variables = environ() if env is None else env
    if env_name not in variables:
        return default
    with suppress(ValueError):
        if (port := int(variables[env_name])) in PORTS:
            return port
    return None


def nixl_prometheus_base_port(env: Mapping[str, str] | None = None) -> int | None:
    """Return the base port; None without the Prometheus exporter. Raise `ValueError` for text that NIXL refuses."""
    variables = environ() if env is None else env
    switch = variables.get(NIXL_TELEMETRY_ENABLE_ENV, "n")
    if switch.lower() not in SWITCH:
        raise ConfigError(f"{NIXL_TELEMETRY_ENABLE_ENV}={switch}: NIXL accepts {', '.join(SWITCH)}")
    if not SWITCH[switch.lower()] or variables.get(NIXL_TELEMETRY_EXPORTER_ENV) != "prometheus":
        return None
    text = variables.get(NIXL_TELEMETRY_PROMETHEUS_PORT_ENV, str(DEFAULT_NIXL_PROMETHEUS_PORT))
    number = re.fullmatch("(0[xX])?([0-9a-fA-F]{1,16})", text)
    with suppress(ValueError):  # Hexadecimal digits without the prefix.
        if number and (port := int(number[2], 16 if number[1] else 10)) in PORTS:
            return port
    raise ConfigError(f"{NIXL_TELEMETRY_PROMETHEUS_PORT_ENV}={text}: must be a port, 1 to {MAX_PORT}")


def reserved_port_ranges(
    env: Mapping[str, str] | None = None, *, width: int = MAX_COLOCATED_NIXL_EXPORTERS
) -> list[tuple[str, int, int]]:
    """Return the ranges that other servers of the ranks use: variable, first and last port."""
    first = {name: configured_fixed_port(name, env=env) for name in OTHER_PORTS}
    return [(name, port, min(MAX_PORT, port + width - 1)) for name, port in first.items() if port]


def derive_nixl_prometheus_port(
    base_port: int,
    local_rank: int,
    *,
    max_ranks: int = MAX_COLOCATED_NIXL_EXPORTERS,
    env: Mapping[str, str] | None = None,
) -> int:
    """Return the port of a rank. Raise `ValueError` if the ports of the ranks do not fit."""
    if max_ranks not in range(1, MAX_COLOCATED_NIXL_EXPORTERS + 1):
        raise ConfigError(
            f"{max_ranks} ranks in one pod: at most {MAX_COLOCATED_NIXL_EXPORTERS} can export NIXL metrics"
        )
    if local_rank not in range(max_ranks):
        raise ConfigError(f"local rank {local_rank}: must be below the {max_ranks} ranks of the pod")
    ports = range(base_port, base_port + max_ranks)
    shown = f"NIXL exporter ports {ports[0]} to {ports[-1]} ({NIXL_TELEMETRY_PROMETHEUS_PORT_ENV})"
    if not (ports[0] in PORTS and ports[-1] in PORTS):
        raise ConfigError(f"{shown}: must be between 1 and {MAX_PORT}")
    for name, low, high in reserved_port_ranges(env, width=max_ranks):
        if range(max(low, ports[0]), min(high, ports[-1]) + 1):
            raise ConfigError(f"{shown}: ports {low} to {high} belong to {name}")
    return ports[local_rank]
