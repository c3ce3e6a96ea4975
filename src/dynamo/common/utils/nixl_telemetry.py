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
DIGITS_MAX = 16
SHOWN_CHARS = 32  # Of a text in an error.
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
    return _port(text)


def _port(text: str) -> int:
    """Return the base port as NIXL reads it, decimal or hexadecimal. Raise `ConfigError`."""
    setting = f"{NIXL_TELEMETRY_PROMETHEUS_PORT_ENV}={text[:SHOWN_CHARS]}"
    number = re.fullmatch("0*([0-9]*)|0[xX]0*([0-9a-fA-F]*)", text)
    if not number or not text:
        raise ConfigError(f"{setting}: must be a port, 1 to {MAX_PORT}")
    digits, hexadecimal = number[1] or "0", number[2]
    if len(hexadecimal or digits) > DIGITS_MAX:
        raise ConfigError(f"{setting}: outside the range of ports, 1 to {MAX_PORT}")
    port = int(digits) if hexadecimal is None else int(hexadecimal or "0", 16)
    if port == 0:
        raise ConfigError(f"{setting}: an ephemeral port is unknown to others; must be 1 to {MAX_PORT}")
    if port not in PORTS:
        raise ConfigError(f"{setting}: outside the range of ports, 1 to {MAX_PORT}")
    return port


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
            f"{max_ranks} ranks in one pod cannot each be given a port: at most {MAX_COLOCATED_NIXL_EXPORTERS} export NIXL metrics"
        )
    if local_rank not in range(max_ranks):
        raise ConfigError(f"local rank {local_rank}: outside the reserved range of {max_ranks} ranks of the pod")
    ports = range(base_port, base_port + max_ranks)
    shown = f"NIXL exporter ports {ports[0]} to {ports[-1]} ({NIXL_TELEMETRY_PROMETHEUS_PORT_ENV})"
    if not (ports[0] in PORTS and ports[-1] in PORTS):
        which = "exceeds the maximum port" if ports[0] in PORTS else "outside the range of ports, 1 to"
        raise ConfigError(f"{shown}: {which} {MAX_PORT}")
    for name, low, high in reserved_port_ranges(env, width=max_ranks):
        if range(max(low, ports[0]), min(high, ports[-1]) + 1):
            raise ConfigError(f"{shown}: ports {low} to {high} belong to {name}")
    return ports[local_rank]
